"""What rounds leave behind goes when nothing refers to it, so that an actor may look for garbage rarely."""

from __future__ import annotations

import gc

import pytest
from torch import Tensor

from actors.processes.garbage import settle
from tests.support.cases import ALGORITHMS, of_kinds, toy_of
from tests.support.cases.base import Case


@pytest.mark.two_cases
@pytest.mark.parametrize("mode", [pytest.param("looped", marks=pytest.mark.slow), "vectorized"])
@of_kinds(ALGORITHMS)
def test_no_tensor_waits_for_the_collector(case: Case, mode: str) -> None:
    toy = toy_of(case, mode=mode)
    toy.step()
    gc.collect()
    gc.disable()
    try:
        toy.run()
        toy.scores()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = [one for one in gc.garbage if isinstance(one, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not found


def test_an_actor_looks_rarely_and_not_at_what_it_begins_with() -> None:
    before, kept = gc.get_threshold(), gc.get_freeze_count()
    try:
        settle()
        assert gc.get_threshold()[0] >= 50_000 and gc.get_threshold()[1:] == before[1:]
        assert gc.get_freeze_count() > kept
    finally:
        gc.set_threshold(*before)
