"""What is said before a run in which a method would do nothing of its own."""

from __future__ import annotations

import pytest

from algorithms.base import Algorithm
from algorithms.fedewc import FedEWC
from algorithms.fedld import FedLD
from algorithms.fedlsr import FedLSR
from algorithms.fedweit import FedWeIT
from algorithms.flwf import FLwF
from algorithms.target import TARGET
from rayfl.data.partitions.stage import NoStages
from tests.support.staged_toys import staged_toy


@pytest.mark.parametrize("method", [FedEWC(), FedWeIT(), FLwF(), TARGET()], ids=lambda method: method.name)
def test_methods_for_data_that_change_say_where_these_do_not(method: Algorithm) -> None:
    (said,) = method.remarks(staged_toy(method, stages=NoStages()).context)
    assert said.startswith("the clients' data stay as they are (the section stages), so that this is ")
    assert not method.remarks(staged_toy(method).context)


def test_a_first_phase_as_long_as_the_run_is_said() -> None:
    context = staged_toy(FedLD()).context
    (said,) = FedLD(mean_rounds=context.rounds).remarks(context)
    assert said.startswith("no step along principal directions: algorithm.mean_rounds is ")
    assert not FedLD(mean_rounds=context.rounds - 1).remarks(context)


def test_a_temperature_that_nothing_has_is_said() -> None:
    (said,) = FedLSR(rotate=0.0, temperature=0.5).idle_settings()
    assert "algorithm.temperature has no effect: algorithm.rotate is 0" in said
    assert not FedLSR(rotate=0.0, temperature=0.5, entropy_weight=0.1).idle_settings()
