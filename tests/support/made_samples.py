"""Samples that a generator makes, with PyTorch's own layers and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfl.params import Tree


class Rows(nn.Module):
    """A generator of vectors, as the authors of TARGET have one of images."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        unfolds, writes = tree["unfolds"], tree["writes"]
        wide = len(unfolds["offset"])
        self.layers = nn.Sequential(
            nn.Linear(4, wide), nn.BatchNorm1d(wide), nn.LeakyReLU(0.2), nn.Linear(wide, 5), nn.Sigmoid()
        ).double()
        values = unfolds["matrix"], unfolds["offset"], unfolds["norm_gain"], unfolds["norm_offset"]
        for parameter, value in zip(self.layers.parameters(), (*values, *writes.values()), strict=True):
            parameter.data.copy_(value)


def made_rows(
    method: Any, network: Rows, z: Tensor, low: Tensor, high: Tensor, value: Callable[[Tensor], Tensor]
) -> Tensor:
    """The samples of a draw of noise; the network has learned afterwards.

    Args:
        method: has the options of generators.
        network: G.
        z: noise.
        low: least value of each number of an input.
        high: the largest.
        value: what is to fall, of samples.
    """
    z = z.clone().requires_grad_()
    groups: list[dict[str, Any]] = [{"params": network.parameters()}, {"params": [z], "lr": method.noise_lr}]
    adam = torch.optim.Adam(groups, lr=method.generator_lr, betas=(0.5, 0.999))
    for _ in range(method.generator_steps):
        adam.zero_grad()
        value(low + (high - low) * network.layers(z)).backward()  # type: ignore[no-untyped-call]
        adam.step()
    found: Tensor = (low + (high - low) * network.layers(z)).detach()
    return found


def kl(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """KL of each row."""
    wanted = F.softmax(teacher / temperature, 1)
    return F.kl_div(F.log_softmax(student / temperature, 1), wanted, reduction="none").sum(1)
