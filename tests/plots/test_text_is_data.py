"""Names that look like formulas are drawn as they are, in every figure."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from typer.testing import CliRunner

import rayfl
from algorithms.registry import METHODS
from rayfl.cli.entry import app
from rayfl.metrics import CLASSIFICATION
from rayfl.plots.style import paper_style
from rayfl.report.curves import progress_of_models
from rayfl.report.drawing import styled
from rayfl.runs.finding import load_run
from rayfl.tracking.plain_text import PLAIN_TEXT
from rayfl.tracking.tensorboard import sweep_figure
from tests.support.experiments import small_experiment

BROKEN = r"$\frac{$"
NAMES = [BROKEN, r"$x^2$", "$", "a_b", r"\$"]
METHOD = """
from algorithms.fedavg import FedAvg
from rayfl import Predictor


class M(FedAvg):
    name: str = "m"
    note: str = "x"

    async def predictors(self, client, server):
        model = Predictor.of(server["model"])
        return {"global": model, r"$\\frac{$": model}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs whose clients, model and options have such names."""
    place = tmp_path_factory.mktemp("text")
    (place / "texts.py").write_text(METHOD)
    rows = {"x": [[float(n % 7), 1.0] for n in range(100)], "y": [n % 2 for n in range(100)]}
    pq.write_table(pa.table(rows | {"client": [NAMES[n % 5] for n in range(100)]}), place / "mine.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYFL_DATA", str(place / "root"))
        patch.syspath_prepend(str(place))
        for name, note in (("one", BROKEN), ("two", r"\frac{$$")):
            config = small_experiment(place, name, "fedavg", backend="inline")
            config |= {"dataset": {"name": "parquet", "path": str(place / "mine.parquet")}, "partition": "natural"}
            config |= {"algorithm": {"name": "texts:M", "note": note}, "evaluation": {"every": 1}}
            rayfl.run(config, **{"train.rounds": 2})
    return place


def command(folder: Path, *arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYFL_DATA", str(folder / "root"))
        patch.chdir(folder)
        done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("kind", ["curves", "clients", "variance"])
@pytest.mark.parametrize(
    "ending", [pytest.param("png", marks=pytest.mark.slow), "svg", pytest.param("pdf", marks=pytest.mark.slow)]
)
def test_plots(folder: Path, tmp_path: Path, kind: str, ending: str) -> None:
    options = ["--x", "rounds"] if kind == "curves" else []
    out = tmp_path / f"p.{ending}"
    command(folder, "plot", kind, "one", "two", *options, "--out", str(out))
    if ending == "svg":
        assert f"note={BROKEN}" in out.read_text(encoding="utf-8")


def test_a_row_of_such_a_name(folder: Path, tmp_path: Path) -> None:
    command(folder, "plot", "curves", "one", "--model", BROKEN, "--x", "rounds", "--out", str(tmp_path / "p.svg"))
    assert BROKEN in (tmp_path / "p.svg").read_text(encoding="utf-8")


@pytest.mark.usefixtures("drawn_figures")
@pytest.mark.parametrize("runs", [pytest.param(["one"], marks=pytest.mark.slow), ["one", "two"]])
def test_reports(folder: Path, tmp_path: Path, runs: list[str]) -> None:
    command(folder, "report", *runs, "--out", str(tmp_path))
    pictures = [path.read_text(encoding="utf-8") for path in (tmp_path / "figures").glob("*.svg")]
    assert any(BROKEN in picture for picture in pictures)
    assert not any(r"\$" in picture.replace(NAMES[-1], "") for picture in pictures)


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_pictures_of_partitions(folder: Path, tmp_path: Path, ending: str) -> None:
    command(folder, "data", "show", "one", "--out", str(tmp_path / f"p.{ending}"))
    if ending == "svg":
        text = (tmp_path / "p.svg").read_text(encoding="utf-8")
        assert all(name in text for name in NAMES)


def test_sweeps_in_tensorboard() -> None:
    rows: list[dict[str, Any]] = [{"model": f"{BROKEN}={value}", "top1": 0.5, "top1_std": 0.1} for value in (0.0, 1.0)]
    with matplotlib.rc_context(PLAIN_TEXT):
        sweep_figure(BROKEN, rows, CLASSIFICATION.first).savefig(io.BytesIO())


def test_no_text_of_any_figure_is_parsed(folder: Path) -> None:
    """Also where a user's own settings ask for it."""
    with matplotlib.rc_context({"text.parse_math": True, "text.usetex": False}):
        with styled():
            drawings = progress_of_models(load_run(str(folder / "one"), METHODS))
            assert drawings and not any(parsed(drawing.figure) for drawing in drawings)
        with paper_style():
            assert not matplotlib.rcParams["text.parse_math"] and not matplotlib.rcParams["text.usetex"]


def parsed(figure: Figure) -> list[str]:
    """The texts of a figure that would be read as formulas."""
    return [found.get_text() for found in figure.findobj(Text) if found.get_parse_math()]  # type: ignore[attr-defined]


def test_our_own_symbols_need_no_formulas() -> None:
    place = Path(__file__).parents[2] / "rayfl"
    for path in (*(place / "plots").glob("*.py"), *(place / "report").glob("*.py")):
        # LaTeX's tables are for LaTeX, not for figures.
        assert path.name == "formats.py" or '"$' not in path.read_text(encoding="utf-8"), path
