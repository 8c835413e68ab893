"""The scripts in examples/ run as they stand, and show what they say."""

from __future__ import annotations

import ast
import importlib
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from sklearn.datasets import load_digits

from algorithms.fedbuff import FedBuff
from tests.support.fedbuff_toys import Rounds, toy_of
from tests.support.toys import assert_close, ragged_toy

Ran = Callable[[str], str]
EXAMPLES = Path(__file__).parents[2] / "examples"


def ran_alone(name: str, folder: Path) -> str:
    """What a script prints that writes to this folder, in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ran:
    """Runs a script in this process, where nothing has to be imported again; returns what it prints."""

    def run(name: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(sys, "argv", [name, str(tmp_path)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_they_are_short() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert [script.stem for script in scripts] == [
        "clip_features",
        "compare_three_methods",
        "compression_and_noise",
        "ensemble_distillation",
        "flamby_scans",
        "hypernetwork",
        "own_asynchronous_method",
        "own_data_and_model",
        "own_huggingface",
        "own_labels",
        "own_method",
        "own_regression",
        "own_survival",
        "own_task",
        "own_text",
    ]
    assert all(len(script.read_text().splitlines()) < 95 for script in scripts)


def test_clip_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the extra transformers is not installed")
    from tests.support.clips import clip_base, clip_network

    monkeypatch.syspath_prepend(str(EXAMPLES))
    importlib.import_module("clip_features").main(clip_base(), tmp_path)
    table, digits = pq.read_table(tmp_path / "features.parquet"), load_digits()
    net = clip_network({"length": 2})
    images = torch.tensor(digits.images[:9], dtype=torch.float32)[:, None] / 16
    wanted = net.plain_features(net.initialize(0), images)
    torch.testing.assert_close(torch.tensor(table["x"].to_pylist()[:9]), wanted, rtol=0, atol=1e-5)
    assert table["y"].to_pylist() == digits.target.tolist()


@pytest.mark.slow
def test_compare_three_methods(ran: Ran, tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="the example makes a DataFrame: pip install pandas (in the extra docs)")
    lines = ran("compare_three_methods.py").splitlines()
    accuracy = {line.split()[0]: line for line in lines if line.startswith(("fedavg", "ditto", "superfed"))}
    assert set(accuracy) == {"fedavg", "ditto", "superfed"}
    assert "lambda=best" in accuracy["superfed"] and "personalized" in accuracy["ditto"]
    assert (tmp_path / "curves.png").stat().st_size > 10_000 and (tmp_path / "curves.csv").is_file()


@pytest.mark.slow
def test_own_data_and_model(ran: Ran) -> None:
    rows = dict(line.split(":", 1) for line in ran("own_data_and_model.py").splitlines())
    scores = {name.strip(): float(text.split()[0]) for name, text in rows.items()}
    assert scores["personalized"] > scores["global"] > 0.5


@pytest.mark.slow
def test_own_method(tmp_path: Path) -> None:
    scores = [float(line.split()[-1]) for line in ran_alone("own_method.py", tmp_path).splitlines()]
    assert len(scores) == 3 and len(set(scores)) == 3


@pytest.mark.slow
def test_own_asynchronous_method(ran: Ran) -> None:
    waiting, buffered = (line.split() for line in ran("own_asynchronous_method.py").splitlines())
    assert (waiting[0], buffered[0]) == ("fedavg:", "own_asynchronous_method:Buffer:")
    assert float(buffered[1]) < float(waiting[1]), "nobody waits for the slowest"
    assert waiting[4] == "0," and int(buffered[4].rstrip(",")) > 0, "late updates are used"
    assert float(buffered[-1]) > 0.3


def test_the_asynchronous_example_is_the_packages_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    own = importlib.import_module("own_asynchronous_method")
    mine, package = (
        Rounds(toy_of(method), [1, 2, 5, 3], 2, concurrency=4)
        for method in (own.Buffer(server_lr=0.5), FedBuff(server_lr=0.5))
    )
    for _ in range(7):
        assert_close(mine.step()["model"], package.step()["model"], 1e-12)
    assert any(turnout.started for turnout in mine.turnouts)


@pytest.mark.slow
def test_ensemble_distillation(ran: Ran) -> None:
    scores = [float(line.split()[-1]) for line in ran("ensemble_distillation.py").splitlines()]
    assert len(scores) == 2 and scores[1] > scores[0]


@pytest.mark.slow
def test_compression_and_noise(ran: Ran) -> None:
    lines = [line.split() for line in ran("compression_and_noise.py").splitlines()]
    accuracy = {name.rstrip(":"): float(value.rstrip(",")) for name, value, *_ in lines}
    sent = {name.rstrip(":"): float(size) for name, _, size, *_ in lines}
    assert accuracy.keys() == {"fedavg", "Sparse", "Noisy"}
    assert sent["Noisy"] == sent["fedavg"] and 0.15 < sent["Sparse"] / sent["fedavg"] < 0.25, "places and values"


def test_all_entries_without_noise_are_federated_averaging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("compression_and_noise")
    plain = ragged_toy("looped")
    plain.run()
    for method in (example.Sparse(share=1.0), example.Noisy(clip=1e9, noise=0.0)):
        toy = ragged_toy("looped", algorithm=method)
        toy.run()
        assert_close(toy.server, plain.server, atol=1e-12)


def test_what_is_not_sent_is_kept_and_a_change_is_no_longer_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("compression_and_noise")
    sparse, before = ragged_toy("looped", algorithm=example.Sparse(share=0.25)), ragged_toy("looped").server["model"]
    after, plain = sparse.step([1])["model"], ragged_toy("looped").step([1])["model"]
    rest = sparse.states()[1]["rest"]
    for name, leaf in before.items():
        assert ((after[name] != leaf).sum() == -(-leaf.numel() // 4)).item()
        assert_close({"sum": after[name] + rest[name]}, {"sum": plain[name]}, atol=1e-12)
    noisy = ragged_toy("looped", algorithm=example.Noisy(clip=1e-3, noise=0.0)).step([1])["model"]
    moved = sum(float((noisy[name] - leaf).square().sum()) for name, leaf in before.items()) ** 0.5
    assert moved == pytest.approx(1e-3)


@pytest.mark.slow
def test_hypernetwork(ran: Ran) -> None:
    scores = dict(line.split(": ") for line in ran("hypernetwork.py").splitlines())
    assert float(scores["hypernetwork"]) > float(scores["fedavg"])


@pytest.mark.parametrize(
    "name", ["compression_and_noise", "ensemble_distillation", "hypernetwork", "own_asynchronous_method", "own_method"]
)
def test_methods_use_nothing_private(name: str) -> None:
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    names = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert not [found for found in names if found.startswith("_")]


@pytest.mark.slow
def test_own_regression(ran: Ran) -> None:
    rows = dict(line.split(": ", 1) for line in ran("own_regression.py").splitlines())
    errors = {name.strip(): float(text.split()[1].rstrip(",")) for name, text in rows.items()}
    assert errors["personalized"] < errors["global"]


@pytest.mark.slow
def test_own_task(ran: Ran) -> None:
    below = [float(line.split()[-5]) for line in ran("own_task.py").splitlines()]
    assert len(below) == 2 and all(70 < share <= 100 for share in below)


@pytest.mark.slow
def test_own_survival(ran: Ran) -> None:
    rows = dict(line.split(": ", 1) for line in ran("own_survival.py").splitlines())
    scores = {name.strip(): float(text.split()[1]) for name, text in rows.items()}
    assert scores["personalized"] > scores["global"] > 0.55


@pytest.mark.parametrize(("name", "least"), [("own_labels", 0.6), ("own_text", 0.8)])
def test_own_labels_and_own_text(name: str, least: float, ran: Ran) -> None:
    (line,) = ran(f"{name}.py").splitlines()
    assert float(line.replace(",", "").split()[-1 if name == "own_text" else 3]) > least


def test_own_huggingface(ran: Ran) -> None:
    pytest.importorskip("datasets", reason="the example makes a data set of Hugging Face: needs the extra hf")
    (line,) = [line for line in ran("own_huggingface.py").splitlines() if "hospitals" in line]
    assert line.startswith("4 hospitals, personalized: ") and float(line.split()[-1]) > 0.9
