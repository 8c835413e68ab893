"""The page is whole in itself, says what the tables say, and is not moved by hostile names."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import yaml

from algorithms.registry import METHODS
from rayfl.report.curves import progress_of_models
from rayfl.report.drawing import Drawing, save, styled
from rayfl.report.process import phases
from rayfl.report.rows import RowKey, final_by_key, own_key
from rayfl.runs.finding import load_run
from tests.support.commands import command
from tests.support.documents import Document, rendered

Copied = Callable[..., Path]
Drawer = Callable[..., AbstractContextManager[None]]
HOSTILE = "x<img src=y onerror=alert(1)>&\"'$_{"


@pytest.fixture(scope="module")
def single(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on a run, for its numbers."""
    out = tmp_path_factory.mktemp("single")
    assert f"report: {out}" in command("report", str(finished / "superfed-mm-0"), "--out", str(out)).replace("\n", "")
    return out


@pytest.fixture(scope="module")
def drawn_single(finished: Path, drawing_figures: Drawer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as users have it."""
    out = tmp_path_factory.mktemp("drawn")
    with drawing_figures(every_format=True):
        command("report", str(finished / "superfed-mm-0"), "--out", str(out))
    return out


@pytest.fixture(scope="module")
def several(finished: Path, drawing_figures: Drawer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("several")
    with drawing_figures():
        command("report", *(str(run) for run in sorted(finished.iterdir())), "--out", str(out))
    return out


def document(folder: Path) -> Document:
    return Document((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(params=[pytest.param("drawn_single", marks=pytest.mark.slow), "several"])
def report(request: pytest.FixtureRequest) -> Path:
    return Path(request.getfixturevalue(request.param))


def test_nothing_is_loaded_from_elsewhere(report: Path) -> None:
    text = (report / "report.html").read_text(encoding="utf-8")
    addresses = set(re.findall(r"[a-z]+://[^\s\"'<>)]+", text))
    assert text.count("https://github.com/leeoniya/uPlot") == 1  # in the library's first comment
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert addresses <= namespaces | {"https://github.com/leeoniya/uPlot"}
    page = document(report)
    assert "@import" not in text and page.count("link") == page.count("img") == page.count("iframe") == 0
    for reference in page.references:
        assert reference.startswith(("#", "figures/", "data:image/png"))
        if reference.startswith("#"):
            assert reference[1:] in page.ids
        elif reference.startswith("figures/") and (report.name.startswith("drawn") or reference.endswith(".svg")):
            assert (report / reference).stat().st_size
    urls = re.findall(r"url\(([^)]*)\)", text)
    assert all(url.strip("'\"")[1:] in page.ids for url in urls)


def test_only_the_own_script_may_run(report: Path) -> None:
    text = (report / "report.html").read_text(encoding="utf-8")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1
    assert text.count("<script") == 1 + len(re.findall(r'<script type="application/json" (?:class|id)="[\w-]+">', text))
    assert "Copyright (c) 2022 Leon Sorokin" in scripts[0]  # the licence of the library goes with it
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = next(str(a["content"]) for tag, a in document(report).tags if a.get("http-equiv"))
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_the_page_is_well_formed_and_can_be_used_without_eyes_and_mouse(report: Path) -> None:
    page = document(report)
    assert page.wrongly_closed == [] and page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert page.count("h1") == page.count("main") == page.count("nav") == 1
    assert next(a for tag, a in page.tags if tag == "html")["lang"] == "en"
    pictures = [a for tag, a in page.tags if tag == "svg"]
    assert pictures
    assert all(a["role"] == "img" and a["aria-labelledby"] in page.ids for a in pictures)
    assert page.count("figcaption") == page.count("figure") == len(pictures)
    assert page.count("caption") == page.count("table")
    regions = [a for tag, a in page.tags if a.get("role") == "region"]
    assert all(a["tabindex"] == "0" and a["aria-labelledby"] in page.ids for a in regions)
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_figures_follow_the_pages_colours_and_their_files_come_with_their_data(report: Path) -> None:
    text = (report / "report.html").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert "var(--ink)" in picture and "var(--paper)" in picture
        assert "<metadata" not in picture
        assert set(re.findall(r"var\((--[\w-]+)\)", picture)) <= set(re.findall(r"(--[\w-]+):", text))
        assert not re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", picture)
    names = {path.stem for path in (report / "figures").glob("*.svg")}
    assert {"accuracy", "loss", "clients-accuracy", "reliability"} <= names
    for name in names:
        assert csv.read_csv(report / "figures" / f"{name}.csv").num_rows
        if report.name.startswith("drawn"):
            assert (report / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
            assert (report / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_the_summary_is_that_of_the_run(single: Path, finished: Path) -> None:
    run = load_run(str(finished / "superfed-mm-0"), METHODS)
    rows = document(single).tables["summary-table"][1:]
    assert len(rows) == len(final_by_key(run))
    for cells, row in zip(rows, final_by_key(run).values(), strict=True):
        assert cells[1] == "5"
        assert cells[2] == f"{100 * row['top1']:.2f} +- {100 * row['top1_std']:.2f}"
        assert cells[3] == f"{100 * row['top1_worst5']:.2f}"
        assert cells[0].endswith("*") == ("test" in row["selected_on"])
    assert "* chosen on test data" in document(single).text


def test_every_client_is_there(single: Path, finished: Path) -> None:
    run = load_run(str(finished / "superfed-mm-0"), METHODS)
    rows = document(single).tables["clients-table"][1:]
    key = own_key(run)
    assert key is not None
    choice = final_by_key(run)[key]["choice"]
    values = {
        row["client"]: row["top1"]
        for row in run.clients.to_pylist()
        if (row["round"], row["split"], row["cohort"], row["model"]) == (4, "test", "all", choice)
    }
    assert {int(cells[0]): cells[2] for cells in rows} == {c: f"{100 * v:.2f}" for c, v in values.items()}
    table = csv.read_csv(single / "figures" / "clients.csv")
    assert dict(zip(table["client"].to_pylist(), table["accuracy"].to_pylist(), strict=True)) == pytest.approx(values)
    rounds = [row for row in run.clients.to_pylist() if row["cohort"] == "selected"]
    assert sum(table["rounds"].to_pylist()) == len({(row["round"], row["client"]) for row in rounds}) == 12
    assert len(document(single).tables["worst-table"]) == 2


def test_the_bins_are_those_of_the_pooled_errors(single: Path, finished: Path) -> None:
    run = load_run(str(finished / "superfed-mm-0"), METHODS)
    table = csv.read_csv(single / "figures" / "reliability.csv").to_pylist()
    row = final_by_key(run)[RowKey("global")]
    bins = [entry for entry in table if entry["model"] == "global"]
    gaps = [abs(entry["accuracy"] - entry["confidence"]) for entry in bins]
    n = [entry["n"] for entry in bins]
    assert sum(n) == row["n"]
    assert sum(g * c for g, c in zip(gaps, n, strict=True)) / sum(n) == pytest.approx(row["pooled_ece"])
    assert max(gaps) == pytest.approx(row["pooled_mce"])
    assert f"global: ECE {row['pooled_ece']:.3f}, MCE {row['pooled_mce']:.3f}" in document(single).text


def test_configuration_environment_and_commands_are_there(single: Path, finished: Path) -> None:
    text = document(single).text
    run = load_run(str(finished / "superfed-mm-0"), METHODS)
    for part in (run.partition_hash, "classes_per_client: 2", run.environment[0]["versions"]["torch"], "rayfl verify"):
        assert part in text
    assert "Samples of the 5 clients by class" in text


def test_methods_are_side_by_side(several: Path) -> None:
    page = document(several)
    above, *rows = page.tables["comparison-table"]
    assert above == ["", "accuracy %", "worst 5 %", "ECE", "loss", ""]
    assert rows[0][:9] == [
        *("method", "model", "clients", "seeds"),
        *("mean", "+- clients", "+- seeds"),
        *("mean", "+- seeds"),
    ]
    assert {row[0] for row in rows[1:]} == {"fedavg", "superfed"}
    assert {(row[2], row[3]) for row in rows[1:]} == {("5", "2")}
    assert any("(best)" in cell for row in rows[1:] for cell in row)
    assert not any("(best)" in cell for row in rows[1:] if row[1].endswith("*") for cell in row)
    assert page.tables["clients-test"][1][:2] == ["fedavg", "superfed"]
    assert page.tables["seeds-test"][1][5] == "2"
    assert len(page.tables["runs-table"]) == 5
    assert "not independent" in page.text
    saved = csv.read_csv(several / "figures" / "comparison.csv")
    assert saved.num_rows == len(rows) - 1


def test_hostile_names_are_shown_as_they_are(copied: Copied, drawing_figures: Drawer) -> None:
    run = copied("superfed-mm-0", HOSTILE)
    for name in ("clients", "rounds", "calibration", "skipped"):
        table = pq.read_table(run / f"{name}.parquet")
        if name == "skipped":
            entry = {"round": 1, "client": 0, "name": HOSTILE, "procedure": HOSTILE, "reason": f"s3://k:s@b {HOSTILE}"}
            table = pa.Table.from_pylist([entry], schema=table.schema)
        elif name == "clients":
            place = table.column_names.index("name")
            table = table.set_column(place, "name", pa.array([HOSTILE] * table.num_rows))
        else:
            place = table.column_names.index("model")
            renamed = [HOSTILE if model == "global" else model for model in table["model"].to_pylist()]
            table = table.set_column(place, "model", pa.array(renamed))
        pq.write_table(table, run / f"{name}.parquet")
    content = yaml.safe_load((run / "config.yaml").read_text())
    content["algorithm"] = {"name": f"{HOSTILE}</script><script>alert(2)</script>", "password": "hunter2"}
    content["storage_path"] = "s3://AKIA:hunter3@bucket/runs?secret_key=hunter4&region=eu"
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    with drawing_figures():
        text = rendered(run)
    page = Document(text)
    assert page.count("img") == 0
    assert [a.get("type") for tag, a in page.tags if tag == "script" and a.get("type") != "application/json"] == [None]
    assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)]
    assert page.wrongly_closed == []
    assert HOSTILE in page.text
    assert page.tables["skipped-table"][1][3] == f"s3://***@b {HOSTILE}"
    assert "hunter" not in text and "AKIA" not in text


def test_equal_runs_give_equal_pages_and_files(
    single: Path, finished: Path, drawing_figures: Drawer, tmp_path: Path
) -> None:
    assert rendered(finished / "superfed-mm-0") == (single / "report.html").read_text(encoding="utf-8")
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        with styled(), drawing_figures(every_format=True):
            drawing = phases(load_run(str(finished / "superfed-mm-0"), METHODS))
            assert isinstance(drawing, Drawing)
            save(drawing, folder)
    starts = {"phases.png": b"\x89PNG", "phases.svg": b"<?xml", "phases.pdf": b"%PDF", "phases.csv": b""}
    assert {path.name for path in folder.iterdir()} == starts.keys()
    for path in folder.iterdir():
        assert path.read_bytes().startswith(starts[path.name])
        assert path.read_bytes() == (tmp_path / "one" / path.name).read_bytes()


def test_a_run_that_has_only_begun_and_one_without_its_data(copied: Copied) -> None:
    run = copied("fedavg-0")
    for name in ("rounds", "clients", "skipped", "calibration"):
        (run / f"{name}.parquet").unlink()
    content = yaml.safe_load((run / "config.yaml").read_text())
    content["train"]["rounds"] = 9
    content["dataset"] = {"name": "custom", "function": "trap:open"}
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    text = command("report", str(run))
    assert "note: The run is unfinished: 4 of 9 rounds are done." in text.replace("\n", " ")
    page = document(run / "report")
    assert "there are no results to show" in page.text
    assert "does not run code that a run's configuration names (trap:open)" in page.text
    assert "summary-table" not in page.tables


@pytest.mark.slow
def test_bins_that_were_never_recorded_are_said_to_be_missing(copied: Copied) -> None:
    run = copied("fedavg-0")
    (run / "calibration.parquet").unlink()
    (run / "environment.json").unlink()
    text = Document(rendered(run)).text
    assert "The run has no calibration.parquet" in text
    assert "did not record its environment" in text


def test_a_curve_of_one_evaluation_is_a_table(copied: Copied) -> None:
    run = copied("fedavg-0")
    for name in ("rounds", "clients"):
        table = pq.read_table(run / f"{name}.parquet")
        pq.write_table(table.filter(pc.field("round") == 4), run / f"{name}.parquet")
    lines = (run / "timings.jsonl").read_text().splitlines()
    (run / "timings.jsonl").write_text(lines[-1] + "\n")
    page = Document(rendered(run))
    row = final_by_key(load_run(str(run), METHODS))[RowKey("global")]
    numbers = next(cells for cells in page.tables["accuracy-table"] if cells[0] == "global")
    assert numbers[:5] == ["global", "4", f"{100 * row['top1']:.2f}", f"{100 * row['top1_std']:.2f}", "5"]
    assert numbers[-1] == "-"  # times of earlier rounds are missing
    losses = next(cells for cells in page.tables["loss-table"] if cells[0] == "global")
    assert losses[2] == f"{row['loss']:.3f}"
    assert [cells[0] for cells in page.tables["phases-table"][1:]] == ["clients", "server", "evaluation", "commit"]
    assert not {"accuracy-title", "loss-title", "phases-title"} & set(page.ids)


def test_ticks_of_rounds_are_integers(finished: Path) -> None:
    run = load_run(str(finished / "fedavg-0"), METHODS)
    with styled():
        drawings = [*progress_of_models(run), phases(run)]
        assert len(drawings) == 3
        for drawing in drawings:
            assert isinstance(drawing, Drawing)
            drawing.figure.draw_without_rendering()
            ticks = drawing.figure.axes[0].get_xticks()
            assert all(float(tick).is_integer() for tick in ticks) and len(ticks) > 1
