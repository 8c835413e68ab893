"""Federated problems with planted structure, on which the reason for a method to exist shows."""

from __future__ import annotations

import numpy as np
import torch

from algorithms.base import Algorithm
from rayfl.engine.updates.settings import TrainConfig
from tests.support.toy_networks import softmax_regression
from tests.support.toys import ListDataset, Toy

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


def related_clients(own: float, samples: int = 20, clients: int = 12, seed: int = 0) -> ListDataset:
    """Clients with two classes whose linear rules are a common one plus ``own`` times one of their own.

    Args:
        own: how much clients differ, 0 for one rule.
        samples: training samples of each; validation parts have 200.
        clients: how many clients.
        seed: of the data.
    """
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(10, generator=generator, dtype=torch.float64)
    parts, validation = [], []
    for _ in range(clients):
        rule = common + own * torch.randn(10, generator=generator, dtype=torch.float64)
        x = torch.randn(samples + 200, 10, generator=generator, dtype=torch.float64)
        y = (x @ rule > 0).long()
        parts.append((x[:samples], y[:samples]))
        validation.append((x[samples:], y[samples:]))
    return ListDataset(parts, 2, validation=validation)


def accuracies(algorithm: Algorithm, clients: ListDataset, lr: float = 0.3, rounds: int = 60) -> dict[str, float]:
    """Mean accuracy over clients of every row on the validation parts, after rounds of one epoch with all clients."""
    train = TrainConfig(rounds=rounds, clients_per_round="all", local_epochs=1, batch_size=10, lr=lr)
    toy = Toy(algorithm, clients, softmax_regression(10, 2), train)
    toy.run()
    scores = toy.scores(final=True, split="validation").values()
    return {row: float(np.mean([rows[row].top1 for rows in scores])) for row in next(iter(scores))}


def validation_loss(toy: Toy, row: str) -> float:
    """The mean over clients of a row's loss on the validation parts."""
    return float(np.mean([rows[row].loss for rows in toy.scores(split="validation").values()]))
