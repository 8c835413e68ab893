"""Who is harmed, and what runs took: numbers, pairs by client, seeds, formats, refusals."""

from __future__ import annotations

import csv
import io
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import rayfl
from algorithms.registry import METHODS
from rayfl.cli.entry import app
from rayfl.errors import ConfigError
from rayfl.report import costs, harm
from rayfl.report.comparison import check_models, compare
from rayfl.report.grouping import group_runs
from rayfl.report.lines import Wanted
from rayfl.report.rows import RowKey, compared_keys
from rayfl.report.several import comparison_table
from rayfl.runs.finding import load_runs
from rayfl.runs.loading import Run
from rayfl.runs.rows import where
from rayfl.storage import treefile
from rayfl.storage.commits import CommitStore
from tests.support.experiments import small_experiment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ditto with two seeds, and local training with both; operations are counted."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("ditto", "local"):
        for seed in (0, 1):
            made = small_experiment(folder, f"{method}-{seed}", method, backend="inline")
            made["train"] = {**made["train"], "rounds": 2}
            rayfl.run({**made, "seed": seed, "tracking": {"tensorboard": False, "flops": True}})
    return folder


def loaded(folder: Path, *names: str) -> list[Run]:
    return load_runs([str(folder / name) for name in names], METHODS)


def accuracies(run: Run, model: str) -> dict[int, float]:
    rows = where(run.clients, round=2, cohort="all", split="test", model=model)
    return dict(zip(rows["client"].to_pylist(), rows["top1"].to_pylist(), strict=True))


def lines_of(runs: list[Run]) -> tuple[list[harm.Harm], list[str]]:
    groups = group_runs(runs)
    return harm.found(groups, {group.label: compared_keys(group.runs[0]) for group in groups})


def test_shares_below_are_paired_by_client_and_quantiles_are_over_clients(folder: Path) -> None:
    ditto, local = runs = loaded(folder, "ditto-0", "local-0")
    lines, notes = lines_of(runs)
    by_row = {(line.method, line.model): line for line in lines}
    own, shared, alone = (accuracies(run, model) for run, model in ((ditto, "personalized"), (ditto, "global"),
                                                                    (local, "personalized")))  # fmt: skip
    line = by_row["ditto", "personalized"]
    assert line.below["global"] == harm.Over(np.mean([own[k] < shared[k] for k in own]), None)
    assert line.below["local"] == harm.Over(np.mean([own[k] < alone[k] for k in own]), None)
    assert [line.quantiles[q].mean for q in harm.QUANTILES] == pytest.approx(
        np.percentile(list(own.values()), harm.QUANTILES)
    )
    assert by_row["ditto", "global"].below["global"] is None, "a model is not compared with itself"
    assert by_row["local", "personalized"].below == {"global": None, "local": None}
    assert line.clients == 5 and not notes


def test_over_seeds_there_is_a_mean_and_a_spread_and_each_seed_has_its_own_local_run(folder: Path) -> None:
    runs = loaded(folder, "ditto-0", "ditto-1", "local-0", "local-1")
    line = next(one for one in lines_of(runs)[0] if (one.method, one.model) == ("ditto", "personalized"))
    singles = [
        next(one for one in lines_of(loaded(folder, f"ditto-{s}", f"local-{s}"))[0] if one.model == "personalized")
        for s in (0, 1)
    ]
    for name in harm.REFERENCES:
        each = [one.below[name].mean for one in singles]  # type: ignore[union-attr]
        assert line.below[name] == harm.Over(pytest.approx(np.mean(each)), pytest.approx(np.std(each, ddof=1)))
    assert line.seeds == 2 and line.quantiles[50].std is not None


def test_without_local_training_of_the_same_seed_nobody_is_below_it(folder: Path) -> None:
    lines, notes = lines_of(loaded(folder, "ditto-0"))
    assert all(line.below["local"] is None for line in lines)
    assert notes == ["No run of the method local with the same data and seed: nobody is compared with local training."]
    lines, _ = lines_of(loaded(folder, "ditto-0", "ditto-1", "local-1"))
    assert all(line.below["local"] is None for line in lines if line.method == "ditto"), "one seed has no such run"


def compared(folder: Path, *options: str) -> Any:
    names = ("ditto-0", "ditto-1", "local-0", "local-1")
    done = CliRunner().invoke(app, ["compare", *(str(folder / name) for name in names), *options])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


