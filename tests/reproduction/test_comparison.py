from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from algorithms.registry import Experiment
from rayfl.errors import ConfigError
from rayfl.reproduction.comparison import compare, rank_agreement
from rayfl.reproduction.output import COMPARISON_SCHEMA, as_arrow, as_markdown
from rayfl.reproduction.tables import Reproduction, plan_reproduction, select_tables
from rayfl.results.schemas import CLIENTS_KEY, METRICS, ROUNDS_SCHEMA

pytestmark = pytest.mark.usefixtures("tiny")


def plan(name: str = "tiny-table1", **options: Any) -> Reproduction:
    return plan_reproduction(Experiment, name, "/runs", **{"scale": "paper", **options})


def summary(model: str, round: int, top1: float, std: float = 0.1, selected_on: str = "") -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(ROUNDS_SCHEMA.names) | dict.fromkeys(METRICS, 0.0)
    place = {"round": round, "split": "test", "cohort": "all", "phase": "received", "model": model}
    row |= {**place, "selected_on": selected_on, "choice": "lambda=0.5" if selected_on else ""}
    return {**row, "top1": top1, "top1_std": std, "pooled_top1": top1 / 2, "clients": 3}


def results(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=ROUNDS_SCHEMA.with_metadata({CLIENTS_KEY: b"4"}))


MODELS = results(
    summary("global", 2, 0.2),
    summary("global", 4, 0.4),
    summary("finetuned", 4, 0.7),
    summary("lambda=0.5", 4, 0.8),
    summary("lambda=best", 4, 0.8, 0.05, "test"),
    summary("lambda=best", 4, 0.9, 0.05, "test per client"),
)


def test_each_method_is_compared_by_its_own_row_in_the_papers_unit() -> None:
    planned = plan()
    fedavg, tuned, superfed = compare(planned, dict.fromkeys(planned.runs, MODELS))
    assert (fedavg.ours, fedavg.ours_std_over_clients) == (pytest.approx(40), pytest.approx(10))
    assert (fedavg.ours_std_over_seeds, fedavg.paper_std_over) == (None, "clients")
    assert (fedavg.difference, fedavg.within, fedavg.status) == (pytest.approx(-10), True, "caution")
    assert (tuned.ours, tuned.within) == (pytest.approx(70), False)
    assert (superfed.ours, superfed.within, superfed.choice) == (pytest.approx(80), None, "lambda=0.5")
    assert superfed.seen_test and not fedavg.seen_test


def test_seeds_are_averaged_and_runs_that_are_missing_leave_a_gap() -> None:
    planned = plan(seeds=[0, 1], methods=["fedavg", "fedavg_ft"])
    finished = {run: MODELS for run in planned.runs if run.method == "fedavg"}
    first = next(iter(finished))
    finished[first] = results(summary("global", 4, 0.6, 0.3))
    fedavg, tuned = compare(planned, finished)
    assert (fedavg.seeds, fedavg.ours, fedavg.ours_std_over_clients) == (2, pytest.approx(50), pytest.approx(20))
    assert fedavg.ours_std_over_seeds == pytest.approx(20 / 2**0.5)
    assert (tuned.seeds, tuned.ours, tuned.difference, tuned.within) == (0, None, None, None)
    text = as_markdown(planned, [fedavg, tuned])
    assert "| fedavg_ft | not run |  |  |  | 60.00 | 0.00 |  |  | yes |" in text
    assert "| fedavg | 50.00 | 20.00 | 14.14 | 3 of 4 | 50.00 | 50.00 |" in text


def test_a_window_of_rounds_is_averaged_or_the_last_before_it_taken() -> None:
    planned = plan("tiny-fig1", methods=["fedavg"])
    (run,) = [run for run in planned.runs if run.method == "fedavg"]
    early, both = (
        results(summary("global", 1, 0.3), summary("global", 2, 0.2)),
        results(summary("global", 2, 0.2), summary("global", 3, 0.4), summary("global", 4, 0.8)),
    )
    (row,) = compare(planned, {run: both})
    assert row.ours == pytest.approx(0.3)  # half of (0.4 + 0.8) / 2: pooled
    assert compare(planned, {run: early})[0].ours == pytest.approx(0.1)
    assert (row.paper, row.paper_std_over, row.status) == (None, "", "no_target")
    assert "it finds: It rises." in as_markdown(planned, [row])


