"""What numbers are about: the same clients at every evaluation, and those that a metric is defined for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import rayfl
from algorithms.registry import METHODS
from rayfl.cli.report import dataset_of
from rayfl.metrics import CLASSIFICATION
from rayfl.report.blocks import Table
from rayfl.report.columns import columns_of
from rayfl.report.comparison import compare
from rayfl.report.formats import numbers
from rayfl.report.lines import Wanted, undefined, with_best
from rayfl.report.paper import paper_table
from rayfl.report.single import page_of_run
from rayfl.results.schemas import metrics_metadata
from rayfl.runs.finding import load_run, load_runs
from rayfl.runs.loading import Run
from tests.report.test_comparison import configured
from tests.support.experiments import small_experiment

Copied = Callable[..., Path]
SKEWED = {"name": "dirichlet", "num_clients": 12, "alpha": 0.05}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two methods on clients of which some have test samples of one class only: AUROC is undefined for these."""
    folder = tmp_path_factory.mktemp("undefined")
    for method in ("fedavg", "superfed-mm"):
        experiment = small_experiment(folder, method, method, backend="inline")
        experiment |= {"task": {"name": "classification", "metrics": ["auroc"]}, "partition": SKEWED}
        rayfl.run({**experiment, "holdout": {"test": 0.3, "validation": 0.2}})
    return load_runs([str(folder / method) for method in ("fedavg", "superfed-mm")], METHODS)


@pytest.mark.slow
def test_a_number_says_how_many_clients_have_one(pair: list[Run]) -> None:
    last = pair[0].clients.filter(pair[0].measured.rows)
    last = last.filter(pc.and_(pc.equal(last["round"], pc.max(last["round"])), pc.equal(last["model"], "global")))
    everybody, defined = last.num_rows, last.num_rows - last["auroc"].null_count
    assert 0 < defined < everybody
    comparison = compare(pair)
    for row in numbers({"": comparison}):
        per_client = row["model"].endswith("per client") and row["metric"] == "auroc"
        assert row["clients"] == (None if per_client else defined if row["metric"] == "auroc" else everybody)
    said = f": over {defined} of {everybody} clients, for the others it is undefined"
    (note,) = [note for note in comparison.notes if note.endswith(said)]
    assert note.startswith("AUROC")
    assert note in paper_table({"": comparison}).notes
    page, _ = page_of_run(pair[0], dataset_of)
    assert note in page.notes
    wanted = Wanted([columns_of(pair)[name] for name in ("pooled_top1", "top1_best_round", "top1_worst5", "auroc")])
    counts = {row["metric"]: row["clients"] for row in numbers({"": compare(pair[:1], wanted)})}
    assert counts == {**dict.fromkeys(counts, everybody), "auroc": defined}


def test_means_over_different_numbers_of_clients_have_no_best(pair: list[Run]) -> None:
    """A metric that is undefined for more clients of one method than of another: those it lacks may be its worst."""
    comparison = compare(pair)
    metrics = comparison.wanted.metrics
    assert any(line.cells["auroc"].best for line in comparison.lines)
    short = comparison.lines[0]
    fewer = replace(short.cells["auroc"], clients=short.cells["auroc"].clients - 1)
    lines = [replace(short, cells={**short.cells, "auroc": fewer}), *comparison.lines[1:]]
    marked = with_best(lines, metrics)
    assert not any(line.cells["auroc"].best or line.cells["auroc"].second for line in marked)
    assert any(line.cells["loss"].best for line in marked)
    (note,) = [note for note in undefined(marked, metrics) if note.startswith("AUROC")]
    assert note.endswith("for the others it is undefined; no number of the column is the best")


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


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (
            "top1_worst5",
            "no test with fedavg, superfed: top1_worst5 is one number of a run, and its test needs two seeds",
        ),
        (
            "pooled_top1",
            "no test with fedavg, superfed: pooled_top1 is one number of a run, and its test needs two seeds",
        ),
        ("top1_best_round", "no test: best rounds are not tested"),
        ("top1", None),
    ],
)
def test_why_there_is_no_test(pair: list[Run], metric: str, said: str | None) -> None:
    notes = [note for note in compare(pair, Wanted([columns_of(pair)[metric]])).notes if note.startswith("no test")]
    assert [said is not None and note.startswith(said) for note in notes] == [True] * (said is not None)


