"""Small files in the layout of PAMAP2."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

PEOPLE = tuple(range(101, 110))
SIGNALS = [unit + signal for unit in (3, 20, 37) for signal in (1, 2, 3, 7, 8, 9, 10, 11, 12)]
"""Columns of what is read: acceleration, angular velocity and magnetic field of three units."""


def recording(activities: list[tuple[int, int]], seed: int) -> np.ndarray:
    """Rows of a file: for each (activity, rows) that many, the heart rate in every eleventh alone."""
    draw = np.random.default_rng(seed)
    labels = np.concatenate([np.full(rows, activity) for activity, rows in activities])
    found = draw.normal(0, 1, (len(labels), 54)) + labels[:, None] / 8
    found[:, 0], found[:, 1] = 5 + np.arange(len(labels)) / 100, labels
    found[:, 2] = np.where(np.arange(len(labels)) % 11 == 0, 100, np.nan)
    return found


def write(file: Path, rows: np.ndarray) -> None:
    """Writes rows as the authors did: numbers and ``NaN`` with one space between."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (" ".join("NaN" if np.isnan(value) else f"{value:.6g}" for value in row) for row in rows)
    file.write_text("".join(f"{line}\n" for line in lines))


def pamap2_files(folder: Path, rows: int = 40) -> dict[int, np.ndarray]:
    """Writes ``Protocol``: everybody does two activities with something else between; returns the rows by person."""
    found = {}
    for person in PEOPLE:
        first, second = (1, 24) if person % 2 else (2, 12)
        found[person] = recording([(0, 7), (first, rows), (0, 9), (second, rows)], person)
        write(folder / "Protocol" / f"subject{person}.dat", found[person])
    return found


def pamap2_zip(folder: Path, archive: Path) -> Path:
    """Packs the folder as its authors did, and that once more, as UCI does."""
    inner = archive.with_name("PAMAP2_Dataset.zip")
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(folder.rglob("*.dat")):
            packed.write(file, f"PAMAP2_Dataset/{file.relative_to(folder).as_posix()}")
    with zipfile.ZipFile(archive, "w") as packed:
        packed.write(inner, inner.name)
    inner.unlink()
    return archive
