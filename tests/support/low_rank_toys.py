"""Two layers with adapters over a fixed base, in float64; and local updates of them in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.base import Algorithm
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.models.base import ClassificationModel
from rayfl.params import Tree
from rayfl.tasks.classification import Classification
from tests.support.toy_networks import DoubleNetwork
from tests.support.toys import CPU, Toy, random_clients

SCALE, RANK = 1.5, 2
SHAPES = {"inner": (7, 5), "outer": (6, 7)}
"""Outputs and inputs of the layers with adapters."""
SIZES = (9, 12, 1, 10)
COHORTS = ([0, 1, 2], [1, 3], [2], [0, 1, 2, 3], [0, 3])
TRAIN = TrainConfig(rounds=5, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.5, lr_decay=0.8)


def _base() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) / 2 for name, shape in SHAPES.items()}


BASE = _base()


class _Adapter(nn.Module):
    """The factors of a layer, of which B is zero."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)


class _Layers(ClassificationModel):
    """What is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = (_Adapter(*shape) for shape in SHAPES.values())
        self.head = nn.Linear(6, 3)

    def features(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def classify(self, features: Tensor) -> Tensor:
        raise NotImplementedError


class LowRankNetwork(DoubleNetwork):
    """A network with what methods read of one with adapters."""

    rank, scale = RANK, SCALE

    def __init__(self) -> None:
        super().__init__(_Layers)
        named = {part: tuple(name for name in self.parameter_names if f"lora_{part}" in name) for part in "AB"}
        adapters = tuple(name for name in self.parameter_names if ".lora_" in name)
        head = tuple(name for name in self.parameter_names if ".lora_" not in name)
        self.groups = {"lora_a": named["A"], "lora_b": named["B"], "adapters": adapters, "head": head}

    def logits(
        self, tree: Mapping[str, Tensor], x: Tensor, *, training: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        return forward(tree, x)


def forward(tree: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Logits: every layer is W + D + s B A, the last one has no adapter."""
    for site in SHAPES:
        weight = BASE[site] + SCALE * tree[f"{site}.lora_B.weight"] @ tree[f"{site}.lora_A.weight"]
        if f"{site}.delta" in tree:
            weight = weight + tree[f"{site}.delta"]
        x = torch.relu(x @ weight.mT)
    return x @ tree["head.weight"].mT + tree["head.bias"]


def low_rank_toy(algorithm: Algorithm, mode: str = "looped", **options: Any) -> Toy:
    """A method on four clients."""
    settings = {"train": TRAIN, **options}
    return Toy(algorithm, random_clients(SIZES), Classification(LowRankNetwork()), mode=mode, **settings)


def trained_alone(toy: Toy, model: Tree, names: Iterable[str], client: int, round: int) -> Tree:
    """What plain SGD makes of some tensors of a model, while the others stay as they are.

    Args:
        toy: gives the samples and the random streams.
        model: where it begins, left as it is.
        names: what is trained.
        client: who trains.
        round: 0-indexed.
    """
    part, eta = toy.dataset.load(client)["train"], 0.5 * 0.8**round
    generator = toy.context.streams.generator("batches", round, client)
    own = dict(model)
    for index in plan_batches(len(part.y), 4, 2 * -(-len(part.y) // 4), generator).batches(CPU):
        moved = {name: own[name].clone().requires_grad_() for name in names}
        value = F.cross_entropy(forward({**own, **moved}, part.x[index]), part.y[index])
        slopes = torch.autograd.grad(value, list(moved.values()))
        own |= {name: own[name] - eta * slope for name, slope in zip(moved, slopes, strict=True)}
    return own


def shares_of(cohort: Sequence[int], weights: str) -> list[float]:
    """p_k of a cohort."""
    if weights == "uniform":
        return [1 / len(cohort)] * len(cohort)
    return [SIZES[client] / sum(SIZES[other] for other in cohort) for client in cohort]


def mean(models: Sequence[Tree], shares: Sequence[float], name: str) -> Tensor:
    """sum_k p_k of a tensor."""
    return torch.stack([share * model[name] for share, model in zip(shares, models, strict=True)]).sum(0)


def mean_product(models: Sequence[Tree], shares: Sequence[float], site: str) -> Tensor:
    """sum_k p_k B_k A_k."""
    products = [model[f"{site}.lora_B.weight"] @ model[f"{site}.lora_A.weight"] for model in models]
    return torch.stack([share * product for share, product in zip(shares, products, strict=True)]).sum(0)
