from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rayfl
from rayfl.tracking.tensorboard import TensorBoard
from tests.results.test_tables import scored
from tests.support.experiments import small_experiment
from tests.tracking.test_tracking import info, tables

SIZES = {"histograms": 0, "images": 0, "scalars": 0}


def written(folder: Path, rounds: int, *overrides: str) -> EventAccumulator:
    board = TensorBoard(folder)
    board.on_start(info(0, *overrides))
    scores = {client: {"test": {"global": scored(10, hits)}} for client, hits in ((0, 2), (1, 8))}
    board.on_scores(rounds, "all", "received", scores)
    board.on_scores(rounds, "selected", "trained", {0: {"test": {"local": scored(10, 5)}}})
    board.on_evaluation(tables(rounds).rounds.to_pylist())
    board.on_end(rounds)
    return EventAccumulator(str(folder), size_guidance=SIZES).Reload()


def test_histograms_are_over_all_clients(tmp_path: Path) -> None:
    events = written(tmp_path, 1)
    assert events.Tags()["histograms"] == ["top1 over clients, test/global"]
    (event,) = events.Histograms("top1 over clients, test/global")
    assert (event.step, event.histogram_value.num) == (1, 2)
    assert (round(event.histogram_value.min, 6), round(event.histogram_value.max, 6)) == (0.2, 0.8)


def test_a_finished_run_has_hyper_parameters_and_the_curve_along_lambda(tmp_path: Path) -> None:
    events = written(tmp_path, 30, "tracking.tensorboard_scalars=all")
    assert events.Tags()["images"] == ["accuracy along lambda"]
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert "final top1/test, all clients, received/lambda=0.5" in events.Tags()["scalars"]


def test_an_unfinished_run_has_neither(tmp_path: Path) -> None:
    events = written(tmp_path, 7)
    assert events.Tags()["images"] == []
    assert not any(name.startswith("final") for name in events.Tags()["scalars"])


@pytest.mark.parametrize(
    ("splits", "validation"),
    [
        (["validation", "test"], 0.1),
        pytest.param(["test"], 0.1, marks=pytest.mark.slow),
        pytest.param(["validation", "test"], 0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_by_default_there_are_few_curves(splits: list[str], validation: float, tmp_path: Path) -> None:
    """Forty at most, however many rows a run has; among them the personalized model, chosen as it was."""
    evaluation = {"every": 1, "cohort_every": 1, "splits": splits}
    names = {}
    for choice in ("overview", "all"):
        experiment = small_experiment(tmp_path, choice, "superfed-mm", backend="inline")
        experiment |= {"tracking": {"tensorboard_scalars": choice}, "holdout": {"validation": validation}}
        path = Path(rayfl.run({**experiment, "evaluation": evaluation}).path)
        names[choice] = EventAccumulator(str(path), size_guidance=SIZES).Reload().Tags()
    few, every = (set(names[choice]["scalars"]) for choice in ("overview", "all"))
    assert few < every and 10 < len(few) <= 40 < len(every)
    chosen = "validation" if "validation" in splits and validation else "test"
    own = f"test, all clients, received/lambda=best ({chosen})"
    wanted = {f"top1/{own}", f"top1_std/{own}", f"loss/{own}", f"final top1/{own}", "time/seconds per round"}
    assert wanted <= few and not [name for name in few if "lambda=0." in name]
    assert set(names["overview"]["histograms"]) < set(names["all"]["histograms"])
    # The rows that are drawn are the tables'.
    rows = pq.read_table(tmp_path / "overview" / "rounds.parquet").to_pylist()
    assert any((row["model"], row["selected_on"]) == ("lambda=best", chosen) for row in rows)
