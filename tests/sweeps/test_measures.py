from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from rayfl.results.schemas import METRICS
from rayfl.sweeps.measures import Measure, evaluations

MIXED = SimpleNamespace(sweep="lambda", personalized="lambda=0.5")
PLAIN = SimpleNamespace(sweep=None, personalized="finetuned")


def row(model: str, split: str, top1: float, selected_on: str = "", round: int = 4, **other: Any) -> dict[str, Any]:
    key = {"round": round, "cohort": "all", "phase": "received", "model": model, "split": split}
    return {
        **key,
        "selected_on": selected_on,
        "clients": 2,
        "top1": top1,
        "loss": 1 - top1,
        "top5": 1.0,
        "ece": 0.1,
        "mce": 0.2,
        **{f"{metric}_std": 0.05 for metric in METRICS},
    } | other


SWEPT = [
    row("global", "validation", 0.3),
    row("lambda=0.0", "validation", 0.3),
    row("lambda=0.5", "validation", 0.8),
    row("lambda=1.0", "validation", 0.7),
    row("lambda=1.0", "test", 0.9),
    row("lambda=best", "test", 0.6, "validation"),
    row("lambda=best", "test", 0.95, "validation per client"),
    row("lambda=best", "test", 0.9, "test"),
    row("lambda=0.5", "validation", 0.99, cohort="selected"),
]


def test_the_member_of_a_sweep_is_the_judges() -> None:
    assert Measure().value(SWEPT, MIXED) == 0.8
    assert Measure().row(SWEPT, MIXED, "test")["top1"] == 0.6  # type: ignore[index]
    on_test = Measure(judge="test")
    assert on_test.value(SWEPT, MIXED) == 0.9
    assert Measure("loss").value(SWEPT, MIXED) == pytest.approx(0.2)
    assert Measure(model="global").value(SWEPT, MIXED) == 0.3


def test_equal_members_whose_last_bits_differ_are_ties() -> None:
    """The first is meant, as it is for the test row that is chosen by validation."""
    low, high = 0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1
    for first, second in ((low, high), (high, low)):
        rows = [row(f"lambda={value}", "validation", top1) for value, top1 in (("0.0", first), ("0.5", second))]
        found = Measure().row(rows, MIXED, "validation")
        assert found is not None
        assert found["model"] == "lambda=0.0"


def test_a_model_that_is_not_there_has_no_value() -> None:
    rows = [row("finetuned", "test", 0.5)]
    assert Measure().value(rows, PLAIN) is None
    assert Measure(judge="test").value(rows, PLAIN) == 0.5
    assert Measure(model="global", judge="test").value(rows, PLAIN) is None
    assert Measure().value([], MIXED) is None


def test_the_summary_is_of_the_last_evaluation() -> None:
    rows = [row("finetuned", "validation", 0.9, round=2), row("finetuned", "validation", 0.4)]
    summary = Measure().summary(pa.Table.from_pylist(rows), PLAIN)
    assert summary["validation_top1"] == 0.4
    assert (summary["validation_clients"], summary["validation_top1_std_over_clients"]) == (2, 0.05)
    assert summary["test_top1"] is None
    assert sorted(evaluations(rows)) == [2, 4]


def test_clients_are_those_for_which_the_metric_is_defined() -> None:
    rows = [row("lambda=best", "test", 0.6, "validation", choice="lambda=0.5"), row("lambda=0.5", "validation", 0.8)]
    key = {"round": 4, "cohort": "all", "phase": "received", "model": "lambda=0.5"}
    clients = [{**key, "split": "test", "client": k, "auroc": value} for k, value in enumerate([0.7, None])]
    clients += [{**key, "split": "validation", "client": 0, "auroc": 0.5}, {**clients[0], "round": 2, "auroc": None}]
    rounds, tables = (pa.Table.from_pylist(one) for one in (rows, clients))
    summary = Measure("auroc").summary(rounds, MIXED, tables)
    assert (summary["test_clients"], summary["validation_clients"]) == (1, 2)
    assert Measure("auroc").summary(rounds, MIXED)["test_clients"] == 2


def test_less_loss_is_better() -> None:
    assert (Measure("top1").mode, Measure("top5").mode) == ("max", "max")
    assert {Measure(metric).mode for metric in ("loss", "ece", "mce")} == {"min"}  # type: ignore[arg-type]