def test_the_table_says_what_was_chosen_on_test_data_and_what_is_no_target() -> None:
    planned = plan()
    rows = compare(planned, dict.fromkeys(planned.runs, MODELS))
    text = as_markdown(planned, rows)
    assert "| superfed_mm * | 80.00 | 5.00 |  | 3 of 4 | 70.00 |  | +10.00 |  | yes |" in text
    assert "| fedavg | 40.00 | 10.00 |  | 3 of 4 | 50.00 | 50.00 | -10.00 | yes | with caution |" in text
    assert "The standard deviation of the paper is over clients." in text
    assert "* chosen on test data (superfed_mm lambda=0.5)" in text
    assert "fedavg: It oscillates." in text
    assert "Kendall's tau with the paper's (targets only): 1.00" in text
    table = as_arrow(planned, rows)
    assert table.schema == COMPARISON_SCHEMA
    assert table.select(["method", "within", "selected_on", "rounds"]).to_pylist()[2] == {
        "method": "superfed_mm",
        "within": None,
        "selected_on": "test",
        "rounds": 4,
    }


def test_agreement_in_order_needs_three_methods() -> None:
    planned = plan()
    rows = compare(planned, dict.fromkeys(planned.runs, MODELS))
    assert rank_agreement(rows) == 1
    assert rank_agreement(rows[:2]) is None
    reverse = results(
        summary("global", 4, 0.9), summary("finetuned", 4, 0.5), summary("lambda=best", 4, 0.1, 0.1, "test")
    )
    upside_down = dict.fromkeys(planned.runs, reverse)
    assert rank_agreement(compare(planned, upside_down)) == -1


def test_tables_are_found_by_name_beginning_or_setting() -> None:
    assert [table.name for table in select_tables("tiny-fig1")] == ["tiny-fig1"]
    assert [table.name for table in select_tables("tiny")] == ["tiny-table1", "tiny-fig1"]
    assert [table.name for table in select_tables("tiny-table1-digits")] == ["tiny-table1", "tiny-fig1"]
    with pytest.raises(ConfigError, match=r"called 'tiny-tabel1' .did you mean 'tiny-table1'"):
        select_tables("tiny-tabel1")


def test_rows_and_overrides_are_checked() -> None:
    assert [run.method for run in plan(methods=["fedavg"]).runs] == ["fedavg"]
    assert [run.seed for run in plan(methods=["fedavg"], seeds=[3, 5]).runs] == [3, 5]
    with pytest.raises(ConfigError, match=r"has no row 'fedavgg' .did you mean 'fedavg'"):
        plan(methods=["fedavgg"])
    with pytest.raises(ConfigError, match=r"only dataset.root, engine"):
        plan(overrides={"train.lr": 1.0})
    with pytest.raises(ConfigError, match="--rounds is 0"):
        plan(rounds=0)
    with pytest.raises(ConfigError, match=r"cluster.backend"):
        plan(overrides={"cluster.backend": "none"})
    config = plan("tiny-table1", overrides={"cluster.backend": "inline"}, rounds=3).runs[0].config
    assert (config.cluster.backend, config.train.rounds, config.storage_path) == (
        "inline",
        3,
        "/runs/tiny-table1-digits",
    )


def test_folders_of_uris_keep_their_options() -> None:
    run = plan_reproduction(Experiment, "tiny-table1", "s3://bucket/out?region=x").runs[0]
    assert run.config.storage_path == "s3://bucket/out/tiny-table1-digits?region=x"


def test_the_best_round_on_test_data_stands_beside_the_last_one_and_is_marked() -> None:
    """Where a paper prints the best round, its number is compared with ours of the best round."""
    table = select_tables("tiny-table1")[0]
    assert table.protocol is not None
    best = table.model_copy(update={"protocol": table.protocol.model_copy(update={"best_round": True})})
    planned = replace(plan(seeds=[0, 1], methods=["fedavg"]), tables=(best,))
    over = results(summary("global", 1, 0.3), summary("global", 2, 0.55), summary("global", 4, 0.4))
    (row,) = compare(planned, dict(zip(planned.runs, [over, MODELS], strict=True)))
    assert (row.ours, row.best_round) == (pytest.approx(40), pytest.approx((55 + 40) / 2))
    assert (row.difference, row.within) == (pytest.approx(-2.5), True)
    text = as_markdown(planned, [row])
    assert "| clients | best round * | paper |" in text
    assert "| fedavg | 40.00 | 10.00 | 0.00 | 3 of 4 | 47.50 | 50.00 | 50.00 | -2.50 | yes | with caution |" in text
    assert "* best round: the best of all evaluations, chosen by the test data themselves" in text
    assert as_arrow(planned, [row])["best_round"].to_pylist() == [pytest.approx(47.5)]
    usual = plan(methods=["fedavg"])
    (row,) = compare(usual, {usual.runs[0]: over})
    assert row.best_round is None and row.difference == pytest.approx(-10)
    assert "best round" not in as_markdown(usual, [row])
