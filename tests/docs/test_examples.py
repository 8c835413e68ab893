"""The scripts in examples/ run as they stand, and show what they say."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rayfl
from algorithms.fedbuff import FedBuff
from rayfl.examples import InputSpec
from tests.support.fedbuff_toys import Rounds, toy_of
from tests.support.toys import assert_close, ragged_toy

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def ran(name: str, folder: Path) -> str:
    """What a script prints that writes to this folder."""
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


def test_they_are_short() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert [script.stem for script in scripts] == [
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
        "own_text",
    ]
    assert all(len(script.read_text().splitlines()) < 95 for script in scripts)


@pytest.mark.slow
def test_compare_three_methods(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="the example makes a DataFrame: pip install pandas (in the extra docs)")
    lines = ran("compare_three_methods.py", tmp_path).splitlines()
    accuracy = {line.split()[0]: line for line in lines if line.startswith(("fedavg", "ditto", "superfed"))}
    assert set(accuracy) == {"fedavg", "ditto", "superfed"}
    assert "lambda=best" in accuracy["superfed"] and "personalized" in accuracy["ditto"]
    assert (tmp_path / "curves.png").stat().st_size > 10_000 and (tmp_path / "curves.csv").is_file()


@pytest.mark.slow
def test_own_data_and_model(tmp_path: Path) -> None:
    rows = dict(line.split(":", 1) for line in ran("own_data_and_model.py", tmp_path).splitlines())
    scores = {name.strip(): float(text.split()[0]) for name, text in rows.items()}
    assert scores["personalized"] > scores["global"] > 0.5


def test_own_method(tmp_path: Path) -> None:
    scores = [float(line.split()[-1]) for line in ran("own_method.py", tmp_path).splitlines()]
    assert len(scores) == 3 and len(set(scores)) == 3


@pytest.mark.slow
def test_own_asynchronous_method(tmp_path: Path) -> None:
    waiting, buffered = (line.split() for line in ran("own_asynchronous_method.py", tmp_path).splitlines())
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


def test_ensemble_distillation(tmp_path: Path) -> None:
    scores = [float(line.split()[-1]) for line in ran("ensemble_distillation.py", tmp_path).splitlines()]
    assert len(scores) == 2 and scores[1] > scores[0]


@pytest.mark.slow
def test_compression_and_noise(tmp_path: Path) -> None:
    lines = [line.split() for line in ran("compression_and_noise.py", tmp_path).splitlines()]
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


def flamby_files(folder: Path) -> Path:
    """Files of the layout of FLamby's fed_tcga_brca: age decides on the risk."""
    generator, lines, split = np.random.default_rng(0), ["pid,age_at_index,race_white,E,T"], ["pid,fold,fold2"]
    for number in range(180):
        age, region, fold = generator.integers(30, 90), number % 6, "test" if number % 5 == 0 else "train"
        death, end = generator.exponential(300 * np.exp((60 - age) / 10)), generator.uniform(0, 2000)
        days = 0.0 if number == 7 else float(np.ceil(min(death, end)))
        lines.append(f"TCGA-{number},{age},{number % 2},{float(death < end and days > 0)},{days}")
        split.insert(1, f"TCGA-{number},{fold},{fold}_{region}")
    (folder / "dataset_creation_scripts").mkdir(parents=True)
    (folder / "brca.csv").write_text("\n".join(lines) + "\n")
    (folder / "dataset_creation_scripts" / "train_test_split.csv").write_text("\n".join(split) + "\n")
    return folder


