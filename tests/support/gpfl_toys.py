"""GPFL on small random clients, and the authors' valve."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from algorithms.gpfl import GPFL
from rayfl.params import Tree, map_leaves
from rayfl.tasks.base import Batch
from tests.support.partial_toys import initial, toy_of
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy


class Valve(nn.Module):
    """The authors' conditional valve."""

    def __init__(self, width: int, tensors: Tree) -> None:
        super().__init__()
        for name in ("gamma", "beta"):
            layer, norm, found = nn.Linear(width, width), nn.LayerNorm(width), tensors[name]
            layer.weight.data, layer.bias.data = found["matrix"], found["offset"]
            norm.weight.data, norm.bias.data = found["norm_gain"], found["norm_offset"]
            setattr(self, name, nn.Sequential(layer, nn.ReLU(), norm))

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        gamma, beta = self.gamma(condition), self.beta(condition)
        return torch.relu(features * (gamma + 1) + beta)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def example(weight: float = 0.5) -> tuple[GPFL, Toy, Tree, Batch, Tree]:
    """A method, its toy, what is trained, a mini-batch and what is frozen."""
    method = GPFL(guidance_weight=weight)
    toy = toy_of(method, task=two_layers())
    trained = {"model": initial(toy), "valve": toy.server["valve"], "embedding": toy.server["embedding"]}
    trained = map_leaves(lambda leaf: leaf + 0.1 * drawn(1, *leaf.shape), trained)
    part = toy.dataset.load(1)["train"]
    frozen = {"embedding": drawn(2, 3, 7), "global": drawn(3, 7), "personal": drawn(4, 7)}
    return method, toy, trained, Batch(part.x, part.y), frozen
