from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.errors import RunError
from rayfl.experiment.result import Result
from rayfl.metrics import Statistics
from rayfl.results.schemas import ROUNDS_SCHEMA
from rayfl.results.tables import ResultTables
from rayfl.runs.rows import final_rows
from rayfl.runs.summary import skipped_table, summary_table
from rayfl.tracking.callback import Callback, RunInfo
from rayfl.tracking.console import ConsoleProgress
from rayfl.tracking.tensorboard import TensorBoard
from rayfl.tracking.terminal import PlainConsole
from tests.results.test_tables import scored

HOSTS = [{"device": "cpu"}, {"device": "cpu"}]


def info(rounds_completed: int = 0, *overrides: str) -> RunInfo:
    config = load_config(Experiment, "quickstart", ["name=run", *overrides])
    return RunInfo(config, "/folder", 20, rounds_completed, HOSTS, ["plan: 1 node: [2] actors"])


def tables(round: int) -> ResultTables:
    result = ResultTables(["a", "b"], "lambda")
    grid = {"lambda=0.0": 3, "lambda=0.5": 9, "lambda=1.0": 6}
    models = {"global": scored(10, 3)} | {name: scored(10, hits) for name, hits in grid.items()}
    validation = {"global": scored(10, 3)} | {
        "lambda=0.0": scored(10, 3),
        "lambda=0.5": scored(10, 5),
        "lambda=1.0": scored(10, 8),
    }
    scores = {client: {"validation": validation, "test": models} for client in (0, 1)}
    result.add(round, "all", "received", scores, (0, 0))
    return result


def test_tensorboard_has_a_curve_per_split_and_model_and_hides_what_was_rewound(tmp_path: Path) -> None:
    for start, rounds in ((0, (1, 2, 3)), (1, (2,))):
        board = TensorBoard(tmp_path)
        board.on_start(info(start))
        for round in rounds:
            board.on_evaluation(tables(round).rounds.to_pylist())
            board.on_round(round, [0, 1], 0.5)
        board.on_end(rounds[-1])
    events = EventAccumulator(str(tmp_path)).Reload()
    name = "top1/test, all clients, received/lambda=best (validation)"
    assert [event.step for event in events.Scalars(name)] == [1, 2]
    assert events.Scalars(name)[0].value == pytest.approx(0.6)
    assert events.Scalars("time/clients per second")[0].value == pytest.approx(4.0)


def test_the_console_shows_the_choice_by_validation_never_the_best_on_test() -> None:
    out = io.StringIO()
    progress = ConsoleProgress(Console(file=out, width=200))
    progress.on_start(info(0))
    progress.on_evaluation(tables(1).rounds.to_pylist())
    progress.on_round(1, [0, 1], 0.5)
    progress.on_failure("host 1 died", 0)
    progress.on_round(30, [0, 1], 0.5)
    progress.on_end(30)
    text = out.getvalue()
    assert text.startswith("plan: 1 node: [2] actors\n")
    assert "run starts: superfed on digits, 20 clients on 2 actors (cpu)" in text
    assert "test accuracy of 2 of 20 clients: global 30.0%, lambda=1.0 60.0%" in text
    assert "90.0%" not in text
    assert "host 1 died; continues from the commit of round 0" in text
    # Every line has the time of day, seconds a round and the time left.
    line = r"^\d\d:\d\d:\d\d  round 30/30  4\.0 clients/s  0\.5 s a round  00:00:00 left  test acc"
    assert re.search(line, text, re.M)
    assert re.search(r"^\d\d:\d\d:\d\d  host 1 died", text, re.M)


def test_the_console_says_where_a_run_continues() -> None:
    out = io.StringIO()
    ConsoleProgress(Console(file=out, width=200)).on_start(info(7))
    assert "run continues after round 7" in out.getvalue()


def test_methods_without_a_sweep_show_their_personalized_model() -> None:
    out = io.StringIO()
    progress = ConsoleProgress(Console(file=out, width=200))
    progress.on_start(info(0, "algorithm=fedphp"))
    result = ResultTables(["a"], None)
    scores = {0: {"test": {"global": scored(10, 3), "hpm": scored(10, 7)}}}
    progress.on_evaluation(result.add(1, "all", "received", scores, (0, 0)))
    progress.on_round(1, [0], 0.5)
    assert "global 30.0%, hpm 70.0%" in out.getvalue()


def test_a_terminal_gets_a_bar() -> None:
    out = io.StringIO()
    progress = ConsoleProgress(Console(file=out, width=120, force_terminal=True))
    progress.on_start(info(0))
    progress.on_round(12, [0, 1], 0.5)
    progress.on_failure("host 0 died", 3)
    progress.on_end(12)
    assert " 3/30" in out.getvalue()
    assert "4.0 clients/s" in out.getvalue()