def test_own_survival_learns_the_risk_from_files_of_flambys_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    own = importlib.import_module("own_survival")
    own.main(tmp_path / "runs", flamby_files(tmp_path / "flamby"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["fedavg, global", "ditto, global", "ditto, personalized"]
    assert all(line.endswith("over 6 regions") and float(line.split()[3]) > 0.7 for line in lines)


def test_the_survival_examples_loss_and_concordance_are_those_of_their_definitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    own = importlib.import_module("own_survival")
    days, alive = [3.0, 5.0, 5.0, 0.0, 8.0, 2.0], [False, True, False, True, False, False]
    risk = [0.3, -1.0, 0.7, 0.1, 0.3, 2.0]
    losses, right, pairs = [], 0.0, 0
    for i in range(6):
        at_risk = sum(np.exp(risk[j]) for j in range(6) if days[j] >= days[i])
        losses.append(0.0 if alive[i] else float(np.log(at_risk)) - risk[i])
        for j in range(6):
            if not alive[i] and (days[j] > days[i] or (days[j] == days[i] and alive[j])):
                pairs, right = pairs + 1, right + (1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0)
    y = torch.tensor([-day if lived else day for day, lived in zip(days, alive, strict=True)])
    torch.testing.assert_close(own.cox(torch.tensor(risk), y), torch.tensor(losses))
    padded = own.cox(torch.tensor([*risk, 9.0]), torch.cat([y, torch.tensor([4.0])]), torch.tensor([1.0] * 6 + [0.0]))
    torch.testing.assert_close(padded[:6], torch.tensor(losses))
    found = own.Concordance().statistics(torch.tensor(risk)[:, None], y[:, None]).tolist()
    assert found == pytest.approx([6, sum(losses), right, pairs]) and 0 < right < pairs
    nobody = own.Concordance().statistics(torch.zeros(0, 1), torch.zeros(0, 1))
    assert nobody.tolist() == [0, 0, 0, 0] and np.isnan(own.Concordance().values(nobody.numpy())["c_index"])


def scans(kind: str, folder: Path) -> str:
    """Made files of the layouts of FLamby's data sets, six samples; returns the table of their hospitals."""
    generator, lines = np.random.default_rng(0), []
    for number in range(6):
        split = "test" if number in (2, 5) else "train"
        if kind == "camelyon16":
            name = f"{split if split == 'test' else ('normal', 'tumor')[number % 2]}_{number + 1:03d}.tif"
            np.save(folder / f"{name}.npy", generator.normal(size=(3 + number, 8)).astype(np.float32))
            lines.append(f"{number % 2},{float(number // 3)},{name}")
            continue
        nibabel = pytest.importorskip("nibabel", reason="writes and reads NIfTI: pip install 'rayfl[nifti]'")
        case = {
            "ixi": f"IXI{number + 2:03d}-{('Guys', 'HH')[number // 3]}-0828",
            "kits19": f"case_{number:05d}",
            "lidc": f"1.3.6.{number}",
        }[kind]
        image, mask = {
            "ixi": (f"T1/{case}_image.nii.gz", f"label/{case}_label.nii.gz"),
            "kits19": ("imaging.nii.gz", "segmentation.nii.gz"),
            "lidc": ("patient.nii.gz", "mask_consensus.nii.gz"),
        }[kind]
        shape = (8, 9, 10) if kind == "ixi" else (8, 9 + number, 10)
        for place, values in ((image, generator.normal(size=shape)), (mask, generator.integers(0, 2, shape))):
            (folder / case / place).parent.mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(values.astype(np.float32), np.eye(4)), folder / case / place)
        id_of = str(number + 2) if kind == "ixi" else case
        lines.append(f"{id_of},{number // 3},{split}")
    header = {
        "ixi": "Patient ID,Manufacturer,Split",
        "kits19": "case_ids,site_ids,train_test_split",
        "lidc": "SeriesInstanceUID,Manufacturer,Split",
        "camelyon16": "label,hospital_corrected,slide_name",
    }[kind]
    (folder / "metadata.csv").write_text("\n".join([header, *lines]) + "\n")
    return str(folder / "metadata.csv")


@pytest.mark.parametrize(
    ("kind", "hospitals"),
    [
        ("ixi", ["Guys", "HH"]),
        ("kits19", ["site_0", "site_1"]),
        ("lidc", ["GE", "Philips"]),
        ("camelyon16", ["RUMC", "UMCU"]),
    ],
)
def test_flamby_scans_are_learned_from_files_of_its_layouts(
    kind: str, hospitals: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    example, folder = importlib.import_module("flamby_scans"), tmp_path / "files"
    folder.mkdir()
    example.main(kind, str(folder), scans(kind, folder), *(["5"] if kind == "camelyon16" else []))
    own = {
        "dataset": {"name": "arrays", "path": str(folder / "table.csv"), "shape": [8, 8, 8], "fit": "resize"},
        "task": {"name": "segmentation", "loss": "dice"},
        "model": {"name": "unet", "width": 2, "depth": 1},
    }
    if kind == "camelyon16":
        own = {
            "dataset": {"name": "arrays", "path": str(folder / "table.csv")},
            "task": "classification",
            "model": {"name": "flamby_scans:Bag", "head": "head"},
        }
    result = rayfl.run(
        {
            **own,
            "partition": "natural",
            "algorithm": "ditto",
            "train": {"rounds": 1, "clients_per_round": 2, "local_epochs": 1, "batch_size": 2, "lr": 0.01},
            "cluster": {"backend": "inline"},
        },
        storage_path=str(tmp_path / "runs"),
        name="run",
    )
    rows = [row for row in result.clients.to_pylist() if row["split"] == "test" and row["cohort"] == "all"]
    assert sorted({row["name"] for row in rows}) == hospitals and {row["n"] for row in rows} == {1}
    if kind == "camelyon16":
        bag, stored = (np.load(folder / place) for place in ("bags/normal_001.tif.npy", "normal_001.tif.npy"))
        assert bag.shape == (5, 8) and not bag[3:].any()
        assert np.array_equal(np.sort(bag[:3], 0), np.sort(stored, 0))
    else:
        next(folder.glob("*/**/*.nii.gz")).unlink()
        with pytest.raises(SystemExit, match=r"1 files of .* are missing, the first is"):
            example.main(kind, str(folder), str(folder / "metadata.csv"))


def test_what_fills_a_bag_up_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("flamby_scans")
    bag = example.Bag(InputSpec("image", (6, 8), 2))
    x = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0))
    x[:, 4:] = 0
    torch.testing.assert_close(bag(x), bag(x[:, :4]))


