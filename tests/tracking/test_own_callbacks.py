"""Listeners of the user change no run, and mistakes in them are said before it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import rayfl
from rayfl import Callback
from rayfl.errors import ConfigError
from rayfl.tracking.own_callbacks import HOOKS, check_callbacks
from tests.support.experiments import small_experiment

VOLATILE = ("timestamp", "time_total_s")


class Changing(Callback):
    """Writes into all that it is given, as one that prints percentages might."""

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            assert isinstance(row, dict)
            row["top1"] = 100.0
            row.pop("loss")

    def on_phases(self, rounds_completed: int, seconds: Mapping[str, float]) -> None:
        assert isinstance(seconds, dict)
        seconds.clear()

    def on_costs(self, rounds_completed: int, costs: Mapping[str, float]) -> None:
        assert isinstance(costs, dict)
        costs.clear()


def test_a_listener_changes_neither_tables_nor_what_other_listeners_write(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [Changing()]):
        config = small_experiment(tmp_path / str(len(callbacks)), "run", "fedavg", backend="inline")
        result = rayfl.run(config, callbacks=callbacks)
        folder = Path(result.path)
        lines = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
        written = [{name: value for name, value in line.items() if name not in VOLATILE} for line in lines]
        keys = [
            [sorted(json.loads(line)) for line in (folder / name).read_text().splitlines()]
            for name in ("timings.jsonl", "costs.jsonl")
        ]
        found.append((result.rounds, result.clients, written, keys))
    assert found[0] == found[1]
    assert found[0][2]


class Waiting(Callback):
    async def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:  # type: ignore[override]
        raise AssertionError


class Short(Callback):
    def on_round(self, rounds_completed: int) -> None:  # type: ignore[override]
        raise AssertionError


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (Waiting(), r"^callbacks: Waiting\.on_round is async def, and would never run"),
        (Short(), r"^callbacks: Short\.on_round must take \(rounds_completed, cohort, seconds\), got \(rounds_comp"),
    ],
)
def test_hooks_that_cannot_be_called_are_refused_before_the_start(
    callback: Callback, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        rayfl.run(small_experiment(tmp_path, "run", "fedavg", backend="inline"), callbacks=[callback])
    assert not (tmp_path / "run").exists()


class Misspelt(Callback):
    def on_evaluations(self, rows: Any) -> None: ...

    def on_train_begin(self) -> None: ...

    def on_used(self) -> None: ...

    def on_end(self, *given: Any) -> None:
        self.on_used()


def test_misspelt_hooks_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        rayfl.run(small_experiment(tmp_path, "run", "fedavg", backend="inline"), callbacks=[Misspelt(), Misspelt()])
    said = [one.getMessage() for one in caplog.records if one.getMessage().startswith("callbacks")]
    assert said == [
        "callbacks: nothing calls Misspelt.on_evaluations: did you mean 'on_evaluation'?",
        f"callbacks: nothing calls Misspelt.on_train_begin: hooks are {', '.join(HOOKS)}",
    ]
    assert check_callbacks([Changing()]) == []
