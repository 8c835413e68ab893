"""Parquet files of small images."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (12, 3, 5, 4), dtype=np.uint8)


def write(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def encoded(kind: str) -> list[bytes]:
    result = []
    for image in PIXELS:
        buffer = io.BytesIO()
        options = {"lossless": True} if kind == "WEBP" else {}
        Image.fromarray(image.transpose(1, 2, 0)).save(buffer, kind, **options)
        result.append(buffer.getvalue())
    return result


PNG, OTHER = encoded("PNG")[0], io.BytesIO()
Image.new("RGB", (2, 2)).save(OTHER, "PNG")