def test_hypernetwork(tmp_path: Path) -> None:
    scores = dict(line.split(": ") for line in ran("hypernetwork.py", tmp_path).splitlines())
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
def test_own_regression(tmp_path: Path) -> None:
    rows = dict(line.split(": ", 1) for line in ran("own_regression.py", tmp_path).splitlines())
    errors = {name.strip(): float(text.split()[1].rstrip(",")) for name, text in rows.items()}
    assert errors["personalized"] < errors["global"]


@pytest.mark.parametrize(("name", "least"), [("own_labels", 0.6), ("own_text", 0.8)])
def test_own_labels_and_own_text(name: str, least: float, tmp_path: Path) -> None:
    (line,) = ran(f"{name}.py", tmp_path).splitlines()
    assert float(line.replace(",", "").split()[-1 if name == "own_text" else 3]) > least


def test_own_huggingface(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the example makes a data set of Hugging Face: needs the extra hf")
    (line,) = [line for line in ran("own_huggingface.py", tmp_path).splitlines() if "hospitals" in line]
    assert line.startswith("4 hospitals, personalized: ") and float(line.split()[-1]) > 0.9


NOTEBOOKS = {"first_run": (), "own_data": (), "own_method": (), "reading_results": ("duckdb", "polars")}
"""By name, what a notebook needs beyond rayfl and the extra docs."""


def test_notebooks_have_been_run_from_the_first_cell_to_the_last() -> None:
    """What they show is there without running them, none shows an error, and none the machine that they were run on."""
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(NOTEBOOKS)
    for name in NOTEBOOKS:
        text = (EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8")
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
        assert not [out for cell in cells for out in cell["outputs"] if out["output_type"] == "error"]
        assert not re.search(r"/tmp/|/home/|/root/|\\u001b\[31merror", text), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nbclient", "ipykernel", "pandas", *NOTEBOOKS[name]):
        pytest.importorskip(package, reason="notebooks need the extra docs: pip install -e '.[docs]'")
    import nbclient
    import nbformat

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=500, kernel_name="python3", resources=place).execute()
    printed = "".join(out.get("text", "") for cell in book.cells for out in cell.get("outputs", []))
    said = {
        "first_run": "superfed   98.3%",
        "own_data": "rayfl.data-stats/1",
        "own_method": "did you mean 'rounds'?",
        "reading_results": "personalized",
    }
    assert said[name] in printed and "error: " not in printed
