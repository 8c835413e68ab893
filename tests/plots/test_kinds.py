"""Every kind of figure is drawn, says in numbers what the tables say, and refuses runs that cannot give it."""

from __future__ import annotations

import inspect
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pytest
from typer.testing import CliRunner

from algorithms.registry import Experiment
from rayfl.cli.entry import app
from rayfl.errors import ConfigError, RayflError, RunError
from rayfl.metrics import Metric
from rayfl.plots import variance
from rayfl.plots.kinds import KINDS
from rayfl.plots.metrics import measure
from rayfl.plots.output import write_plot
from rayfl.results.schemas import METRICS_KEY
from rayfl.runs.curves import accuracy_curve
from rayfl.runs.folder import RunFolder, open_run
from rayfl.runs.rows import last_round, model_rows, personalized_rows, where
from tests.plots.conftest import Runs


def drawn(kind: str, runs: list[RunFolder], folder: Path, ending: str = ".png", **options: Any) -> pa.Table:
    """The numbers beside a figure, which must be there."""
    figure = folder / f"figure{ending}"
    numbers = write_plot(kind, runs, figure, **options)
    start = figure.read_bytes()[:600]
    assert {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<svg"}[ending] in start
    return pyarrow.csv.read_csv(numbers)


def rows(table: pa.Table, **values: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = where(table, **values).to_pylist()
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_takes_the_options_it_says(name: str) -> None:
    parameters = list(inspect.signature(KINDS[name].draw).parameters)
    assert parameters == ["runs", *KINDS[name].options]


def test_curves(made: Runs, tmp_path: Path) -> None:
    runs = [made("superfed-mm"), made("superfed-mm", seed=1), made("fedavg")]
    table = drawn("curves", runs, tmp_path)
    assert set(table["series"].to_pylist()) == {"SuPerFed", "FedAvg"}
    curves = [accuracy_curve(run.rounds, "global") for run in runs[:2]]
    for row in rows(table, series="SuPerFed", model="global"):
        values = [curve[row["round"]] for curve in curves]
        assert row["top1"] == pytest.approx(sum(values) / 2)
        assert row["top1_std_over_seeds"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
        assert row["seeds"] == 2
    last = rows(table, series="FedAvg", round=3)[0]
    sent = rows(runs[2].rounds, round=3, cohort="all")[0]
    assert last["megabytes"] == pytest.approx((sent["bytes_down"] + sent["bytes_up"]) / 1e6)
    lines = [json.loads(line) for line in runs[2].storage.read("timings.jsonl").decode().splitlines()]
    assert last["seconds"] == pytest.approx(sum(line["clients"] + line["server"] + line["commit"] for line in lines))
    chosen = rows(table, series="SuPerFed", model="best lambda")
    assert {row["round"] for row in chosen} == set(personalized_rows(runs[0])["round"].to_pylist())


def test_curves_over_seconds_need_the_times_of_all_rounds(made: Runs, tmp_path: Path) -> None:
    run = made("fedavg")
    run = RunFolder(run.storage, run.config)
    run.timings = run.timings[1:]
    with pytest.raises(RunError, match="lacks rounds up to round 1"):
        drawn("curves", [run], tmp_path, x="seconds")
    assert drawn("curves", [run], tmp_path, x="rounds").num_rows
    folder = Path(shutil.copytree(run.uri, tmp_path / "run"))
    (folder / "timings.jsonl").unlink()
    with pytest.raises(RunError, match=r"has no timings.jsonl, so its seconds are not known: it was deleted"):
        drawn("curves", [open_run(str(folder), Experiment)], tmp_path, x="seconds")


def test_curves_of_one_model_on_one_axis(made: Runs, tmp_path: Path) -> None:
    table = drawn("curves", [made("superfed-mm")], tmp_path, ".svg", x="rounds", model="lambda=0.5")
    assert "seconds" not in table.column_names
    assert set(table["model"].to_pylist()) == {"lambda=0.5"}


def test_curves_of_one_metric(made: Runs, tmp_path: Path) -> None:
    run = made("fedavg")
    table = drawn("curves", [run], tmp_path, x="rounds", metric="ece")
    assert [row["ece"] for row in table.to_pylist()] == pytest.approx(
        [row["ece"] for row in rows(run.rounds, model="global", cohort="all", split="test")]
    )
    assert "top1" not in table.column_names and "loss" not in table.column_names
    with pytest.raises(ConfigError, match=r"--metric: there is no 'auroc'"):
        drawn("curves", [run], tmp_path, metric="auroc")
    known = {METRICS_KEY: json.dumps([asdict(Metric("auroc", "AUROC", "higher"))])}
    binary = pa.table({}).replace_schema_metadata(known)
    with pytest.raises(ConfigError, match=r"--metric: not all runs have 'auroc'"):
        measure("auroc", [run.rounds, binary])


@pytest.mark.slow
def test_lambda(made: Runs, tmp_path: Path) -> None:
    runs = [made("superfed-mm"), made("apfl", algorithm={"name": "apfl", "alpha": 0.25}), made("superfed-lm")]
    table = drawn("lambda", runs, tmp_path, ".pdf", metric="loss")
    mine = rows(table, series="SuPerFed, mode=mm")
    assert [row["lambda"] for row in mine] == [round(0.1 * i, 1) for i in range(11)]
    for row in mine:
        found = rows(model_rows(runs[0], f"lambda={row['lambda']}"), round=3)[0]
        assert (row["loss"], row["loss_std_over_clients"]) == (
            pytest.approx(found["loss"]),
            pytest.approx(found["loss_std"]),
        )
    assert [row["lambda"] for row in rows(table, series="APFL")] == [0.25]


def test_seeds_at_different_rounds_have_no_mean(made: Runs, tmp_path: Path) -> None:
    whole, other = made("superfed-mm"), made("superfed-mm", seed=1)
    behind = RunFolder(other.storage, other.config)
    behind.rounds = other.rounds.filter(pc.less(other.rounds["round"], 3))
    with pytest.raises(RunError, match=r"evaluated last after round 2, and .*, with another seed, after round 3"):
        drawn("lambda", [whole, behind], tmp_path)


@pytest.mark.slow
def test_ablation_of_weights(made: Runs, tmp_path: Path) -> None:
    runs = [made("superfed-mm", **{"algorithm.proximal_weight": mu}) for mu in (0.0, 1.0)]
    runs.append(made("superfed-mm", **{"algorithm.orthogonality_weight": 5.0, "algorithm.proximal_weight": 1.0}))
    table = drawn("ablation", runs, tmp_path)
    assert {(row["nu"], row["mu"]) for row in table.to_pylist()} == {(1.0, 0.0), (1.0, 1.0), (5.0, 1.0)}
    assert table.num_rows == 33
    expected = rows(model_rows(runs[0], "global"), round=3)[0]["top1"]
    assert rows(table, nu=1.0, mu=0.0)[0]["global_top1"] == pytest.approx(expected)


def test_ablation_of_the_phase_ratio(made: Runs, tmp_path: Path) -> None:
    runs = [made("superfed-mm"), made("superfed-mm", **{"algorithm.start": 0.5})]
    table = drawn("ablation", runs, tmp_path)
    assert [row["ratio"] for row in table.to_pylist()] == [0.25, 0.5]
    best = personalized_rows(runs[0])
    expected = rows(best, round=last_round(best))[0]["top1"]
    assert table["top1"][0].as_py() == pytest.approx(expected)


@pytest.mark.slow
def test_heatmap(made: Runs, tmp_path: Path) -> None:
    runs = [made("floco", **{"algorithm.assignment_round": tau, "algorithm.radius": 0.2}) for tau in (1, 2)]
    runs.append(made("floco", **{"algorithm.assignment_round": 1, "algorithm.radius": 0.4}))
    table = drawn("heatmap", runs, tmp_path)
    assert {(row["tau"], row["rho"]) for row in table.to_pylist()} == {(1, 0.2), (2, 0.2), (1, 0.4)}
    for run, row in zip(runs, table.to_pylist(), strict=True):
        assert row["local_top1"] == pytest.approx(rows(model_rows(run, "personalized"), round=3)[0]["top1"])
        assert row["global_top1"] == pytest.approx(rows(model_rows(run, "global"), round=3)[0]["top1"])


def test_variance(made: Runs, tmp_path: Path) -> None:
    run = made("fedavg")
    table = drawn("variance", [run, made("fedavg", seed=1), made("floco")], tmp_path)
    assert [row["round"] for row in rows(table, series="FLOCO")] == [1, 2, 3]
    assert all(row["update_variance"] > 0 for row in table.to_pylist())
    assert {row["seeds"] for row in rows(table, series="FedAvg")} == {2}


@pytest.mark.parametrize("values", [(0.508, 0.481), (0.5, 0.9), (0.1, 0.25), (300.0, 900.0), (1e-5, 3.0), (0.0, 1.0)])
def test_ticks_of_the_variance_are_different_numbers(
    made: Runs, monkeypatch: pytest.MonkeyPatch, values: tuple[float, float]
) -> None:
    monkeypatch.setattr(variance, "_variance", lambda run: dict(enumerate(values, 1)))
    figure, _ = variance.draw([made("fedavg")])
    figure.canvas.draw()
    (axes,) = figure.axes
    texts = [tick.get_text() for tick in axes.get_yticklabels(which="both")]
    shown = [text for text in texts if text]
    assert len(shown) == len(set(shown)) > 1


def test_variance_counts_whole_cohorts(made: Runs, tmp_path: Path) -> None:
    # the smallest clients have no sample of one split or the other
    small = {"partition": {"name": "dirichlet", "num_clients": 20, "alpha": 0.5}, "holdout.test": 0.01}
    run = made("fedavg", **small, **{"holdout.validation": 0.01})
    scored = {row["clients"] for row in rows(run.rounds, cohort="selected", split="test")}
    assert min(scored) < run.config.train.clients_per_round
    table = drawn("variance", [run], tmp_path)
    assert {row["clients"] for row in table.to_pylist()} == {run.config.train.clients_per_round}


@pytest.mark.slow
def test_delta(made: Runs, tmp_path: Path) -> None:
    received = {"evaluation.cohort_received": True}
    runs = [made(method, **received) for method in ("fedphp", "fedavg", "superfed-mm")]
    table = drawn("delta", runs, tmp_path)
    # What its clients go on with is what they had: the point of FedPHP.
    assert {row["delta"] for row in rows(table, series="FedPHP")} == {0.0}
    for row in rows(table, series="FedAvg"):
        assert row["delta"] == pytest.approx(row["next_download"] - row["after_training"])
    assert [row["round"] for row in rows(table, series="SuPerFed")] == [1, 2, 3]


def test_rounds_time(made: Runs, tmp_path: Path) -> None:
    inline = made("fedavg")
    with pytest.raises(RunError, match=r"cluster\.backend=ray"):
        drawn("rounds-time", [inline], tmp_path)
    timings = [{"round": r, "clients": 2.0 * r, "server": 1.0, "commit": 0.1, "evaluation": 9.0} for r in (1, 2)]
    cluster = inline.config.cluster.model_copy(update={"backend": "ray"})
    run = RunFolder(inline.storage, inline.config.model_copy(update={"cluster": cluster}))
    run.__dict__["timings"] = timings
    row = drawn("rounds-time", [run], tmp_path).to_pylist()[0]
    assert (row["rounds"], row["clients_s"], row["clients_s_std"], row["server_s"]) == (2, 3.0, 1.0, 1.0)


@pytest.mark.slow
def test_architectures(made: Runs, tmp_path: Path) -> None:
    fixed = {"algorithm.initial_architecture": 1, "algorithm.model_tuning": False}
    runs = [made("fedme"), made("fedme", **fixed)]
    table = drawn("architectures", runs, tmp_path)
    by_series = {label: rows(table, series=label) for label in dict.fromkeys(table["series"].to_pylist())}
    assert [sum(row["clients"] for row in found) for found in by_series.values()] == [5, 5]
    assert [row["clients"] for row in list(by_series.values())[1]] == [0, 5]
    assert {row["architecture"] for row in table.to_pylist()} == {"two_nn hidden=[12]", "two_nn hidden=[8, 8]"}
    expected = rows(model_rows(runs[0], "personalized"), round=3)[0]
    assert table["all_top1"][0].as_py() == pytest.approx(expected["top1"])
    assert table["all_top1_std_over_clients"][0].as_py() == pytest.approx(expected["top1_std"])


def test_clients(made: Runs, tmp_path: Path) -> None:
    run = made("superfed-mm")
    table = drawn("clients", [run, made("fedavg")], tmp_path, metric="loss", split="validation")
    mine = rows(table, series="SuPerFed")
    losses = [row["loss"] for row in mine]
    assert losses == sorted(losses) and len(losses) == 5
    summary = rows(model_rows(run, mine[0]["model"], "validation"), round=3)[0]
    assert sum(losses) / 5 == pytest.approx(summary["loss"])


REFUSED: dict[str, tuple[str, list[tuple[str, dict[str, Any]]], dict[str, Any], str]] = {
    "kind": ("curvs", [("fedavg", {})], {}, "did you mean 'curves'"),
    "no run": ("curves", [], {}, "needs the folder of a run"),
    "twice": ("curves", [("fedavg", {}), ("fedavg", {})], {}, "is given twice"),
    "option": ("curves", [("fedavg", {})], {"points": 3}, "--points: curves does not take this option"),
    "x": ("curves", [("fedavg", {})], {"x": "hours"}, "there are rounds, bytes, seconds"),
    "model": ("curves", [("fedavg", {})], {"model": "hpm"}, "there are: global"),
    "split": (
        "landscape",
        [("fedavg", {})],
        {"plane": "random", "split": "official"},
        "--split: landscape has no 'official'",
    ),
    "no rows": ("curves", [("fedavg", {})], {"split": "train"}, "evaluation.splits"),
    "no split": ("landscape", [("fedavg", {})], {"plane": "random", "split": "trian"}, "did you mean 'train'"),
    "metric": ("clients", [("fedavg", {})], {"metric": "f1"}, "there is no 'f1'"),
    "no sweep": ("lambda", [("fedavg", {})], {}, "algorithm=superfed or apfl"),
    "adaptive": ("lambda", [("apfl", {})], {}, "algorithm.adaptive=true"),
    "first phase": ("lambda", [("superfed-mm", {"algorithm.start": 2.0})], {}, "second phase has not begun"),
    "no superfed": ("ablation", [("fedavg", {})], {}, "algorithm=superfed"),
    "one cell": ("ablation", [("superfed-mm", {})], {}, "algorithm.orthogonality_weight"),
    "both": (
        "ablation",
        [("superfed-mm", {}), ("superfed-mm", {"algorithm.start": 0.5, "algorithm.proximal_weight": 0.0})],
        {},
        "one of the two",
    ),
    "more": ("ablation", [("superfed-mm", {}), ("superfed-mm", {"train.lr": 0.2})], {}, "differ in train.lr as well"),
    "one cell of floco": ("heatmap", [("floco", {})], {}, "algorithm.assignment_round"),
    "no cohort": ("variance", [("fedavg", {"evaluation.cohort_every": 0})], {}, "evaluation.cohort_every=1"),
    "no updates": ("variance", [("fedme", {})], {}, "no updates of a last layer"),
    "not received": ("delta", [("fedavg", {})], {}, "evaluation.cohort_received=true"),
    "one architecture": ("architectures", [("fedavg", {})], {}, "model.candidates"),
    "two runs": ("landscape", [("fedavg", {}), ("superfed-mm", {})], {}, "needs three runs"),
    "no own models": ("landscape", [("fedavg", {})], {}, "no models of their own"),
    "plane": ("landscape", [("fedavg", {})], {"plane": "flat"}, "there are models, random"),
    "grid": ("landscape", [("fedavg", {})], {"points": 2}, "--points: 2 is too few"),
    "samples": ("landscape", [("fedavg", {})], {"samples": 0}, "--samples"),
    "random clients": ("landscape", [("fedavg", {})], {"plane": "random", "clients": [0, 1]}, "--clients"),
    "one client": ("landscape", [("superfed-mm", {})], {"clients": [1, 1]}, "2 different clients"),
    "no client": ("landscape", [("superfed-mm", {})], {"clients": [0, 9]}, "numbered 0 to 4"),
    "dimension": ("simplex", [("floco", {})], {}, "algorithm.simplex_dimension=2"),
    "no points": (
        "simplex",
        [("floco", {"algorithm.simplex_dimension": 2, "algorithm.assignment_round": 9})],
        {},
        "algorithm.assignment_round=9",
    ),
    "no candidates": ("landscape", [("fedme", {})], {"plane": "random"}, "no model 'global'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_drawn_is_refused(made: Runs, tmp_path: Path, case: str) -> None:
    kind, wanted, options, message = REFUSED[case]
    with pytest.raises(RayflError, match=message):
        write_plot(kind, [made(method, **overrides) for method, overrides in wanted], tmp_path / "f.png", **options)
    assert list(tmp_path.iterdir()) == []


def test_one_experiment_with_one_seed_is_no_repetition(made: Runs, tmp_path: Path) -> None:
    runs = [made("fedavg"), made("fedavg", **{"evaluation.every": 3})]
    with pytest.raises(ConfigError, match="one experiment with one seed"):
        write_plot("variance", runs, tmp_path / "f.png")


def test_the_command(made: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = made("superfed-mm").storage.uri
    done = CliRunner().invoke(app, ["plot", "clients", run, "--metric", "top5"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "clients of 1 run -> clients.png, clients.csv" in done.output
    assert {path.name for path in tmp_path.iterdir()} == {"clients.png", "clients.csv"}
    with pytest.raises(ConfigError, match="must end in"):
        CliRunner().invoke(app, ["plot", "clients", run, "--out", "f.bmp"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="must look like 3,17"):
        CliRunner().invoke(app, ["plot", "landscape", run, "--clients", "a"], catch_exceptions=False)
    with pytest.raises(RunError, match="is no run's folder"):
        CliRunner().invoke(app, ["plot", "clients", str(tmp_path)], catch_exceptions=False)


def test_help_and_page_name_every_kind() -> None:
    text = " ".join(CliRunner().invoke(app, ["plot", "--help"], env={"COLUMNS": "200"}).output.split())
    page = (Path(__file__).parents[2] / "docs" / "plots.md").read_text()
    for name, kind in KINDS.items():
        assert f"{name}: {kind.description.split(',')[0]}"[:60] in text
        assert f"rayfl plot {name} " in page
