"""Small federated problems over the adapters of a tiny vision transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from algorithms.base import Algorithm
from rayfl.engine.updates.settings import TrainConfig
from rayfl.tasks.classification import Classification
from tests.support.bases import network
from tests.support.toys import ListDataset, Toy

SIZES = (5, 8, 9, 6)
TRAIN = TrainConfig(rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1)


def images(sizes: Sequence[int] = SIZES, seed: int = 0) -> ListDataset:
    """Clients with random images of random classes."""
    generator = torch.Generator().manual_seed(seed)
    return ListDataset([random_images(n, generator) for n in sizes], classes=10)


def random_images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images and labels."""
    return torch.rand(count, 1, 8, 8, generator=generator), torch.randint(0, 10, (count,), generator=generator)


def adapted_toy(algorithm: Algorithm, mode: str = "looped", model: Any = None, **options: Any) -> Toy:
    """The method on four clients, two of which are sampled in each of three rounds.

    Args:
        algorithm: the method.
        mode: of the engine.
        model: options of the section ``model``.
        **options: of :class:`tests.support.toys.Toy`.
    """
    settings = {"dataset": images(), "train": TRAIN, **options}
    return Toy(algorithm, task=Classification(network("vit", **(model or {}))), mode=mode, **settings)
