"""What clients and server know of each class: how many samples it has, and their mean features (prototypes)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.params import Tree
from rayfl.tasks.base import Batch


def class_counts(labels: Tensor, classes: int) -> Tensor:
    """n_y, samples by class, shape (C,), float64."""
    return F.one_hot(labels, classes).double().sum(0)


def memberships(batch: Batch, like: Tensor) -> Tensor:
    """1 where a sample of a mini-batch is of a class, 0 elsewhere and for padding; shape (b, C).

    Args:
        batch: the mini-batch.
        like: has an entry a class along dimension 0, and the type wanted.
    """
    # F.one_hot looks at its values, which vmap(grad()) refuses
    members = (batch.y[:, None] == torch.arange(len(like), device=batch.y.device)).to(like)
    return members if batch.mask is None else members * batch.mask[:, None]


def class_means(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Samples n_y by class, shape (C,), and their mean features mu_y, shape (C, f), zero without samples; float64."""
    members = F.one_hot(labels, classes).double()
    counts = members.sum(0)
    return counts, members.T @ features.double() / counts.clamp(min=1)[:, None]


def renewed(prototypes: Tree, sums: Tensor, counts: Tensor) -> Tree:
    """Prototypes after a round from the number of samples (up to a common factor) and the sum of each class."""
    present = counts > 0
    means = torch.where(present[:, None], sums / torch.where(present, counts, 1)[:, None], prototypes["means"])
    return {"means": means, "exist": torch.where(present, 1, prototypes["exist"])}