@pytest.mark.slow
def test_compare_prints_harm_in_every_format_that_there_is(folder: Path) -> None:
    assert "below" in compared(folder, "--about", "harm") and "Who is harmed" in compared(folder, "--about", "harm")
    content = json.loads(compared(folder, "--about", "harm", "--json"))
    assert content["schema"] == "rayfl.compare-harm/1" and content["notes"] == []
    rows = list(csv.DictReader(io.StringIO(compared(folder, "--about", "harm", "--format", "csv"))))
    assert [row["method"] for row in rows] == [row["method"] for row in content["rows"]]
    for text, row in zip(rows, content["rows"], strict=True):
        for name in ("below_global", "below_local", "q05", "q50", "q95_std_over_seeds"):
            assert (float(text[name]) if text[name] else None) == row[name]
    for options, words in {
        ("--about", "harm", "--metric", "loss"): "--metric chooses columns of --about means; --about harm has its own",
        ("--json", "--format", "csv"): "--json and --format csv: choose one",
    }.items():
        done = CliRunner().invoke(app, ["compare", str(folder / "ditto-0"), *options])
        assert words in str(done.exception)


@pytest.mark.parametrize("about", ["harm", "costs"])
@pytest.mark.first_case
def test_papers_have_the_numbers_of_the_csv_and_the_protocol(folder: Path, about: str) -> None:
    read = csv.DictReader(io.StringIO(compared(folder, "--about", about, "--format", "csv")))
    rows = [row for row in read if row.get("model") != "global"]  # papers have each method's own model
    markdown = compared(folder, "--about", about, "--format", "markdown")
    printed = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if line[:1] == "|"
    ]
    head, _, *lines = printed
    assert "Protocol: " in markdown and len(lines) == len(rows)
    name, heading, scale = {
        "harm": ("q50", "median", 100.0),
        "costs": ("client_seconds", "client seconds", 1.0),
    }[about]
    for line, row in zip(lines, rows, strict=True):
        shown = [float(number) for number in line[head.index(heading)].split(" ± ")]
        exact = [scale * float(row[field]) for field in (name, f"{name}_std_over_seeds")]
        assert shown == pytest.approx(exact, rel=0.005, abs=0.005)
    latex = compared(folder, "--about", about, "--format", "latex")
    assert f"\\label{{tab:{about}-" in latex and "Protocol: " in latex
    assert latex.count("\\pm ") == sum(" ± " in cell for line in lines for cell in line)


def test_papers_have_no_column_without_a_number(folder: Path) -> None:
    done = CliRunner().invoke(app, ["compare", str(folder / "ditto-0"), "--about", "harm", "--format", "latex"])
    assert done.exit_code == 0, done.output
    assert "below global" in done.stdout and "below local \\\\" not in done.stdout
    assert "nobody is compared with local training" in done.stdout


