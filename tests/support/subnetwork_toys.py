"""Small problems of methods with subnetworks of the clients' own, and what these do in plain loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, ListDataset, Toy, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
COHORTS = ([0, 1, 2], [1, 3], [0, 1, 3], [0, 1, 2, 3])
WEIGHTS = ("inner.weight", "head.weight")


def clients() -> ListDataset:
    """Four clients, of which the last has no validation samples."""
    data = random_clients(SIZES)
    parts = [data.load(client)["train"] for client in range(4)]
    held = [(one.x[::2] + 0.3, one.y[::2]) for one in parts[:3]] + [(parts[3].x[:0], parts[3].y[:0])]
    return ListDataset([(one.x, one.y) for one in parts], validation=held)


def toy_of(algorithm: Any, task: Any = None, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    """The method on four small random clients."""
    return Toy(algorithm, clients(), task or two_layers(), train, **options)


def after(algorithm: Any, **options: Any) -> Toy:
    """The same after four rounds."""
    toy = toy_of(algorithm, **options)
    for cohort in COHORTS:
        toy.step(cohort)
    return toy


def logits_of(model: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Logits of two_layers."""
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    return hidden @ model["head.weight"].T + model["head.bias"]


class PlainSubnetworks:
    """What methods with subnetworks have in common, in plain loops: SGD, pruning, and a mean element by element."""

    def __init__(self, method: Any, toy: Toy) -> None:
        self.method, self.toy = method, toy
        self.server: Tree = toy.server["model"]
        self.initial: Tree = dict(self.server)
        self.masks: dict[int, dict[str, np.ndarray]] = {}

    def mask_of(self, client: int) -> dict[str, np.ndarray]:
        """The client's mask; at first it keeps everything."""
        return self.masks.get(client, {name: np.ones(self.server[name].shape, dtype=bool) for name in WEIGHTS})

    def cut(self, model: Tree, mask: Mapping[str, np.ndarray]) -> Tree:
        """The model with zeros where the mask keeps nothing."""
        return {
            name: leaf * torch.from_numpy(mask[name]).to(leaf) if name in mask else leaf for name, leaf in model.items()
        }

    def epochs(self, model: Tree, mask: Mapping[str, np.ndarray], client: int, round: int) -> list[Tree]:
        """The model after each epoch of SGD, of which pruned elements take no part."""
        samples = self.toy.dataset.load(client)["train"]
        steps = -(-len(samples.y) // 4)
        plan = plan_batches(len(samples.y), 4, 2 * steps, self.toy.context.streams.generator("batches", round, client))
        speed = {name: torch.zeros_like(leaf) for name, leaf in model.items()}
        found = []
        for number, index in enumerate(plan.batches(CPU), 1):
            leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
            F.cross_entropy(logits_of(leaves, samples.x[index]), samples.y[index]).backward()
            for name, leaf in model.items():
                gradient = leaves[name].grad
                assert gradient is not None
                speed[name] = 0.5 * speed[name] + gradient + 0.01 * leaf
                model = self.cut({**model, name: leaf - 0.1 * speed[name]}, mask)
            if number % steps == 0:
                found.append(model)
        return found

    def fewer(self, mask: Mapping[str, np.ndarray], model: Tree) -> dict[str, np.ndarray]:
        """The mask without the least elements, one after the other."""
        found = {}
        for name, kept in mask.items():
            values, left = model[name].numpy().ravel(), kept.ravel().copy()
            count = int(self.method.prune_share * left.sum() + 1e-9)
            for place in sorted(range(len(left)), key=lambda at: abs(values[at])):
                gone = int((~left).sum())
                if left[place] and count > 0 and gone + 1 <= self.method.target * len(left) + 1e-9:
                    left[place], count = False, count - 1
            found[name] = left.reshape(kept.shape)
        return found

    def accuracy(self, client: int, model: Tree) -> float:
        """On the client's validation samples, or its training samples where it has none."""
        parts = self.toy.dataset.load(client)
        part = parts["validation"] if self.method.select_on == "validation" and client != 3 else parts["train"]
        return float((logits_of(model, part.x).argmax(1) == part.y).double().mean())

    def update(self, client: int, round: int) -> tuple[Tree, dict[str, np.ndarray]]:
        """The model that a client has trained, and its new mask."""
        raise NotImplementedError

    def round(self, round: int, cohort: list[int]) -> None:
        """The mean of each element over those that keep it."""
        sums = {name: torch.zeros_like(leaf) for name, leaf in self.server.items()}
        counts = {name: torch.zeros_like(leaf) for name, leaf in self.server.items()}
        for client in cohort:
            model, mask = self.update(client, round)
            self.masks[client] = mask
            weight = 1 if self.method.aggregation == "uniform" else SIZES[client]
            for name, leaf in model.items():
                kept = torch.from_numpy(mask[name]) if name in mask else torch.ones_like(leaf)
                sums[name], counts[name] = sums[name] + weight * kept * leaf, counts[name] + weight * kept
        if self.method.aggregation == "population":
            rest = sum(SIZES[client] for client in range(4) if client not in cohort)
            sums = {name: total + rest * self.server[name] for name, total in sums.items()}
            counts = {name: count + rest for name, count in counts.items()}
        self.server = {
            name: torch.where(counts[name] > 0, sums[name] / counts[name], leaf) for name, leaf in self.server.items()
        }
