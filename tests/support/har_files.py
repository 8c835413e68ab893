"""Small files in the official layout of UCI HAR."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

SIGNALS = tuple(f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
PEOPLE = {"train": (1, 3, 11), "test": (2, 10)}
Parts = dict[str, dict[str, np.ndarray]]


def har_files(folder: Path, windows: int = 12) -> Parts:
    """Writes the folder ``UCI HAR Dataset``, with windows of five people in turn; returns what was written by part."""
    draw, found = np.random.default_rng(5), Parts()
    for part, people in PEOPLE.items():
        count = windows * len(people)
        y = 1 + np.arange(count) // len(people) % 6
        owners = np.array(people)[np.arange(count) % len(people)]
        signals = (draw.normal(0, 0.1, (count, 9, 128)) + y[:, None, None] / 6).astype(np.float32)
        features = np.tanh(draw.normal(y[:, None] / 6, 1, (count, 561))).astype(np.float32)
        inside = folder / part
        (inside / "Inertial Signals").mkdir(parents=True)
        (inside / f"y_{part}.txt").write_text("".join(f"{label}\n" for label in y))
        (inside / f"subject_{part}.txt").write_text("".join(f"{owner}\n" for owner in owners))
        _write(inside / f"X_{part}.txt", features)
        for place, signal in enumerate(SIGNALS):
            _write(inside / "Inertial Signals" / f"{signal}_{part}.txt", signals[:, place])
        found[part] = {"signals": signals, "features": features, "y": y, "people": owners}
    return found


def har_zip(folder: Path, archive: Path, wrapped: bool) -> Path:
    """Packs the folder as its authors did, on a Mac; and that once more, as UCI does."""
    inner = archive.with_name("UCI HAR Dataset.zip")
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(folder.rglob("*.txt")):
            name = file.relative_to(folder).as_posix()
            packed.write(file, f"UCI HAR Dataset/{name}")
            packed.writestr(f"__MACOSX/UCI HAR Dataset/{Path(name).parent}/._{file.name}", b"\x00\x05\x16\x07")
            packed.writestr(f"__MACOSX/UCI HAR Dataset/{name}", b"\x00\x05\x16\x07")
    if not wrapped:
        return inner.rename(archive)
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("UCI HAR Dataset.names", "Human Activity Recognition Using Smartphones Dataset")
        packed.write(inner, inner.name)
    inner.unlink()
    return archive


def _write(file: Path, rows: np.ndarray) -> None:
    """Numbers as the authors' program wrote them, with three digits in their exponents: ``2.8858451e-001``."""
    lines = (" ".join(f"{value: .7e}".replace("e-", "e-0").replace("e+", "e+0") for value in row) for row in rows)
    file.write_text("".join(f" {line}\n" for line in lines))