def test_the_report_has_both_sections(folder: Path, tmp_path: Path) -> None:
    runs = [str(folder / name) for name in ("ditto-0", "local-0")]
    done = CliRunner().invoke(app, ["report", *runs, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Who is harmed" in page and "below local," in page and "operations (GFLOP)" in page
    with (tmp_path / "figures" / "costs.csv").open() as file:
        drawn = {(row["method"], row["cost"]) for row in csv.DictReader(file)}
    assert {cost for _, cost in drawn} == {cost.name for cost in costs.COSTS}


def test_costs_are_those_of_the_files(folder: Path) -> None:
    lines, notes = costs.found(group_runs(loaded(folder, "ditto-0", "ditto-1")), {})
    (line,) = lines
    runs = loaded(folder, "ditto-0", "ditto-1")
    sums = [sum(one["flops"] for one in run.costs) for run in runs]
    assert line.costs["flops"] == costs.Over(pytest.approx(np.mean(sums)), pytest.approx(np.std(sums, ddof=1)))
    # two models are trained in each client's round, but one travels
    local = costs.found(group_runs(loaded(folder, "local-0")), {})[0][0]
    alone = local.costs["flops"]
    assert alone is not None and 1.9 < sums[0] / alone.mean < 2.1
    assert local.costs["bytes_sent"] == costs.Over(0.0, None)
    assert all(over is not None and over.mean > 0 for over in line.costs.values()) and not notes
    assert len(runs[0].costs) == 2 and runs[0].costs[-1]["states"] >= 3


@pytest.mark.parametrize("commit_every", [1, 4])
def test_a_state_is_as_large_however_often_states_are_committed(tmp_path: Path, commit_every: int) -> None:
    """Files of earlier commits also hold states that later ones have replaced: these count for nothing."""
    storage = {"commit_every": commit_every, "keep_commits": 1}
    rayfl.run({**small_experiment(tmp_path, "run", "ditto", backend="inline"), "storage": storage})
    (run,) = loaded(tmp_path, "run")
    store = CommitStore(run.storage)
    manifest = store.latest()
    assert manifest is not None and (len({file.name for file in manifest.states.values()}) > 1) is (commit_every == 1)
    live = [store.read_states(file)[client] for client, file in manifest.states.items()]
    (line,), _ = costs.found(group_runs([run]), {})
    size = line.costs["state_bytes"]
    mean = np.mean([len(treefile.dumps(state)) for state in live])
    assert size is not None and size.mean == pytest.approx(mean, rel=0.1)


def test_costs_that_were_not_counted_are_no_numbers(folder: Path, tmp_path: Path) -> None:
    made = small_experiment(tmp_path, "plain", "fedavg", backend="inline")
    made["train"] = {**made["train"], "rounds": 2}
    rayfl.run(made)
    (line,), (about_operations,) = costs.found(group_runs(loaded(tmp_path, "plain")), {})
    assert line.costs["flops"] is None and "tracking.flops=true" in about_operations
    assert line.costs["client_seconds"] is not None
    file = tmp_path / "plain" / "costs.jsonl"
    file.write_text("".join(text for text in file.read_text().splitlines(True) if '"round": 1' not in text))
    (cut,), notes = costs.found(group_runs(loaded(tmp_path, "plain")), {})
    assert cut.costs["client_seconds"] is None
    assert "Client seconds of plain are not known: costs.jsonl lacks rounds" in notes[1]
    file.unlink()
    (old,) = loaded(tmp_path, "plain")
    assert not costs.section(group_runs([old])), "a run from before costs were noted has no such section"


def test_a_sweeps_choice_for_each_client_has_no_rows_and_is_left_out(folder: Path) -> None:
    groups = group_runs(loaded(folder, "ditto-0"))
    key = RowKey("lambda=best", "validation per client")
    assert harm.found(groups, {groups[0].label: [key]})[0] == []


def test_infinite_numbers_are_shown_and_are_null_in_json(folder: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        run = Path(shutil.copytree(folder / f"ditto-{seed}", tmp_path / f"ditto-{seed}"))
        shutil.copytree(folder / f"local-{seed}", tmp_path / f"local-{seed}")
        for name in ("clients", "rounds"):
            table = pq.read_table(run / f"{name}.parquet")
            ruined = pc.and_(pc.equal(table["model"], "personalized"), pc.greater(table.column(name[:-1]), 0))
            place = table.schema.get_field_index("top1")
            worst = pc.if_else(ruined, pa.scalar(float("-inf")), table["top1"])
            pq.write_table(table.set_column(place, table.schema.field("top1"), worst), run / f"{name}.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for about in ("harm", "means"):
            content = json.loads(compared(tmp_path, "--about", about, "--json"), parse_constant=refused)
            shown = compared(tmp_path, "--about", about)
            assert "-inf" in shown and "nan" not in shown
            assert any(None in row.values() for row in content["rows" if about == "harm" else "tests"])
    page = comparison_table(compare(load_runs([str(path) for path in sorted(tmp_path.iterdir())], METHODS), Wanted()))
    assert "-inf" in {cell.text for row in page.rows for cell in row}


def test_rows_are_listed_once_where_another_was_asked_for(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model globl: .*did you mean 'global'.*; there are personalized, global$"):
        check_models(loaded(folder, "ditto-0"), ["globl"])


def refused(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


def test_the_legend_has_methods_of_which_a_cost_is_not_known(folder: Path) -> None:
    ditto, local = loaded(folder, "ditto-0", "local-0")
    ditto.costs = [{name: value for name, value in line.items() if name != "flops"} for line in ditto.costs]
    drawn = costs.drawing(group_runs([ditto, local]))
    assert drawn is not None
    (legend,) = drawn.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ditto", "local"]


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [
        (12.3, 0.456, "12.30 +- 0.46"),
        (0.0123, 0.004, "0.01230 +- 0.00400"),
        (123456.0, 12.5, "123,456 +- 12"),
        (0.0, 0.0, "0.000 +- 0.000"),
        (4.0, None, "4"),
    ],
)
def test_the_spread_of_a_cost_ends_where_its_mean_ends(mean: float, std: float | None, text: str) -> None:
    seconds = costs.Cost("seconds", "seconds", 1.0, lambda run: mean)
    assert costs.cell_of(harm.Over(mean, std), seconds).text == text