def summary(result: ResultTables, *overrides: str) -> tuple[str, Any]:
    config = load_config(Experiment, "quickstart", list(overrides))
    whole = Result("/folder", config, result.rounds, result.clients, 1)
    out = io.StringIO()
    Console(file=out, width=120).print(summary_table(whole))
    return out.getvalue(), whole


def test_a_result_has_the_personalized_models_score() -> None:
    """That of the model chosen on validation data (6 of 10), not of the best on test data (9 of 10)."""
    _, whole = summary(tables(1))
    assert whole.score() == pytest.approx(0.6) and whole.score("loss") > 0
    with pytest.raises(RunError, match="there is no metric 'accuracy'; there are round, clients, n, loss"):
        whole.score("accuracy")
    with pytest.raises(RunError, match="no evaluation has top1 of personalized on test data"):
        summary(tables(1), "algorithm=ditto")[1].score()


def test_the_final_table_marks_choices_on_test_data() -> None:
    everybody = tables(1)
    text, whole = summary(everybody)
    assert "Test data after round 1: mean +- std over clients" in text
    lines = text.splitlines()
    assert any("lambda=1.0, by validation" in line and "60.00 +- 0.00" in line for line in lines)
    assert any("lambda=0.5, by test *" in line and "90.00" in line for line in lines)
    assert "* chosen on test data" in text
    assert "lambda=1.0 (local)" in text
    assert {row["split"] for row in final_rows(whole.rounds)} == {"test"}


def test_the_final_table_says_how_many_of_the_clients_it_is_about() -> None:
    result = ResultTables(["a", "b", "c"], None)
    nothing = Statistics.empty()
    scores = {
        0: {"test": {"global": scored(10, 3)}},
        1: {"test": {"global": scored(4, 3)}},
        2: {"test": {"global": nothing}},
    }
    result.add(1, "all", "received", scores, (0, 0))
    text, _ = summary(result, "algorithm=fedavg")
    (line,) = [line for line in text.splitlines() if line.startswith(" global")]
    assert line.split()[:4] == ["global", "2", "of", "3"]


def test_the_final_table_of_a_run_that_scores_no_test_data_is_of_validation_data() -> None:
    result = ResultTables(["a"], None)
    result.add(1, "all", "received", {0: {"validation": {"global": scored(10, 3)}}}, (0, 0))
    text, _ = summary(result, "algorithm=fedavg", "evaluation.splits=[validation]")
    assert "Validation data after round 1" in text
    assert "30.00 +- 0.00" in text


def test_the_final_table_of_a_run_without_evaluation_is_empty() -> None:
    text, whole = summary(ResultTables(["a"], "lambda"), "evaluation.splits=[validation]")
    assert final_rows(whole.rounds) == []
    assert "*" not in text.replace("+-", "")
    assert whole.rounds.schema == ROUNDS_SCHEMA


def test_clients_that_were_left_out_are_shown_with_their_rounds_and_reasons() -> None:
    result = ResultTables(["0", "[bold]bob", "carl"], None)
    for round in range(1, 9):
        result.add_skipped(round, {1: ("local_update", "RuntimeError: [red]x[/red]"), 2: ("report", f"no {round}")})
    result.add_skipped(9, {0: ("local_update", "why")})
    config = load_config(Experiment, "quickstart", [])
    out = io.StringIO()
    whole = Result("/folder", config, result.rounds, result.clients, 9, "", result.skipped)
    PlainConsole(file=out, width=120).print(skipped_table(whole))
    text = out.getvalue()
    assert "3 of the clients failed" in text
    lines = [line.strip().split("  ")[0] for line in text.splitlines()]
    assert lines.index("1 ([bold]bob)") < lines.index("0") < lines.index("2 (carl)")
    assert "1, 2, 3, 4, 5, ..." in text
    assert "RuntimeError: [red]x[/red]" in text
    for round in range(10, 14):
        result.add_skipped(round, {2: ("report", f"no {round}")})
    many = Result("/folder", config, result.rounds, result.clients, 9, "", result.skipped)
    PlainConsole(file=out, width=120).print(skipped_table(many))
    assert "and 4 more" in out.getvalue()


def test_a_callback_may_listen_to_any_part() -> None:
    listener = Callback()
    listener.on_start(info())
    listener.on_round(1, [0], 1.0)
    listener.on_evaluation([])
    listener.on_commit(1)
    listener.on_failure("why", 0)
    assert listener.on_end(1) is None
