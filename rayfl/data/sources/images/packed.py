"""Data sets of image files with clients of their own, listed in a table: packed once, decoded when a client is read."""

from __future__ import annotations

import shlex
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa

from rayfl.data.files.content import ContentHash
from rayfl.data.files.natural_file import NaturalHeader, write_natural
from rayfl.data.files.records import SourceFile, write_record
from rayfl.data.files.whole import locked
from rayfl.data.images.images import decode_images
from rayfl.data.sources.base import NaturalPath, Samples
from rayfl.data.sources.preparation.download import is_url
from rayfl.data.sources.preparation.preparing import PREPARED, Order, PreparableSource, is_prepared, no_checksum
from rayfl.errors import DataError
from rayfl.examples import InputSpec
from rayfl.randomness import RandomStreams

_GROUP = 1024


@dataclass(frozen=True, slots=True)
class Listed:
    """An image of the table.

    Attributes:
        client: whose it is.
        split: ``train`` or ``test``.
        file: the path where it lies, a text, since there may be half a million.
        label: number of its class.
    """

    client: str
    split: str
    file: str
    label: int


class PackedImages(PreparableSource):
    """What these data sets share: encoded images in one prepared file, in the order of their clients.

    Class attributes:
        folder: what the files lie in, inside a data root.
        wanted: what ``--source`` is, in words.
    """

    folder: ClassVar[str]
    wanted: ClassVar[str]

    @property
    def known_spec(self) -> InputSpec:
        """See the base class."""
        return self._header.spec

    @property
    def prepared_path(self) -> Path:
        """Returns where the prepared file is, or would be."""
        return self.resolved_root / PREPARED / f"{self._header.kind}.arrow"

    def open(self, streams: RandomStreams | None = None) -> NaturalPath:
        """The prepared file.

        Raises:
            DataError: it does not exist.
        """
        if not self.prepared_path.exists():
            options = "".join(
                f" {shlex.quote(f'{key}={value}')}" for key, value in self._choices().items() if key != "name"
            )
            raise DataError(
                f"{self.prepared_path} does not exist; make it with `rayfl data prepare {self.name}{options} --source "
                f"FOLDER`, {self.wanted}, or set the source's root or RAYFL_DATA to the folder that has it"
            )
        return NaturalPath(self.prepared_path)

    def official_test(self, streams: RandomStreams) -> Samples | NaturalPath:
        """The prepared file, if its clients have test parts of their own."""
        return self.open(streams) if self._header.own_test else super().official_test(streams)

    def prepare(self, order: Order) -> Path:
        """Packs the images; --source is their folder."""
        no_checksum(order, f"{self.name} is a folder of images")
        if order.place is not None and is_url(order.place):
            raise DataError(f"--source: give {self.wanted}, on this machine")
        folder = self.resolved_root / self.folder if order.place is None else Path(order.place).expanduser()
        path = self.prepared_path
        with locked(path, lambda: order.progress(f"waiting for another process that prepares {path.name}", 0, None)):
            if is_prepared(path, order):
                return path
            table, rows = self._listed(folder)
            rows.sort(key=lambda row: (row.client, row.split != "train"))
            digest, schema = ContentHash(), self._header.arrow_schema()

            def groups() -> Iterator[pa.Table]:
                for start in range(0, len(rows), _GROUP):
                    order.progress("packing images", start, len(rows))
                    yield self._group(rows[start : start + _GROUP], schema, digest)

            write_natural(path, schema, groups())
            write_record(path, digest.hexdigest(), str(folder), (SourceFile.of(table),), self._choices())
        return path

    @property
    @abstractmethod
    def _header(self) -> NaturalHeader:
        """What the prepared file says of its images."""

    @abstractmethod
    def _listed(self, folder: Path) -> tuple[Path, list[Listed]]:
        """The table, and the images that it lists, in its order.

        Raises:
            DataError: it cannot be read, or says what cannot be.
        """

    def _image(self, file: Path) -> bytes:
        """The image to be kept of a file: by default the file as it is.

        Raises:
            OSError: the file cannot be read.
            DataError: the image cannot be used.
        """
        return file.read_bytes()

    def _choices(self) -> dict[str, str]:
        """The options that chose what is in the prepared file."""
        return {"name": self.name}

    def _group(self, rows: list[Listed], schema: pa.Schema, digest: ContentHash) -> pa.Table:
        try:
            with ThreadPoolExecutor() as threads:
                images = list(threads.map(self._image, (Path(row.file) for row in rows)))
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror}; unpack {self.name} again") from error
        pixels = decode_images(len(images), images.__getitem__, lambda row: rows[row].file)
        if pixels.shape[1:] != self._header.shape:
            raise DataError(
                f"{rows[0].file}: the images have the shape {pixels.shape[1:]}, not {self._header.shape}; give "
                f"{self.wanted}"
            )
        labels = np.array([row.label for row in rows], dtype=np.int16)
        digest.update(pixels, labels, [name for row in rows for name in (row.client, row.split)])
        owners = [pa.array([row.client for row in rows]), pa.array([row.split for row in rows])]
        return pa.Table.from_arrays([*owners, pa.array(images, pa.binary()), pa.array(labels)], schema=schema)