def loaded(finished: Path) -> list[Run]:
    return load_runs([str(finished / name) for name in ("fedavg-0", "fedavg-1", "superfed-mm-0")], METHODS)


def test_runs_of_other_lengths_are_said_to_be(copied: Copied, finished: Path) -> None:
    runs = loaded(finished)
    shorter = configured(copied("superfed-mm-0"), train={"rounds": 2})
    for name in ("rounds", "clients"):
        place = Path(shorter.uri) / f"{name}.parquet"
        pq.write_table(pq.read_table(place, filters=pc.field("round") <= 2), place)
    shorter = load_run(shorter.uri, METHODS)
    notes = [note for note in compare([runs[0], shorter]).notes if "those of others" in note]
    assert [note.partition(": ")[2] for note in notes] == [
        f"its numbers are after round {end}, those of others after another" for end in (4, 2)
    ]
    assert not any("those of others" in note for note in compare(runs).notes)


def test_means_over_other_clients_have_no_best(copied: Copied, finished: Path) -> None:
    """As those of a run with malicious clients, who are in no score, beside one without."""
    less, whole = copied("fedavg-0"), loaded(finished)[2]
    clients = pq.read_table(less / "clients.parquet")
    pq.write_table(clients.filter(pc.field("client") != 3), less / "clients.parquet")
    compared = compare([load_run(str(less), METHODS), whole])
    notes = [note.partition(": ") for note in compared.notes if "no number is the best" in note]
    assert [(run, said.partition(",")[0]) for run, _, said in notes] == [
        (str(less), "its means are over 4 clients"),
        (whole.uri, "its means are over 5 clients"),
    ]
    assert not any(cell.best or cell.second for line in compared.lines for cell in line.cells.values())
    assert [(test.pairs, test.left_out) for test in compared.clients] == [(4, 0)]


def test_test_labels_that_are_wrong_in_some_runs_set_numbers_apart(copied: Copied, finished: Path) -> None:
    runs, noise = loaded(finished), {"kind": "pair", "ratio": 0.4}
    clean, wrong = (
        configured(copied("superfed-mm-0", name), noise={**noise, "legacy": legacy})
        for name, legacy in (("clean", False), ("wrong", True))
    )
    assert not any("not defined alike" in note for note in compare([runs[0], clean]).notes)
    compared = compare([runs[0], wrong])
    (note,) = [note for note in compared.notes if "not defined alike, as the runs differ in noise" in note]
    assert note.startswith("top1, ")
    assert not compared.clients
    assert not any(cell.best for line in compared.lines for cell in line.cells.values())


def test_best_rounds_of_more_evaluations_are_said_to_be(copied: Copied, finished: Path) -> None:
    runs, seldom = loaded(finished), copied("fedavg-1")
    rounds = pq.read_table(seldom / "rounds.parquet")
    pq.write_table(rounds.filter(pc.field("round") != 2), seldom / "rounds.parquet")
    wanted = Wanted((columns_of(runs)["top1_best_round"],))
    said = "its best round is of {} evaluations"
    assert not any("its best round" in note for note in compare(runs, wanted).notes)
    notes = compare([runs[0], runs[2], load_run(str(seldom), METHODS)], wanted).notes
    (two,), (one,) = ([note for note in notes if said.format(count) in note] for count in (2, 1))
    assert "superfed-mm-0" in two and str(seldom) in one


def test_a_task_whose_second_metric_is_the_loss_has_one_column_of_it(copied: Copied) -> None:
    run = copied("fedavg-0")
    two = metrics_metadata([metric for metric in CLASSIFICATION.metrics if metric.name in ("top1", "loss")])
    table = pq.read_table(run / "rounds.parquet")
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, **two}), run / "rounds.parquet")
    page, _ = page_of_run(load_run(str(run), METHODS), dataset_of)
    summary = next(block for block in page.sections[0].blocks if isinstance(block, Table))
    headings = [column.heading for column in summary.columns]
    assert headings == ["model", "clients", "accuracy %", "worst 5 %", "loss nats"]
