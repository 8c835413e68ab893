"""Small problems for methods whose clients keep target networks, looked at step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.fedema import FedEMA
from algorithms.fedu import FedU
from rayfl.data.images.augment import AugmentConfig
from rayfl.data.images.variations import Variations
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import InputSpec
from rayfl.models.networks.siamese import Heads, siamese
from rayfl.models.zoo import TwoNN
from rayfl.params import Tree
from rayfl.tasks.self_supervised import ObjectiveName, SelfSupervised, ViewLoss
from tests.support.toys import ListDataset, Toy

SPEC = InputSpec("image", (1, 4, 4), 3)
TRAIN = TrainConfig(rounds=3, clients_per_round="all", local_epochs=1, batch_size=5, lr=0.1, momentum=0.5)
SIZES = (10, 15, 10)
AUGMENT = AugmentConfig(crop=1, flip=True, jitter=1).build(SPEC, np.zeros(1, np.float32), views=2)


def learned(objective: ObjectiveName = "byol", norm: Any = "none") -> SelfSupervised:
    heads = Heads(4, 9, 3 if objective == "simsiam" else 2, objective != "simclr", norm)
    task = SelfSupervised(
        siamese(TwoNN(hidden=(8,)).network(SPEC), heads, SPEC, "two_nn"), (), SPEC, ViewLoss(objective)
    )
    assert AUGMENT is not None
    task.views = Variations.of_evaluation(AUGMENT, np.random.default_rng(0))
    return task


def clients(sizes: Sequence[int] = SIZES) -> ListDataset:
    generator = torch.Generator().manual_seed(3)
    return ListDataset(
        [(torch.rand(n, 1, 4, 4, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes],
        classes=3,
    )


def toy(algorithm: Any, task: SelfSupervised | None = None, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, clients(), task or learned(), train, augmentation=AUGMENT, **options)


def starts(monkeypatch: pytest.MonkeyPatch) -> dict[int, Tree]:
    """By client, the network that it has begun with last, from now on."""
    found: dict[int, Tree] = {}

    def recording(original: Any) -> Any:
        def recorded(self: Any, client: Any, model: Tree) -> Tree:
            found[client.id] = original(self, client, model)
            return found[client.id]

        return recorded

    monkeypatch.setattr(FedEMA, "mixture", recording(FedEMA.mixture))
    monkeypatch.setattr(FedU, "chosen", recording(FedU.chosen))
    return found


def sections(method: str, task: Any, train: Any) -> dict[str, Any]:
    return {
        "dataset": "digits",
        "partition": {"name": "iid", "num_clients": 12},
        "holdout": {"test": 0.3},
        "task": {"name": "self_supervised", "hidden": 16, "projection": 8, **task},
        "model": {"name": "two_nn", "hidden": [16]},
        "augment": {"crop": 1, "jitter": 1},
        "algorithm": method,
        "train": {"rounds": 2, "clients_per_round": 4, "local_epochs": 1, "lr": 0.05, "batch_size": 10, **train},
        "cluster": {"backend": "inline"},
    }
