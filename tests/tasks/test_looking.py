"""Commands that look at runs show the task's first metric where they show accuracy of classifiers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import rayfl
from algorithms.registry import METHODS as REGISTERED
from rayfl.cli.entry import app
from rayfl.errors import ConfigError, RunError
from rayfl.metrics import CLASSIFICATION
from rayfl.metrics.regression import RegressionMeasures
from rayfl.report.columns import Metric, columns_of, metrics_for
from rayfl.report.comparison import compare
from rayfl.report.definitions import told_apart
from rayfl.results.schemas import (
    METRICS_KEY,
    first_metric,
    known_schema,
    metrics_metadata,
    metrics_of,
    recorded_schema,
    schema_of,
)
from rayfl.runs.finding import load_run
from rayfl.runs.listing import chosen_rows
from rayfl.sweeps.measures import Measure

SHORT = {"train.rounds": 4, "train.local_epochs": 1, "evaluation.every": 2, "cluster.backend": "inline"}
METHODS: dict[str, dict[str, Any]] = {
    "superfed": {"name": "superfed", "mode": "mm", "start": 0.25},
    "ditto": {"name": "ditto"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for name, method in METHODS.items():
        rayfl.run("quickstart-regression", storage_path=str(folder), name=name, algorithm=method, **SHORT)
    rayfl.run("quickstart-tabular", storage_path=str(folder), name="classes", **SHORT)
    return {name: folder / name for name in (*METHODS, "classes")}


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, f"{done.output}{done.exception}"
    return done.output


def test_tables_say_what_the_task_is_judged_by(runs: dict[str, Path]) -> None:
    table = pq.read_table(runs["ditto"] / "rounds.parquet")
    assert json.loads(table.schema.metadata[METRICS_KEY])[0]["name"] == "mse" == first_metric(table).name
    assert known_schema("rounds", table.schema)
    assert not known_schema("rounds", table.schema.remove_metadata())
    classes = pq.read_table(runs["classes"] / "rounds.parquet")
    assert [metric.name for metric in metrics_of(classes)][:2] == ["top1", "top5"]
    assert {"f1_macro", "pooled_auroc", "auroc_std"} <= set(classes.schema.names)


@pytest.mark.slow
def test_a_comparison_of_regressions_takes_the_least_error_for_the_best(runs: dict[str, Path], tmp_path: Path) -> None:
    both = [load_run(str(runs[name]), REGISTERED) for name in METHODS]
    comparison = compare(both)
    assert [metric.column for metric in comparison.wanted.metrics] == ["mse", "mse_worst5", "mae", "r2", "loss"]
    eligible = [line.cells["mse"] for line in comparison.lines if line.eligible]
    assert [cell.best for cell in eligible] == [cell.mean == min(cell.mean for cell in eligible) for cell in eligible]
    text = said("compare", *(str(runs[name]) for name in METHODS))
    assert "MSE" in text and "accuracy" not in text and "highest MSE" in " ".join(text.split())
    said("report", *(str(runs[name]) for name in METHODS), "--out", str(tmp_path / "both"))
    page = (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    assert "MSE of the methods" in page and "ccuracies" not in page


def test_figures_of_losses_have_the_tasks_unit(runs: dict[str, Path], tmp_path: Path) -> None:
    for name, label in (("ditto", "loss + 1e-4 / 2 ||w||²<"), ("classes", "CE + 1e-4 / 2 ||w||² (nats)<")):
        figure = str(tmp_path / f"{name}.svg")
        said("plot", "landscape", str(runs[name]), "--plane", "random", "--points", "5", "--out", figure)
        assert label in Path(figure).read_text(encoding="utf-8")


def test_tables_of_clients_have_units_and_dashes(runs: dict[str, Path], tmp_path: Path) -> None:
    undefined = pc.sum(pc.is_null(pq.read_table(runs["classes"] / "clients.parquet")["auroc"])).as_py()
    shown = said("clients", str(runs["classes"]))
    assert undefined and " - " in shown and "None" not in shown
    said("report", str(runs["classes"]), "--out", str(tmp_path))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count(">macro F1\u00a0%</th>") == page.count(">AUROC\u00a0%</th>") == 3


def test_columns_are_chosen_among_the_tasks_own(runs: dict[str, Path]) -> None:
    both = [str(runs[name]) for name in METHODS]
    found = json.loads(said("compare", *both, "--json", "--metric", "r2", "--metric", "mse_jain"))
    assert [row["metric"] for row in found["numbers"][:2]] == ["r2", "mse_jain"]
    assert {test["metric"] for test in found["tests"]} == {"r2"}
    refused = CliRunner().invoke(app, ["compare", *both, "--metric", "top1"]).exception
    assert isinstance(refused, ConfigError)
    assert "there are mse, mse_worst5, mae, r2, loss, mse_jain" in str(refused)
    classes = columns_of([load_run(str(runs["classes"]), REGISTERED)])
    assert {"top1", "top1_jain", "mce", "f1_macro", "auroc"} <= set(classes)


def test_watching_says_the_tasks_first_metric(runs: dict[str, Path]) -> None:
    found = json.loads(said("watch", str(runs["ditto"]), "--json"))
    assert found["metric"] == "mse" and found["score"] > 0 and found["accuracy"] is None
    assert "test MSE: global" in said("watch", str(runs["ditto"]))


@pytest.mark.parametrize("name", ["rounds", "clients"])
def test_tables_of_buffered_rounds_have_the_tasks_columns(name: str) -> None:
    metrics = RegressionMeasures.metrics
    schema = schema_of(name, metrics, simulated=True, buffered=True).with_metadata(metrics_metadata(metrics))
    assert {"mse", "r2", "staleness"} <= set(schema.names)
    assert known_schema(name, schema)
    assert schema.equals(recorded_schema(name, schema.metadata, simulated=True, buffered=True))


def test_tasks_are_not_compared_with_each_other(runs: dict[str, Path]) -> None:
    with pytest.raises(RunError, match=r"different tasks.* by mse, .*; .* by top1, "):
        metrics_for([load_run(str(runs[name]), REGISTERED) for name in ("ditto", "classes")])


def test_runs_of_one_task_are_compared_by_the_metrics_that_both_have(runs: dict[str, Path], tmp_path: Path) -> None:
    other = {"storage_path": str(tmp_path), "name": "other", "algorithm": "local", "task.metrics": ["auroc"], **SHORT}
    rayfl.run("quickstart-tabular", **other)
    both = [str(tmp_path / "other"), str(runs["classes"])]
    shown = json.loads(CliRunner().invoke(app, ["compare", *both, "--json"]).stdout)["numbers"]
    metrics = {row["metric"] for row in shown}
    assert {"top1", "loss", "auroc"} <= metrics and "f1_macro" not in metrics
    said("report", *both, "--out", str(tmp_path / "page"))


def test_losses_of_two_kinds_are_shown_and_not_compared(runs: dict[str, Path], tmp_path: Path) -> None:
    other = {"storage_path": str(tmp_path), "name": "other", "algorithm": "local", "task.loss": "absolute", **SHORT}
    rayfl.run("quickstart-regression", **other)
    both = [str(tmp_path / "other"), str(runs["ditto"])]
    comparison = compare([load_run(name, REGISTERED) for name in both])
    best = {name for line in comparison.lines for name, cell in line.cells.items() if cell.best}
    assert {"mse", "mae", "r2"} <= best and "loss" not in best and comparison.clients
    told = "loss: not defined alike, as the runs differ in task.loss (absolute, squared): no number of this column is"
    assert sum(note.startswith(told) for note in comparison.notes) == 1
    shown = json.loads(CliRunner().invoke(app, ["compare", *both, "--json", "--metric", "loss"]).stdout)
    assert not shown["tests"] and {row["rank"] for row in shown["numbers"]} == {None}
    paper = CliRunner().invoke(app, ["compare", *both, "--format", "markdown", "--metric", "loss"]).stdout
    assert "not defined alike" in paper and "**" not in paper


@pytest.mark.slow
def test_a_figure_of_losses_of_two_kinds_says_so(
    runs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = {"storage_path": str(tmp_path), "name": "other", "algorithm": "local", "task.loss": "absolute", **SHORT}
    rayfl.run("quickstart-regression", **other)
    plot = ["plot", "curves", str(tmp_path / "other"), str(runs["ditto"]), "--out", str(tmp_path / "figure.png")]
    said(*plot, "--metric", "mse")
    assert not caplog.messages
    said(*plot)
    assert [message.partition(": do not")[0] for message in caplog.messages] == [
        "loss: not defined alike, as the runs differ in task.loss (absolute, squared)"
    ]


@pytest.mark.parametrize(
    ("contents", "told"),
    [
        (
            [
                {"task": {"name": "segmentation", "loss": "cross_entropy", "background": found}}
                for found in (True, False)
            ],
            ["dice, dice_worst5, iou"],
        ),
        (
            [{"task": {"name": "segmentation", "loss": "dice", "background": found}} for found in (True, False)],
            ["dice, dice_worst5, iou, loss"],
        ),
        ([{"task": {"name": "classification", "thresholds": n}} for n in (101, 501)], ["auroc"]),
        (
            [{"task": {"name": "language_model"}, "dataset": {"tokenizer": name}} for name in ("words", "bytes")],
            ["dice, dice_worst5, iou, top1, auroc, loss, robust_top1"],
        ),
        ([{"task": {"name": "classification"}, "dataset": {"tokenizer": name}} for name in ("words", "bytes")], []),
        ([{"task": {"name": "regression", "loss": "huber", "delta": n}} for n in (1.0, 2.0)], ["loss"]),
        ([{"task": {"name": "anomaly_detection", "normal": [n]}} for n in (0, 1)], ["auroc, loss"]),
        ([{"task": {"name": "anomaly_detection", "trains": kind}} for kind in ("normal", "all")], ["loss"]),
        ([{"evaluation": {"adversarial": {"radius": n, "steps": 10}}} for n in (0.05, 0.2)], ["robust_top1"]),
        ([{"evaluation": {"adversarial": found}} for found in (None, None)], []),
    ],
)
def test_options_that_define_a_metric_are_known(contents: list[dict[str, Any]], told: list[str]) -> None:
    names = ("dice", "dice_worst5", "iou", "top1", "auroc", "loss", "robust_top1")
    runs: list[Any] = [SimpleNamespace(content=content) for content in contents]
    metrics, notes = told_apart(runs, [Metric(name, name, 1, 3, 1) for name in names])
    assert [note.partition(":")[0] for note in notes] == told
    assert [metric.column for metric in metrics if not metric.alike] == (told[0].split(", ") if told else [])


def test_the_report_on_one_run(runs: dict[str, Path], tmp_path: Path) -> None:
    said("report", str(runs["superfed"]), "--out", str(tmp_path / "one"))
    page = (tmp_path / "one" / "report.html").read_text(encoding="utf-8")
    assert "MSE" in page and "R2" in page and "Reliability" not in page
    header = (tmp_path / "one" / "figures" / "clients.csv").read_text(encoding="utf-8").splitlines()[0]
    assert "mse" in header and "global_mse" in header and "accuracy" not in header


@pytest.mark.two_cases
@pytest.mark.parametrize("kind", ["curves", "clients", "lambda"])
def test_figures(kind: str, runs: dict[str, Path], tmp_path: Path) -> None:
    said("plot", kind, str(runs["superfed"]), "--out", str(tmp_path / "figure.png"))
    assert "mse" in (tmp_path / "figure.csv").read_text(encoding="utf-8").splitlines()[0]


def test_figures_of_accuracies_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plot", "ablation", str(runs["superfed"]), "--out", str(tmp_path / "figure.png")])
    assert done.exit_code != 0
    assert "the runs are judged by mse" in str(done.exception)


def test_clients_are_listed_with_the_tasks_metrics(runs: dict[str, Path]) -> None:
    text = said("clients", str(runs["ditto"]), "--sort", "mse", "--descending", "--filter", "mae>0", "--csv")
    header, *rows = text.splitlines()
    assert "mse,mae,r2" in header and "top1" not in header
    column = header.split(",").index("mse")
    values = [float(row.split(",")[column]) for row in rows]
    assert values == sorted(values, reverse=True)
    with pytest.raises(ConfigError, match="there is no column 'top1'; there are client, name, n, loss, mse, mae, r2"):
        chosen_rows(
            [{"client": 0, "name": "0", "n": 1, "loss": 1.0, "mse": 1.0, "mae": 1.0, "r2": None}],
            [],
            "top1",
            False,
            None,
        )


def test_a_sweep_is_compared_by_a_metric_of_the_task() -> None:
    metrics = metrics_of(rayfl_schema("mse"))
    assert Measure.of_task(metrics, None, "personalized", "validation").mode == "min"
    assert Measure.of_task(metrics, "r2", "personalized", "validation").mode == "max"
    with pytest.raises(ConfigError, match=r"there is no 'top1'; the task has mse, mae, r2, loss"):
        Measure.of_task(metrics, "top1", "personalized", "validation")
    assert Measure.of_task(CLASSIFICATION.metrics, None, "personalized", "test") == Measure(judge="test")


def rayfl_schema(first: str) -> Any:
    from rayfl.metrics.regression import RegressionMeasures
    from rayfl.results.schemas import metrics_metadata, schema_of

    assert RegressionMeasures.metrics[0].name == first
    return schema_of("rounds", RegressionMeasures.metrics).with_metadata(metrics_metadata(RegressionMeasures.metrics))
