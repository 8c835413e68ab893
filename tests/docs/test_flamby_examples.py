"""The examples that read FLamby's files, run on made ones of its layouts."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

import rayfl

EXAMPLES = Path(__file__).parents[2] / "examples"


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
            "model": {"name": "attention_pooling", "embedding": 4, "attention": 3, "hidden": [4]},
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
