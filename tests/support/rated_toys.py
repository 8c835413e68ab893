"""Users with rows of items, of which each chose the first, in float64; and plain formulas for matrix factorization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import InputSpec
from rayfl.models.networks.recommenders import MatrixFactorization
from rayfl.params import Tree
from rayfl.tasks.recommendation import Recommendation
from tests.support.toy_networks import DoubleNetwork
from tests.support.toys import CPU, ListDataset, Toy

SIZES = (8, 12, 6, 10)
OTHERS, ITEMS = 4, 9
SPEC = InputSpec("tokens", (1 + OTHERS,), 1, ITEMS, "ranking")
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.3, momentum=0.5, weight_decay=0.01
)
COHORTS = ([0, 1, 2], [1, 3], [0, 1, 3], [2])


def rated_clients(sizes: Sequence[int] = SIZES) -> ListDataset:
    """Users of several numbers of rows."""
    generator = torch.Generator().manual_seed(4)
    clients = []
    for n in sizes:
        x = torch.stack([torch.randperm(ITEMS, generator=generator)[: 1 + OTHERS] for _ in range(n)])
        clients.append((x, torch.zeros(n, dtype=torch.int64)))
    return ListDataset(clients, 1)


def rated_task(model: Any = None) -> Recommendation:
    """A model that scores items; each step reads all others of a row, so that nothing is drawn."""
    config = model or MatrixFactorization(embedding=3, init_std=0.5)
    network = DoubleNetwork(lambda: config.whole(SPEC))
    network.groups = config.network(SPEC).groups
    return Recommendation(network, (), SPEC, negatives=OTHERS)


def rated_toy(algorithm: Any, train: TrainConfig = TRAIN, model: Any = None, **options: Any) -> Toy:
    """The method on four users."""
    return Toy(algorithm, rated_clients(), rated_task(model), train, **options)


def cross_entropy(items: Tensor, user: Tensor, x: Tensor) -> Tensor:
    """The mean over rows and items of the binary cross-entropy of p . q_i, 1 for the first item of a row."""
    scores = items[x] @ user[0]
    chosen = torch.zeros_like(scores)
    chosen[:, 0] = 1
    return F.binary_cross_entropy_with_logits(scores, chosen)


def plain_batches(toy: Toy, client: int, round: int) -> list[Tensor]:
    """The rows of each mini-batch of a client's round."""
    samples, size = toy.dataset.load(client)["train"], toy.train.batch_size or 1
    steps = toy.train.local_epochs * -(-len(samples.y) // size)
    plan = plan_batches(len(samples.y), size, steps, toy.context.streams.generator("batches", round, client))
    return [samples.x[index] for index in plan.batches(CPU)]


def weighted(weights: Any, trees: Sequence[Tree]) -> Tree:
    """A sum of trees."""
    return {name: sum(float(w) * tree[name] for w, tree in zip(weights, trees, strict=True)) for name in trees[0]}
