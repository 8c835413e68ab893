"""Camelyon17: patches of lymph nodes from five hospitals, each a client, in the form of WILDS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv
from pydantic import Field

from rayfl.data.files.content import ContentHash
from rayfl.data.files.natural_file import NaturalHeader, write_natural
from rayfl.data.files.records import SourceFile, write_record
from rayfl.data.files.whole import locked
from rayfl.data.images.images import decode_images
from rayfl.data.sources.base import NaturalPath
from rayfl.data.sources.download import is_url
from rayfl.data.sources.preparing import PREPARED, Order, PreparableSource, is_prepared, no_checksum
from rayfl.errors import DataError
from rayfl.examples import InputSpec
from rayfl.randomness import RandomStreams

_SIDE, _GROUP = 96, 1024
_HEADER = NaturalHeader(
    version=2,
    kind="camelyon17",
    input="image",
    shape=(3, _SIDE, _SIDE),
    num_classes=2,
    storage="encoded",
    own_test=False,
)
_COLUMNS = {"patient": pa.string(), "node": pa.int64(), "x_coord": pa.int64(), "y_coord": pa.int64(),
            "tumor": pa.int64(), "center": pa.int64()}  # fmt: skip


class Camelyon17Source(PreparableSource):
    """Configuration of Camelyon17 as WILDS cuts it (Koh et al., 2021): 455,954 patches, 3 x 96 x 96, five hospitals.

    The hospitals are clients; the label is 1 where the middle of a patch has a tumour. Patches stay PNG files inside
    the prepared one, and are decoded when a client is read. WILDS holds hospitals out; here a part of each one's
    patches is its test part (``holdout.test``).
    """

    name: Literal["camelyon17"] = Field(default="camelyon17", description="The patches of Camelyon17, by hospital.")

    @property
    def known_spec(self) -> InputSpec:
        """See the base class."""
        return _HEADER.spec

    @property
    def prepared_path(self) -> Path:
        """Returns where the prepared file is, or would be."""
        return self.resolved_root / PREPARED / f"{self.name}.arrow"

    def open(self, streams: RandomStreams | None = None) -> NaturalPath:
        """The prepared file.

        Raises:
            DataError: it does not exist.
        """
        if not self.prepared_path.exists():
            raise DataError(
                f"{self.prepared_path} does not exist; make it with `rayfl data prepare {self.name} --source FOLDER`, "
                "the folder camelyon17_v1.0 that the package wilds unpacks, or set the source's root or RAYFL_DATA to "
                "the folder that has it"
            )
        return NaturalPath(self.prepared_path)

    def prepare(self, order: Order) -> Path:
        """Packs the patches; --source is the folder with metadata.csv and patches/."""
        no_checksum(order, "Camelyon17 is a folder of patches")
        if order.place is not None and is_url(order.place):
            raise DataError("--source: give the folder with metadata.csv and patches/ that the package wilds unpacks")
        folder = self.resolved_root / "camelyon17_v1.0" if order.place is None else Path(order.place).expanduser()
        path = self.prepared_path
        with locked(path, lambda: order.progress(f"waiting for another process that prepares {path.name}", 0, None)):
            if is_prepared(path, order):
                return path
            table = _metadata(folder / "metadata.csv")
            digest, schema = ContentHash(), _HEADER.arrow_schema()

            def groups() -> Iterator[pa.Table]:
                for start in range(0, len(table), _GROUP):
                    order.progress("packing patches", start, len(table))
                    yield _group(folder, table.slice(start, _GROUP), schema, digest)

            write_natural(path, schema, groups())
            source = SourceFile.of(folder / "metadata.csv")
            write_record(path, digest.hexdigest(), str(folder), (source,), {"name": self.name})
        return path


def _metadata(path: Path) -> pa.Table:
    """The patches in the order of their hospitals; within one, in the order of the file."""
    options = pa.csv.ConvertOptions(include_columns=list(_COLUMNS), column_types=_COLUMNS)
    try:
        table = pa.csv.read_csv(path, convert_options=options)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}; give the folder with metadata.csv and patches/") from error
    return table.take(pa.array(np.argsort(table.column("center").to_numpy(), kind="stable")))


def _group(folder: Path, rows: pa.Table, schema: pa.Schema, digest: ContentHash) -> pa.Table:
    places = [
        folder / "patches" / f"patient_{row['patient']}_node_{row['node']}"
        / f"patch_patient_{row['patient']}_node_{row['node']}_x_{row['x_coord']}_y_{row['y_coord']}.png"
        for row in rows.to_pylist()
    ]  # fmt: skip
    try:
        images = [place.read_bytes() for place in places]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}; unpack Camelyon17 again") from error
    pixels = decode_images(len(images), images.__getitem__, lambda row: str(places[row]))
    if pixels.shape[1:] != _HEADER.shape:
        raise DataError(f"{places[0]}: the patches have the shape {pixels.shape[1:]}, not {_HEADER.shape}")
    labels = rows.column("tumor").to_numpy().astype(np.int16)
    clients = [f"hospital_{center}" for center in rows.column("center").to_pylist()]
    digest.update(pixels, labels, [name for client in clients for name in (client, "train")])
    columns = [pa.array(clients), pa.array(["train"] * len(clients)), pa.array(images, pa.binary()), pa.array(labels)]
    return pa.Table.from_arrays(columns, schema=schema)
