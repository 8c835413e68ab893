"""The methods that the framework's invariants are tested with, and what the framework may expect of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from rayfl.engine.updates.settings import TrainConfig
from tests.support.cases.base import COHORTS, SIZES, Case
from tests.support.cases.exchanges import EXCHANGES
from tests.support.cases.global_models import GLOBAL_MODELS
from tests.support.cases.more_global_models import MORE_GLOBAL_MODELS
from tests.support.cases.noisy_labels import NOISY_LABELS
from tests.support.cases.own_models import OWN_MODELS
from tests.support.cases.partial_models import PARTIAL_MODELS
from tests.support.cases.staged_models import STAGED_MODELS
from tests.support.cases.submodels import SUBMODELS
from tests.support.cases.zeroth_order import ZEROTH_ORDER
from tests.support.experiments import KINDS
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, random_clients

ALGORITHMS = {
    **GLOBAL_MODELS,
    **MORE_GLOBAL_MODELS,
    **NOISY_LABELS,
    **OWN_MODELS,
    **PARTIAL_MODELS,
    **SUBMODELS,
    **EXCHANGES,
    **STAGED_MODELS,
    **ZEROTH_ORDER,
}
_FIRST = {case.algorithm.name: name for name, case in reversed(ALGORITHMS.items())}
CASES = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if _FIRST[case.algorithm.name] == name else pytest.mark.slow)
        for name, case in ALGORITHMS.items()
    ],
)
"""All methods; further settings of the same method are slow."""


def of_kinds(cases: Mapping[str, Case]) -> pytest.MarkDecorator:
    """These cases, of which those that do not stand for a kind are slow."""
    found = [
        pytest.param(case, id=name, marks=() if name in KINDS else pytest.mark.slow) for name, case in cases.items()
    ]
    return pytest.mark.parametrize("case", found)


CASES_OF_KINDS = of_kinds(ALGORITHMS)
TRAIN = TrainConfig(
    rounds=len(COHORTS), clients_per_round=3, local_epochs=2, batch_size=8, lr=0.1, momentum=0.5, weight_decay=0.01
)


def toy_of(case: Case, double: bool = True, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    """The method on small random clients."""
    dtype = torch.float64 if double else torch.float32
    public = 6 if case.public else 0
    settings = {
        "dataset": random_clients(SIZES, dtype=dtype, public=public),
        "task": two_layers(double=double),
        "stages": case.stages,
        **options,
    }
    fitting = train.model_copy(update=case.train)
    if case.everyone:
        fitting = fitting.model_copy(update={"clients_per_round": "all"})
    return Toy(case.algorithm, train=fitting, **settings)
