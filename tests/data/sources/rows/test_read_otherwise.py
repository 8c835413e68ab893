"""Inputs that are read otherwise than a user sees them are warned of."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from rayfl.data.sources.base import Samples
from rayfl.data.sources.rows.parquet import ParquetSource

PIXELS = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 3)


def opened(folder: Path, columns: dict[str, Any], **options: Any) -> tuple[np.ndarray, list[str]]:
    """The inputs, and what is said of them."""
    pq.write_table(pa.table(columns), folder / "f.parquet")
    samples = ParquetSource(path=folder / "f.parquet", root=folder, **options).open()
    assert isinstance(samples, Samples)
    return samples.x, [remark.text for remark in samples.remarks()]


def png(orientation: int | None) -> bytes:
    file, exif = io.BytesIO(), Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    Image.fromarray(PIXELS).save(file, "PNG", exif=exif)
    return file.getvalue()


def test_images_that_a_camera_would_turn_are_read_as_they_are_stored_with_a_word(tmp_path: Path) -> None:
    files = [png(None), png(1), png(6), png(2)]
    x, (remark,) = opened(tmp_path, {"image": files, "label": [0, 1, 0, 1]})
    assert (
        remark.startswith("2 of 4 images say in their EXIF data that they are to be turned")
        and "exif_transpose" in remark
    )
    assert (x == PIXELS.transpose(2, 0, 1)).all()
    upright = []
    for one in files:
        with Image.open(io.BytesIO(one)) as image:
            ImageOps.exif_transpose(image).save(file := io.BytesIO(), "PNG")
        upright.append(file.getvalue())
    assert opened(tmp_path, {"image": upright, "label": [0, 1, 0, 1]})[1] == []


@pytest.mark.parametrize("options", [{}, {"standardize": "global"}])
def test_numbers_that_float32_does_not_tell_apart_are_warned_of(tmp_path: Path, options: dict[str, Any]) -> None:
    """Seconds since 1970 within a minute become one number, which standardizing makes 0 everywhere."""
    seconds = [1_700_000_000 + 10 * i for i in range(6)]
    columns = {"x1": seconds, "x2": [0.1 * i for i in range(6)], "x3": [16_777_217] * 6, "y": [0, 1] * 3}
    x, (remark,) = opened(tmp_path, columns, **options)
    assert len(np.unique(x[:, 0])) == 1
    assert remark.startswith(
        "column 'x1' has numbers up to 1.7e+09 of the standard deviation 17.1, which float32 rounds"
    )
    since = {**columns, "x1": [one - seconds[0] for one in seconds]}
    assert opened(tmp_path, since, **options)[1] == []
