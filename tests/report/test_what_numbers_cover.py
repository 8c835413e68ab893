"""What numbers are about: the same clients at every evaluation, and those that a metric is defined for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from algorithms.registry import METHODS
from rayfl.report.columns import columns_of
from rayfl.report.comparison import compare
from rayfl.report.formats import numbers
from rayfl.report.lines import Wanted
from rayfl.runs.finding import load_run
from tests.report.test_comparison import configured

Copied = Callable[..., Path]


def test_evaluations_of_drawn_clients_have_no_best_round(copied: Copied, finished: Path) -> None:
    """The best of small samples that differ is the luckiest of them; the last evaluation is of all."""
    asked = [configured(copied("fedavg-0"), evaluation={"clients": 2}), load_run(str(finished / "fedavg-1"), METHODS)]
    for run, known in zip(asked, (False, True), strict=True):
        names = ("top1", "top1_best_round", "pooled_top1_best_round")
        comparison = compare([run], Wanted([columns_of([run])[name] for name in names]))
        means = {row["metric"]: row["mean"] for row in numbers({"": comparison}) if row["model"] == "global"}
        assert means["top1"] is not None
        assert (means["top1_best_round"] is not None, means["pooled_top1_best_round"] is not None) == (known, known)
        said = [note for note in comparison.notes if "no best round" in note and "evaluation.clients" in note]
        assert bool(said) is not known and all(run.uri in note for note in said)
