"""Files in the official layout of MedMNIST, with as many images as the official ones have."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]
BREAST = {"train": 546, "val": 78, "test": 156}
RETINA = {"train": 1080, "val": 120, "test": 400}


def medmnist_arrays(rows: dict[str, int], classes: int, channels: tuple[int, ...] = ()) -> Arrays:
    """Random images of 28 pixels and labels, as the files have them: colours last, labels in a column."""
    draw = np.random.default_rng(3)
    found = {}
    for part, count in rows.items():
        found[f"{part}_images"] = draw.integers(0, 256, (count, 28, 28, *channels), dtype=np.uint8)
        found[f"{part}_labels"] = draw.integers(0, classes, (count, 1), dtype=np.uint8)
    return found


def write_medmnist(file: Path, arrays: Arrays) -> str:
    """Writes a file and returns its SHA-256."""
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return hashlib.sha256(file.read_bytes()).hexdigest()
