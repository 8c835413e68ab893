"""Camelyon17: patches of lymph nodes from five hospitals, each a client, in the form of WILDS."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import pyarrow as pa
import pyarrow.csv
from pydantic import Field

from rayfl.data.files.natural_file import NaturalHeader
from rayfl.data.sources.images.packed import Listed, PackedImages
from rayfl.errors import DataError

_HEADER = NaturalHeader(
    version=2,
    kind="camelyon17",
    input="image",
    shape=(3, 96, 96),
    num_classes=2,
    storage="encoded",
    own_test=False,
)
_COLUMNS = {"patient": pa.string(), "node": pa.int64(), "x_coord": pa.int64(), "y_coord": pa.int64(),
            "tumor": pa.int64(), "center": pa.int64()}  # fmt: skip


class Camelyon17Source(PackedImages):
    """Configuration of Camelyon17 as WILDS cuts it (Koh et al., 2021): 455,954 patches, 3 x 96 x 96, five hospitals.

    The hospitals are clients; the label is 1 where the middle of a patch has a tumour. Patches stay PNG files inside
    the prepared one, and are decoded when a client is read. WILDS holds hospitals out; here a part of each one's
    patches is its test part (``holdout.test``).
    """

    folder: ClassVar[str] = "camelyon17_v1.0"
    wanted: ClassVar[str] = "the folder camelyon17_v1.0 with metadata.csv and patches/ that the package wilds unpacks"

    name: Literal["camelyon17"] = Field(default="camelyon17", description="The patches of Camelyon17, by hospital.")

    @property
    def _header(self) -> NaturalHeader:
        return _HEADER

    def _listed(self, folder: Path) -> tuple[Path, list[Listed]]:
        path = folder / "metadata.csv"
        options = pa.csv.ConvertOptions(include_columns=list(_COLUMNS), column_types=_COLUMNS)
        try:
            table = pa.csv.read_csv(path, convert_options=options)
        except (OSError, KeyError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {error}; give {self.wanted}") from error
        columns = [table.column(name).to_pylist() for name in _COLUMNS]
        rows = []
        for patient, node, x, y, tumor, center in zip(*columns, strict=True):
            of = f"patient_{patient}_node_{node}"
            file = f"{folder}/patches/{of}/patch_{of}_x_{x}_y_{y}.png"
            rows.append(Listed(f"hospital_{center}", "train", file, tumor))
        return path, rows
