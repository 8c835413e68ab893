from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rayfl.tracking.tensorboard import TensorBoard
from tests.results.test_tables import scored
from tests.tracking.test_tracking import info, tables

SIZES = {"histograms": 0, "images": 0, "scalars": 0}


def written(folder: Path, rounds: int) -> EventAccumulator:
    board = TensorBoard(folder)
    board.on_start(info())
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
    events = written(tmp_path, 30)
    assert events.Tags()["images"] == ["accuracy along lambda"]
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert "final top1/test, all clients, received/lambda=0.5" in events.Tags()["scalars"]


def test_an_unfinished_run_has_neither(tmp_path: Path) -> None:
    events = written(tmp_path, 7)
    assert events.Tags()["images"] == []
    assert not any(name.startswith("final") for name in events.Tags()["scalars"])
