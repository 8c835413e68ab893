"""Comparisons as CSV, JSON, Markdown and LaTeX, of chosen rows, and of several data sets."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner, Result

from algorithms.registry import METHODS
from rayfl.cli.entry import app
from rayfl.errors import RayflError
from rayfl.metrics import Metric
from rayfl.report.columns import NO_NUMBER
from rayfl.report.formats import JSON_SCHEMA, NUMBERS_SCHEMA, as_latex
from rayfl.report.paper import PaperCell, PaperTable
from rayfl.report.rows import RowKey, final_by_key
from rayfl.results.schemas import METRICS_KEY, metrics_of
from rayfl.runs.finding import load_run, load_runs, runs_in

Copied = Callable[..., Path]
NAMES = ("fedavg-0", "fedavg-1", "superfed-mm-0", "superfed-mm-1")


def ran(command: str, *arguments: object) -> Result:
    done = CliRunner().invoke(app, [command, *map(str, arguments)])
    if isinstance(done.exception, RayflError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture
def folders(finished: Path) -> list[Path]:
    return [finished / name for name in NAMES]


def other_data(run: Path) -> Path:
    """The run, had it been made on a data set ``letters_&_more`` with other clients."""
    content = yaml.safe_load((run / "config.yaml").read_text())
    content["dataset"]["name"] = "letters_&_more"
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    partition = pq.read_table(run / "partition.parquet")
    pq.write_table(partition.slice(1), run / "partition.parquet")
    return run


def with_accuracy(run: Path, values: dict[int, float]) -> Path:
    """The run, had its clients these accuracies with the global model in the end."""
    for name in ("clients", "rounds"):
        table = pq.read_table(run / f"{name}.parquet")
        rows = table.to_pylist()
        for row in rows:
            if (row["split"], row["cohort"], row["model"]) == ("test", "all", "global"):
                row["top1"] = values[row["client"]] if name == "clients" else sum(values.values()) / len(values)
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), run / f"{name}.parquet")
    return run


def test_csv_has_every_number_in_a_column_of_its_own(folders: list[Path]) -> None:
    found = list(csv.DictReader(io.StringIO(ran("compare", *folders, "--format", "csv").stdout)))
    assert list(found[0]) == NUMBERS_SCHEMA.names
    (row,) = [r for r in found if (r["method"], r["model"], r["metric"]) == ("fedavg", "global", "top1")]
    finals = [final_by_key(load_run(str(folder), METHODS))[RowKey("global")] for folder in folders[:2]]
    assert float(row["mean"]) == pytest.approx(sum(final["top1"] for final in finals) / 2)
    assert float(row["std_over_clients"]) == pytest.approx(sum(final["top1_std"] for final in finals) / 2)
    assert float(row["std_over_seeds"]) == pytest.approx(abs(finals[0]["top1"] - finals[1]["top1"]) / 2**0.5)
    assert (row["seeds"], row["clients"], row["round"], row["split"]) == ("2", "5", "4", "test")
    for metric in ("top1", "loss"):
        ranks = {r["rank"]: float(r["mean"]) for r in found if r["metric"] == metric and r["rank"]}
        assert (ranks["1"] > ranks["2"]) == (metric == "top1")


def test_json_is_the_same_and_says_its_schema(folders: list[Path]) -> None:
    found = json.loads(ran("compare", *folders, "--json").stdout)
    assert found["schema"] == JSON_SCHEMA
    rows = list(csv.DictReader(io.StringIO(ran("compare", *folders, "--format", "csv").stdout)))
    assert [row["mean"] for row in found["numbers"]] == [float(row["mean"]) for row in rows]
    assert {test["pairs_are"] for test in found["tests"]} == {"clients", "seeds"}
    assert "digits" in found["protocol"] and "5 clients" in found["protocol"]


def test_markdown_marks_the_best_and_the_second(folders: list[Path]) -> None:
    text = ran("compare", *folders, "--format", "markdown", "--metric", "top1", "--metric", "ece").stdout
    head, rule, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert head == "| method | accuracy % | ECE |" and rule == "|---|---:|---:|"
    assert [row.split(" | ")[0] for row in rows] == ["| FedAvg", "| SuPerFed"]
    assert text.count("**") == 2 * 2 and text.count("<u>") == 2
    assert "Accuracy %, ECE of each method's personalized model" in text.replace("\\", "")
    assert "local epochs: 1, batches of 32" in text
    assert "±" in text and "sample standard deviation over seeds" in text
    best = next(row for row in rows if re.match(r"\| \w+ \| \*\*", row)).split("**")[1]
    numbers = json.loads(ran("compare", *folders, "--json", "--model", "personalized").stdout)["numbers"]
    assert best == f"{max(100 * n['mean'] for n in numbers if n['metric'] == 'top1'):.2f}"


def test_latex_compiles_whatever_names_look_like(copied: Copied, folders: list[Path], tmp_path: Path) -> None:
    others = [other_data(copied(name)) for name in ("fedavg-0", "superfed-mm-0")]
    arguments = [*folders, *others, "--by-dataset", "--format", "latex", "--metric", "top1", "--metric", "loss"]
    text = ran("compare", *arguments).stdout
    for part in (r"\toprule", r"\midrule", r"\bottomrule", r"\cmidrule(lr){4-5}", r"\pm", r"\underline{", r"\mathbf{"):
        assert part in text
    assert r"\multicolumn{2}{c}{letters\_\&\_more}" in text
    compiled(text, tmp_path)


def compiled(table: str, folder: Path) -> str:
    """What pdfLaTeX says of a document with this table."""
    if shutil.which("pdflatex") is None:
        pytest.skip("no pdflatex here: apt-get install texlive-latex-recommended")
    source = "\n".join([r"\documentclass{article}\usepackage{booktabs}\begin{document}", table, r"\end{document}"])
    (folder / "table.tex").write_text(source, encoding="utf-8")
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"], cwd=folder, capture_output=True
    )
    assert done.returncode == 0, done.stdout.decode()
    assert (folder / "table.pdf").read_bytes().startswith(b"%PDF")
    return done.stdout.decode()


def test_latex_compiles_with_greek_brackets_and_runs_that_diverged(tmp_path: Path) -> None:
    first = (ord("\N{GREEK CAPITAL LETTER ALPHA}"), ord("\N{GREEK SMALL LETTER ALPHA}"))
    greek = "".join(chr(letter + number) for letter in first for number in range(25) if letter + number != 0x3A2)
    cells = [PaperCell("91.20", "0.50", 1, "cs"), PaperCell("inf", "", 2, ""), PaperCell(NO_NUMBER, "", 0, ""), None]
    names = ("[1] own_method", f"50 % {greek}, a|b ≤ 1 Åé", "~{x}^2\\ #&$ <†> ±")
    rows = {(name,): cells for name in names}
    caption = f"With λ and {greek}."
    text = as_latex(
        PaperTable(caption, ["mnist_Δ", "CIFAR-10"], ["accuracy %", "worst 5 %"], ["method"], rows, ["* chosen"])
    )
    assert "may lack" not in text
    assert r"$\mathbf{91.20} \pm 0.50^{\mathrm{c,s}}$ & $\underline{\infty}$ & -- & --" in text
    said = compiled(text, tmp_path)
    assert "Missing character" not in said + (tmp_path / "table.log").read_text()
    foreign = as_latex(PaperTable("caption", ["digits"], ["accuracy %"], ["method"], {("«方法»",): cells[:1]}, []))
    assert "% pdfLaTeX may lack «»方法: use XeLaTeX or LuaLaTeX" in foreign


def test_rows_of_several_models_name_method_and_model_in_columns(folders: list[Path], tmp_path: Path) -> None:
    arguments = [*folders, "--model", "global", "--model", "personalized", "--model", "lambda=0.5", "--metric", "top1"]
    text = ran("compare", *arguments, "--format", "markdown").stdout
    names = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("|")]
    assert names[0] == ["| method", "model"]
    assert ["| FedAvg", "global"] in names and ["| SuPerFed", "λ=0.5"] in names
    assert ["| SuPerFed", "λ, by validation"] in names
    latex = ran("compare", *arguments, "--format", "latex").stdout
    assert r"\begin{tabular}{llc}" in latex and r"\label{tab:comparison}" in latex
    assert latex.count("SuPerFed &") == 1 and re.search(r"(?m)^ & \$\\lambda\$=0.5 & ", latex)
    assert "Overfull" not in compiled(latex, tmp_path)


def test_a_column_in_which_all_are_equal_has_no_best(copied: Copied) -> None:
    equal = [copied("fedavg-0"), copied("superfed-mm-0")]
    for run in equal:
        with_accuracy(run, dict.fromkeys(range(5), 0.5))
    arguments = [*equal, "--model", "global", "--metric", "top1", "--metric", "loss"]
    numbers = json.loads(ran("compare", *arguments, "--json").stdout)["numbers"]
    assert {n["rank"] for n in numbers if n["metric"] == "top1"} == {None}
    assert {n["rank"] for n in numbers if n["metric"] == "loss"} == {1, 2}


def test_a_caption_says_when_models_of_cohorts_were_measured(folders: list[Path]) -> None:
    chosen = ("--cohort", "selected", "--phase", "trained", "--model", "local")
    text = ran("compare", *folders, "--format", "markdown", *chosen).stdout
    assert "of each client in the round's cohort right after local training in round 4;" in text


def test_best_and_second_are_found_on_each_data_set_apart(copied: Copied, folders: list[Path]) -> None:
    others = [other_data(copied(name)) for name in ("fedavg-0", "superfed-mm-0")]
    with pytest.raises(RayflError, match="--by-dataset"):
        ran("compare", *folders, *others)
    numbers = json.loads(
        ran(
            "compare", *folders, *others, "--by-dataset", "--json", "--metric", "top1", "--model", "personalized"
        ).stdout
    )["numbers"]
    assert [(n["dataset"], n["seeds"]) for n in numbers] == [
        *[("digits", 2)] * 2,
        *[("letters_&_more", 1)] * 2,
    ]
    assert sorted(n["rank"] for n in numbers) == [1, 1, 2, 2]
    text = ran("compare", *folders, *others, "--by-dataset", "--format", "markdown").stdout
    # One table has spreads of one kind: one of the data sets has a single seed.
    assert "population standard deviation over clients" in text and "over seeds." not in text
    assert "| method | digits accuracy % | letters\\_&\\_more accuracy % |" in text


@pytest.mark.slow
def test_methods_that_the_best_is_significantly_better_than_are_marked(copied: Copied) -> None:
    for number, level in enumerate((0.5, 0.9)):
        for seed in (0, 1):
            run = copied(f"fedavg-{seed}", f"{number}-{seed}")
            with_accuracy(run, {client: level + 0.01 * client + 0.001 * seed for client in range(5)})
            content = yaml.safe_load((run / "config.yaml").read_text())
            content["algorithm"]["finetune_epochs"] = number
            (run / "config.yaml").write_text(yaml.safe_dump(content))
    runs = sorted(run.parent.iterdir())
    text = ran("compare", *runs, "--format", "markdown", "--metric", "top1").stdout
    worse, better = [line for line in text.splitlines() if line.startswith("| FedAvg")]
    assert worse.endswith("<sup>c</sup> |") and "<sup>" not in better
    assert "c: paired over clients" in text and "s: over seeds" not in text
    latex = ran("compare", *runs, "--format", "latex", "--metric", "top1").stdout
    assert r"^{\mathrm{c}}$" in latex


def test_split_cohort_phase_and_model_choose_the_numbers(folders: list[Path], copied: Copied) -> None:
    chosen = ("--split", "validation", "--cohort", "selected", "--phase", "trained", "--metric", "loss")
    found = json.loads(ran("compare", *folders[:2], "--json", *chosen).stdout)["numbers"]
    tables = [pq.read_table(folder / "rounds.parquet").to_pylist() for folder in folders[:2]]
    wanted = [
        [
            row["loss"]
            for row in rows
            if (row["split"], row["cohort"], row["phase"]) == ("validation", "selected", "trained")
        ]
        for rows in tables
    ]
    assert found[0]["mean"] == pytest.approx((wanted[0][-1] + wanted[1][-1]) / 2)
    assert (found[0]["split"], found[0]["cohort"], found[0]["phase"]) == ("validation", "selected", "trained")
    one = json.loads(ran("compare", *folders[2:], "--json", "--model", "lambda=0.5").stdout)
    assert {number["model"] for number in one["numbers"]} == {"lambda=0.5"}
    assert "row lambda=0.5" in ran("compare", *folders[2:], "--format", "markdown", "--model", "lambda=0.5").stdout
    with pytest.raises(RayflError, match=r"--model globl: no run has such a row \(did you mean 'global'\?\)"):
        ran("compare", *folders, "--model", "globl")
    with pytest.raises(RayflError, match="--metric top2: there is no such column"):
        ran("compare", *folders, "--metric", "top2")
    other = copied("fedavg-1", "other") / "rounds.parquet"
    table = pq.read_table(other)
    more = [*metrics_of(table), Metric("f1_macro", "macro F1", "higher")]
    known = {**(table.schema.metadata or {}), METRICS_KEY: json.dumps([asdict(metric) for metric in more])}
    pq.write_table(table.append_column("f1_macro", table["top1"]).replace_schema_metadata(known), other)
    with pytest.raises(RayflError, match=r"--metric f1_macro: not all runs have this column, \S+/fedavg-0 not"):
        ran("compare", folders[0], other.parent, "--metric", "f1_macro")
    with pytest.raises(RayflError, match="--phase trained needs --cohort selected"):
        ran("compare", *folders, "--phase", "trained")


def test_the_folder_of_a_sweep_stands_for_its_runs(finished: Path, copied: Copied) -> None:
    sweep = copied("fedavg-0").parent / "sweep"
    sweep.mkdir()
    (sweep / "sweep.yaml").write_text("varied: []\n")
    for name in NAMES:
        shutil.copytree(finished / name, sweep / name)
    assert runs_in(str(sweep)) == [f"{sweep}/{name}" for name in NAMES]
    assert [run.name for run in load_runs([str(sweep)], METHODS)] == list(NAMES)
    rows = list(csv.DictReader(io.StringIO(ran("compare", sweep, "--format", "csv").stdout)))
    assert {row["method"] for row in rows} == {"fedavg", "superfed"}
    with pytest.raises(RayflError, match="is no run's folder"):
        ran("compare", sweep / "nowhere", sweep)


def test_a_report_has_tables_in_formats_beside_its_page(folders: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "report"
    ran("report", *folders, "--out", out, "--format", "latex", "--format", "csv", "--split", "validation")
    assert r"\toprule" in (out / "comparison.tex").read_text()
    assert "validation" in (out / "comparison.csv").read_text()
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Validation data of all clients" in page and "Test data of" not in page
    assert "on validation samples" in page and "test samples" not in page


def test_the_page_of_one_run_is_about_the_chosen_row(folders: list[Path], tmp_path: Path) -> None:
    ran(
        "report",
        folders[2],
        "--out",
        tmp_path / "one",
        "--model",
        "lambda=0.5",
        "--cohort",
        "selected",
        "--phase",
        "trained",
    )
    page = (tmp_path / "one" / "report.html").read_text(encoding="utf-8")
    assert "MCE of lambda=0.5" in page and "right after local training" in page
