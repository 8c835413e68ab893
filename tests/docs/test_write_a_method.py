"""The page that shows how a method is written does what it says."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.csv as csv
import pytest
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from rayfl.cli.entry import app
from rayfl.config.loading import load_config, to_yaml
from rayfl.errors import ConfigError
from rayfl.runs.rows import final_rows
from tests.support.documents import Document

PAGE = Path(__file__).parent.parent.parent / "docs" / "write-a-method.md"
INLINE = {"cluster.backend": "inline", "tracking.tensorboard": False}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder that holds the page's module."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "remembering.py").write_text(code[0])
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("remembering", None)


def test_the_class_is_forty_lines_at_most(folder: Path) -> None:
    lines = (folder / "remembering.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 40


def test_the_page_runs(folder: Path) -> None:
    commands = re.findall(r"^rayfl (.*)$", PAGE.read_text(), re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["show", "run"]
    shown = CliRunner().invoke(app, commands[0].split())
    assert shown.exit_code == 0
    assert "pulled towards the average" in shown.output and "rho" in shown.output
    local = [f"storage_path={folder}", "cluster.backend=inline"]
    ran = CliRunner().invoke(app, [*commands[1].split(), *local])
    assert ran.exit_code == 0, ran.output
    assert "memory" in ran.output
    (run,) = folder.glob("Remembering-digits-*")
    stored = load_config(Experiment, run / "config.yaml", [])
    assert stored.algorithm.pull == 0.1


def test_the_method_personalizes_and_continues(folder: Path) -> None:
    settings = {"algorithm": "remembering:Remembering", "storage_path": str(folder), "name": "run", **INLINE}
    result = rayfl.run("quickstart", **settings, **{"train.rounds": 4})
    rows = {row["model"]: row for row in final_rows(result.rounds)}
    assert rows["memory"]["top1"] > rows["global"]["top1"]
    again = rayfl.run("quickstart", **settings, **{"train.rounds": 4})
    assert again.clients.equals(result.clients)


def test_a_method_that_predicts_in_another_way_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "angles.py").write_text(next(block for block in code if "class CosineHead" in block))
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"algorithm": "angles:CosineHead", "storage_path": str(tmp_path), "name": "run", **INLINE}
    run = rayfl.run("quickstart", **settings, **{"train.rounds": 4, "evaluation.every": 4, "engine.mode": "vectorized"})
    assert {row["model"]: row for row in final_rows(run.rounds)}["personalized"]["top1"] > 0.6


@pytest.mark.slow
def test_every_command_shows_the_method_by_the_model_that_it_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"storage_path": str(folder), **INLINE, "train.rounds": 4, "evaluation.every": 2}
    mine = rayfl.run("quickstart", algorithm="remembering:Remembering", name="mine", **settings)
    rayfl.run("quickstart", algorithm="fedavg", name="other", **settings)
    memory = next(row for row in final_rows(mine.rounds) if row["model"] == "memory")
    # Cells of a narrow terminal would be broken into lines.
    monkeypatch.setenv("COLUMNS", "160")
    # The class is needed for none of it.
    (folder / "remembering.py").unlink()
    monkeypatch.delitem(sys.modules, "remembering")
    accuracy = f"{100 * memory['top1']:.2f}"

    def told(*arguments: str) -> str:
        done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    told("report", "mine")
    page = Document((folder / "mine" / "report" / "report.html").read_text(encoding="utf-8"))
    assert "by accuracy of memory" in page.text
    told("report", "mine", "other", "--out", "both")
    rows = Document((folder / "both" / "report.html").read_text(encoding="utf-8")).tables["comparison-table"]
    (own,) = [row for row in rows if row[0] == "remembering" and row[1].endswith("(own)")]
    assert (own[1], own[4].removesuffix(" (best)")) == ("memory (own)", accuracy)
    tests = Document((folder / "both" / "report.html").read_text(encoding="utf-8")).tables["clients-test"]
    other = next(row for row in rows if row[0] == "fedavg" and row[1] == "global (own)")
    difference = float(tests[1][2]) * (1 if tests[1][0] == "fedavg" else -1)
    assert difference == pytest.approx(float(other[4]) - float(accuracy), abs=0.02)
    assert "memory (own)" in " ".join(told("compare", "mine", "other").split())
    assert "mine: memory on the clients' test data" in " ".join(told("clients", "mine").split())
    told("plot", "curves", "mine", "--x", "rounds")
    models = csv.read_csv(folder / "curves.csv")
    assert set(models["model"].to_pylist()) == {"memory", "global"}
    assert set(models["series"].to_pylist()) == {"remembering"}  # the name that the class gives itself
    assert set(models["clients"].to_pylist()) == {20}


def test_actors_build_the_class_from_plain_data(folder: Path) -> None:
    config = load_config(Experiment, "quickstart", ["algorithm=remembering:Remembering"])
    plain = config.model_dump(mode="json")
    assert Experiment.model_validate(plain) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert load_config(Experiment, _written(folder, to_yaml(config)), []) == config


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Method", "module 'nowhere' cannot be imported"),
        ("remembering:Remember", "did you mean 'Remembering'?"),
        ("rayfl.params:Tree", "is no subclass of rayfl.Algorithm"),
        ("remembering:__doc__", "is no subclass"),
        ("sys:path", "is no subclass"),
    ],
)
def test_what_is_no_method_is_named(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(Experiment, "quickstart", [f"algorithm={name}"])


def test_a_wrong_hyper_parameter_is_named_with_those_of_the_class(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm.pul: unknown \(did you mean 'pull'\?\); allowed: .*forget"):
        load_config(Experiment, "quickstart", ["algorithm=remembering:Remembering", "algorithm.pul=1"])


def _written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path
