"""Federated problems with planted structure, on which the reason for a method to exist shows."""

from __future__ import annotations

import numpy as np
import torch

from tests.toys import ListDataset, Toy

CLASSES = 3


def one_rule(clients: int, train: int, seed: int, noise: float = 0.0, skew: bool = False) -> ListDataset:
    """Clients that share a linear rule, each with few samples and a large validation part of clean labels.

    Args:
        clients: how many clients.
        train: training samples of each.
        seed: of the data.
        noise: share of the training labels that are redrawn.
        skew: whether most training samples of client k are of class k modulo the classes.
    """
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(5, CLASSES, generator=generator, dtype=torch.float64)
    parts, validation = [], []
    for client in range(clients):
        x = torch.randn(20 * train + 200, 5, generator=generator, dtype=torch.float64)
        y = (x @ rule).argmax(1)
        validation.append((x[-200:], y[-200:]))
        x, y = x[:-200], y[:-200]
        if skew:
            kept = (y == client % CLASSES) | (torch.rand(len(y), generator=generator) < 0.05)
            x, y = x[kept], y[kept]
        redrawn = torch.rand(train, generator=generator) < noise
        labels = torch.randint(CLASSES, (train,), generator=generator)
        parts.append((x[:train], torch.where(redrawn, labels, y[:train])))
    return ListDataset(parts, CLASSES, validation=validation)


def two_domains(clients: int, train: int, seed: int) -> ListDataset:
    """Clients that share a linear rule where the last input is positive, and have one of their own where it is not."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(4, CLASSES, generator=generator, dtype=torch.float64)
    parts, validation = [], []
    for _ in range(clients):
        own = torch.randn(4, CLASSES, generator=generator, dtype=torch.float64)
        x = torch.randn(train + 200, 5, generator=generator, dtype=torch.float64)
        x[:, -1] = 3 * x[:, -1].sign()
        y = torch.where(x[:, -1] > 0, (x[:, :-1] @ common).argmax(1), (x[:, :-1] @ own).argmax(1))
        parts.append((x[:train], y[:train]))
        validation.append((x[train:], y[train:]))
    return ListDataset(parts, CLASSES, validation=validation)


def validation_loss(toy: Toy, row: str) -> float:
    """The mean over clients of a row's loss on the validation parts."""
    return float(np.mean([rows[row].loss for rows in toy.scores(split="validation").values()]))
