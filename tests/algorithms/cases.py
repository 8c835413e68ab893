"""The methods that the framework's invariants are tested with, and what the framework may expect of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from algorithms.base import Algorithm
from algorithms.fedavg import FedAvg
from algorithms.fedphp import FedPHP
from algorithms.fedprox import FedProx
from algorithms.scaffold import Scaffold
from algorithms.superfed import SuPerFed
from rayfl.engine.settings import TrainConfig
from rayfl.models.base import Network
from tests.toys import Toy, random_clients, two_layers


def whole(network: Network) -> int:
    """Scalars of one model."""
    return network.num_parameters


def twice(network: Network) -> int:
    """Scalars of two models."""
    return 2 * network.num_parameters


def all_names(network: Network) -> Iterable[str]:
    """Names of all parameters."""
    return network.parameter_names


@dataclass(frozen=True)
class Case:
    """A method, and what the framework may expect of it.

    Attributes:
        algorithm: the method.
        down: scalars that the server sends to a client of the cohort in a round (any round).
        up: scalars that a client uploads.
        uploads: last components of the paths of what a client uploads.
        private: top-level keys of a client's state.
        averages: whether the server has a ``model``, which is an average of the clients' models and a row of the
            results named ``global``.
        everyone: whether all clients take part in every round, whoever is sampled.
        relabels: whether results follow the clients when these are given other ids (not if the server draws by id).
        train: changes of the training section the method needs.
        public: whether the method needs public samples.
    """

    algorithm: Algorithm
    down: Callable[[Network], int] = whole
    up: Callable[[Network], int] = whole
    uploads: Callable[[Network], Iterable[str]] = all_names
    private: frozenset[str] = frozenset()
    averages: bool = True
    everyone: bool = False
    relabels: bool = True
    train: dict[str, Any] = field(default_factory=dict)
    public: bool = False

    def cohorts(self) -> list[list[int]]:
        """The cohorts of the rounds."""
        return [list(range(len(SIZES)))] * len(COHORTS) if self.everyone else [list(cohort) for cohort in COHORTS]


ALGORITHMS = {
    "fedavg": Case(FedAvg(finetune_epochs=1)),
    "fedprox": Case(FedProx(proximal_weight=0.1, finetune_epochs=1)),
    "scaffold": Case(Scaffold(momentum_on_corrected=True), down=twice, up=twice, private=frozenset({"control"})),
    "superfed-mm": Case(SuPerFed(mode="mm", start=0.25), private=frozenset({"local"})),
    "superfed-lm": Case(SuPerFed(mode="lm", start=0.25), private=frozenset({"local"})),
    "fedphp": Case(FedPHP(transfer_weight=0.1), private=frozenset({"hpm", "selections"})),
}

CASES = pytest.mark.parametrize("case", ALGORITHMS.values(), ids=ALGORITHMS.keys())
SIZES = (9, 12, 6, 10, 7)
COHORTS = ([0, 2], [1, 2, 4], [0, 4], [2, 3])
TRAIN = TrainConfig(
    rounds=len(COHORTS), clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)


def toy_of(case: Case, double: bool = True, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    """The method on small random clients."""
    dtype = torch.float64 if double else torch.float32
    public = 6 if case.public else 0
    settings = {
        "dataset": random_clients(SIZES, dtype=dtype, public=public),
        "task": two_layers(double=double),
        **options,
    }
    fitting = train.model_copy(update=case.train)
    if case.everyone:
        fitting = fitting.model_copy(update={"clients_per_round": "all"})
    return Toy(case.algorithm, train=fitting, **settings)
