"""Files of one array each: what is read, how it is fitted and scaled, and what is refused with file, row and client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.sources.preparation.inventory import inventory
from rayfl.data.sources.rows import client_rows
from rayfl.errors import ConfigError, RayflError
from rayfl.experiment.parts import Parts
from rayfl.metrics.language import IGNORED

SIDES = (6, 7, 5)
COUNT = 12


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))


def scan(number: int, sides: tuple[int, ...] = SIDES) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(number)
    y = generator.integers(0, 3, sides).astype(np.uint8)
    return (100 * y + generator.normal(size=sides)).astype(np.float32), y


def write(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, array)
        return
    nibabel = pytest.importorskip("nibabel", reason="writes and reads NIfTI: pip install 'rayfl[nifti]'")
    nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), path)


def table(folder: Path, kind: str = ".npy", **files: np.ndarray) -> Path:
    """A table of twelve scans of two clients; ``files`` are written over theirs."""
    lines = ["image,mask,client,split,age,grade"]
    for number in range(COUNT):
        for name, array in zip(("x", "y"), scan(number), strict=True):
            write(folder / f"{name}{number}{kind}", files.get(f"{name}{number}", array))
        client, split = "north" if number < COUNT // 2 else "south", "test" if number % 3 == 0 else "train"
        lines.append(f"x{number}{kind},y{number}{kind},{client},{split},{30 + number}.5,{number % 2}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return folder / "table.csv"


def sections(path: Path, task: str = "segmentation", **options: Any) -> dict[str, Any]:
    return {
        "task": task,
        "dataset": {"name": "arrays", "path": str(path), **options},
        "partition": "natural",
        "model": {"name": "unet", "width": 2, "depth": 1},
        "algorithm": "fedavg",
        "train": {"rounds": 1, "clients_per_round": 2, "local_epochs": 1, "batch_size": 4, "lr": 0.1},
        "cluster": {"backend": "inline"},
        "tracking": {"tensorboard": False},
    }


def opened(path: Path, task: str = "segmentation", **options: Any) -> Any:
    content = sections(path, task, **options)
    if task != "segmentation":
        content["model"] = {"name": "two_nn", "hidden": [3]}
    return Parts(load_config(Experiment, content, {})).dataset


@pytest.mark.parametrize("kind", [".npy", ".nii", ".nii.gz"])
def test_scans_and_masks_are_read_as_they_are_and_learned(kind: str, tmp_path: Path) -> None:
    path = table(tmp_path, kind)
    dataset = opened(path)
    assert dataset.names == ("north", "south") and dataset.spec.shape == (1, *SIDES) and dataset.spec.num_classes == 3
    for client in range(2):
        for split, wanted in (("train", (1, 2)), ("test", (0,))):
            numbers = [n for n in range(6 * client, 6 * client + 6) if n % 3 in wanted]
            loaded = dataset.load(client)[split]
            for place, number in enumerate(sorted(numbers)):
                x, y = scan(number)
                assert np.array_equal(loaded.x[place, 0], x) and np.array_equal(loaded.y[place], y)
    result = rayfl.run(sections(path), storage_path=str(tmp_path / "runs"), name="run")
    assert {row["name"] for row in result.clients.to_pylist() if row["split"] == "test"} == {"north", "south"}
    assert all(0 <= row["dice"] <= 1 for row in result.clients.to_pylist())


def test_clients_are_called_as_the_table_has_them(tmp_path: Path) -> None:
    path = table(tmp_path)
    path.write_text(path.read_text().replace("north", "007").replace("south", "7"))
    assert opened(path).names == ("007", "7")


def test_the_copy_is_listed_as_what_it_is(tmp_path: Path) -> None:
    opened(table(tmp_path))
    (entry,) = inventory(tmp_path / "root")
    assert (entry.kind, entry.source) == ("arrays", str(tmp_path / "table.csv"))


def test_the_copy_is_made_again_when_a_file_changes(tmp_path: Path) -> None:
    path = table(tmp_path)
    before = opened(path).load(0)["test"].x[0, 0]
    write(tmp_path / "x0.npy", 1 + np.pad(scan(0)[0], 0))
    (tmp_path / "x0.npy").touch()
    torch.testing.assert_close(opened(path).load(0)["test"].x[0, 0], before + 1)


def test_cutting_and_filling_up_keep_the_middle(tmp_path: Path) -> None:
    path = table(tmp_path)
    loaded = opened(path, shape=[4, 10, 5], fit="crop").load(0)["test"]
    x, y = scan(0)
    assert loaded.x.shape[1:] == (1, 4, 10, 5)
    assert np.array_equal(loaded.x[0, 0, :, 1:8], x[1:5]) and np.array_equal(loaded.y[0, :, 1:8], y[1:5])
    around = np.r_[0, 8, 9]
    assert (loaded.y[0, :, around] == IGNORED).all() and (loaded.x[0, 0][:, around] == x[1:5].min()).all()


def test_resized_scans_are_interpolated_and_masks_keep_their_classes(tmp_path: Path) -> None:
    loaded = opened(table(tmp_path), shape=[3, 14, 5], fit="resize").load(0)["test"]
    x, y = scan(0)
    expected = F.interpolate(torch.from_numpy(x)[None, None], (3, 14, 5), mode="trilinear")[0]
    torch.testing.assert_close(loaded.x[0], expected)
    assert np.array_equal(loaded.y[0][:, ::2], loaded.y[0][:, 1::2])
    assert np.array_equal(loaded.y[0][:, ::2], y[1::2])


def test_values_are_scaled_by_themselves_or_by_two_bounds(tmp_path: Path) -> None:
    path = table(tmp_path, x3=np.full(SIDES, 7, np.float32))
    x, _ = scan(0)
    own, constant = opened(path, scale="sample").load(0)["test"].x
    torch.testing.assert_close(own[0], torch.from_numpy((x - x.mean()) / x.std()), rtol=1e-4, atol=1e-4)
    assert (constant == 0).all()
    bounded = opened(path, scale=[0, 150]).load(0)["test"].x[0, 0]
    torch.testing.assert_close(bounded, torch.from_numpy(x.clip(0, 150) / 150))


def test_channels_come_first_in_numpys_files_and_last_in_nifti(tmp_path: Path) -> None:
    kinds = {}
    for kind, axis in ((".npy", 0), (".nii.gz", -1)):
        if kind != ".npy":
            pytest.importorskip("nibabel", reason="NIfTI: pip install 'rayfl[nifti]'")
        files = {f"x{n}": np.stack([scan(n)[0], -scan(n)[0]], axis) for n in range(COUNT)}
        kinds[kind] = opened(table(tmp_path / kind[1:4], kind, **files)).load(0)["test"].x
    assert kinds[".npy"].shape == (2, 2, *SIDES) and np.array_equal(kinds[".npy"][0, 1], -scan(0)[0])
    assert torch.equal(kinds[".npy"], kinds[".nii.gz"])


def test_classes_of_masks_may_be_renumbered_and_not_count(tmp_path: Path) -> None:
    files = {f"y{n}": np.array([0, 4, IGNORED], np.int16)[scan(n)[1]] for n in range(COUNT)}
    dataset = opened(table(tmp_path, **files), labels="renumbered")
    assert dataset.spec.num_classes == 2
    assert np.array_equal(dataset.load(0)["test"].y[0], np.array([0, 1, IGNORED])[scan(0)[1]])
    with pytest.raises(RayflError, match=r"num_classes is 3, but the targets need 5: .* or dataset.ignore"):
        opened(tmp_path / "table.csv", num_classes=3)
    dataset = opened(tmp_path / "table.csv", ignore=4, num_classes=3)
    assert np.array_equal(dataset.load(0)["test"].y[0], np.array([0, IGNORED, IGNORED])[scan(0)[1]])
    with pytest.raises(RayflError, match=r"dataset.ignore is for masks, and there are none"):
        opened(tmp_path / "table.csv", "regression", y="age", ignore=4)


@pytest.mark.parametrize(
    ("task", "options", "values"),
    [("regression", {"y": "age"}, [30.5, 33.5]), ("classification", {"y": "grade"}, [0, 1])],
)
def test_other_targets_are_columns_of_the_table(task: str, options: Any, values: list[float], tmp_path: Path) -> None:
    loaded = opened(table(tmp_path), task, **options).load(0)["test"]
    assert loaded.x.shape == (2, *SIDES) and loaded.y.flatten().tolist() == values


def test_large_samples_are_written_in_small_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path)
    whole = opened(path).load(1)["train"]
    normalized = opened(path, scale=[0, 300])
    monkeypatch.setattr(client_rows, "BATCH_BYTES", 2 * 4 * int(np.prod(SIDES)))
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "other"))
    grouped, again = opened(path).load(1)["train"], opened(path, scale=[0, 300])
    assert torch.equal(whole.x, grouped.x) and torch.equal(whole.y, grouped.y)
    assert again._moments().mean == pytest.approx(normalized._moments().mean)
    files = list((tmp_path / "other").rglob("*.arrow"))
    assert len(files) == 2
    for file in files:
        with pa.ipc.open_file(file) as batches:
            rows = [batches.get_batch(k).num_rows for k in range(batches.num_record_batches)]
        assert max(rows) == 2 < sum(rows)


@pytest.mark.parametrize(
    ("files", "options", "words"),
    [
        ({}, {"path": "none.csv"}, r"none.csv"),
        ({}, {"x": "scan"}, r"dataset.x: .*has no column 'scan'"),
        ({}, {"y": "age"}, r"column 'age' has the type double; needed are paths of files"),
        ({}, {"fit": "crop"}, r"fit=crop needs shape"),
        ({}, {"scale": [3, 1]}, r"the first of two values must be the smaller one"),
        ({"x7": np.zeros((6, 7, 4), np.float32)}, {},
         r"table.csv, row 7 \(client 'south'\): .*y7.npy has the shape \(6, 7, 5\), but .*x7.npy, whose mask"),
        ({"y2": np.zeros((6, 7, 5))[None]}, {}, r"row 2 \(client 'north'\): .*y2.npy has the shape \(1, 6, 7, 5\);"),
        ({"y2": np.full(SIDES, 0.5)}, {}, r"row 2 \(client 'north'\): .*y2.npy has the value 0.5; .*are classes"),
        ({"y2": np.full(SIDES, -1)}, {}, r"row 2 .*has the value -1; .*and -100 where none counts"),
        ({"x8": np.full(SIDES, np.nan, np.float32)}, {}, r"row 8 \(client 'south'\): .*not finite"),
        ({"x5": scan(0, (4, 4, 4))[0], "y5": scan(0, (4, 4, 4))[1]}, {},
         r"row 5 .*x5.npy has the shape \(1, 4, 4, 4\), but 6 x 7 x 5 is needed: .*fit=crop or resize"),
        ({"x5": np.zeros((2, *SIDES), np.float32)}, {}, r"row 5 .*\(2, 6, 7, 5\) .* one number of channels"),
        ({"x5": np.zeros(SIDES, np.uint8)}, {}, r"row 5 .*the type uint8, but that of the first row .* float32"),
        ({"x5": np.zeros(SIDES, object)}, {}, r"row 5 .*x5.npy cannot be read: ValueError"),
        ({"x5": np.zeros(SIDES, "U3")}, {}, r"row 5 .*x5.npy holds <U3; needed is an array of numbers"),
        ({f"y{n}": np.full(SIDES, IGNORED) for n in range(COUNT)}, {}, r"column 'mask': no pixel of any mask counts"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(files: Any, options: Any, words: str, tmp_path: Path) -> None:
    path = table(tmp_path, **files)
    with pytest.raises(RayflError, match=words):
        opened(path.with_name(options.pop("path", "table.csv")), **options)


def test_missing_files_and_options_of_other_tasks_are_named(tmp_path: Path) -> None:
    path = table(tmp_path)
    (tmp_path / "y4.npy").rename(tmp_path / "y4.mha")
    with pytest.raises(RayflError, match=r"table.csv: .*y4.npy cannot be read: No such file"):
        opened(path)
    path.write_text(path.read_text().replace("y4.npy", "y4.mha"))
    with pytest.raises(RayflError, match=r"row 4 \(client 'north'\): .*y4.mha: its name ends neither in .npy nor in"):
        opened(path)
    with pytest.raises(RayflError, match=r"dataset.num_classes is for classes"):
        opened(path, "regression", y="age", num_classes=3)
    with pytest.raises((RayflError, ConfigError), match=r"no next tokens"):
        opened(path, "language_model")
    path.write_text(path.read_text().replace("40.5,0", "40.5,70000"))
    with pytest.raises(RayflError, match=r"table.csv: row 10 has the label 70000, which makes 70001 classes"):
        opened(path, "classification", y="grade", client="none")
