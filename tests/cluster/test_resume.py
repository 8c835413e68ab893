"""Every method continues an interrupted run to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

import rayfl
from rayfl import Callback
from tests.cluster.experiments import METHODS, assert_same, outcome, small_experiment


class Interrupt(Callback):
    """Ends the run after a round, as Ctrl-C would."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_round(self, rounds_completed: int, cohort: list[int], seconds: float) -> None:
        if rounds_completed == self._after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_run_continues_to_the_same_bits(method: str, tmp_path: Path) -> None:
    rayfl.run(small_experiment(tmp_path, "whole", method, backend="inline"))
    pieces = small_experiment(tmp_path, "pieces", method, backend="inline")
    for after in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            rayfl.run(pieces, callbacks=[Interrupt(after)])
    rayfl.run(pieces)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))
