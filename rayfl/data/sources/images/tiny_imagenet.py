"""TinyImageNet, from its zip file or the unpacked folder."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.data.images.images import decode_images
from rayfl.data.sources.preparation.download import Progress, fetch, is_url, silent
from rayfl.data.sources.preparation.preparing import ImageSource, Order, RawFiles, no_checksum
from rayfl.errors import DataError
from rayfl.examples import InputSpec

_URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
_SHA256 = "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821"
_ARCHIVE = "tiny-imagenet-200.zip"
_FOLDER = "tiny-imagenet-200"
_TRAIN = re.compile(r"(?:^|/)train/(?P<label>n\d{8})/images/(?P<name>[^/]+)\.JPEG$")
_TEST = re.compile(r"(?:^|/)val/(?:(?P<label>n\d{8})/)?images/(?P<name>[^/]+)\.JPEG$")
_ANNOTATIONS = re.compile(r"(?:^|/)val/val_annotations\.txt$")


class TinyImageNetSource(ImageSource):
    """Configuration of TinyImageNet: 100,000 training and 10,000 labelled validation images, 200 classes, 3 x 64 x 64.

    The part ``test`` is the official validation set, since the official test set has no labels. Classes are numbered in
    the order of their WordNet ids, samples lie in the order of class and file name.
    """

    reads_directly: ClassVar[bool] = False

    name: Literal["tiny_imagenet"] = Field(default="tiny_imagenet", description="The images of TinyImageNet.")

    @property
    def _spec(self) -> InputSpec:
        return InputSpec("image", (3, 64, 64), 200)

    def _obtain(self, order: Order) -> RawFiles:
        """--source is the folder tiny-imagenet-200 or one that holds it, or path or address of the zip file."""
        if order.place is not None and not is_url(order.place):
            place = Path(order.place).expanduser()
            if place.is_dir():
                no_checksum(order, f"{place} is a folder")
                return RawFiles(place, ())
        elif order.place is None and (self.resolved_root / _FOLDER).is_dir():
            no_checksum(order, f"{self.resolved_root / _FOLDER} is a folder")
            return RawFiles(self.resolved_root / _FOLDER, ())
        archive = self.resolved_root / _ARCHIVE
        digest = f"sha256:{order.sha256 or _SHA256}"
        fetch(order.place or _URL, archive, digest, offline=order.offline, progress=order.progress)
        return RawFiles(archive, (archive,))

    def _read(self, folder: Path, part: str, progress: Progress = silent) -> tuple[np.ndarray, np.ndarray]:
        with _Tree(folder) as tree:
            labels = sorted({match["label"] for match in map(_TRAIN.search, tree.names) if match})
            if len(labels) != self._spec.num_classes:
                raise DataError(
                    f"{folder} has {len(labels)} folders train/<class>/images, not {self._spec.num_classes}; give the "
                    f"folder {_FOLDER} or its zip file with --source"
                )
            number = {label: position for position, label in enumerate(labels)}
            images = tree.train() if part == "train" else tree.test()
            if unknown := sorted({label for label, _ in images} - set(number)):
                raise DataError(f"{folder}: the class {unknown[0]!r} of a {part} image is none of the training classes")
            if not images:
                raise DataError(f"{folder} has no {part} images; get the archive again")
            x = decode_images(
                len(images),
                lambda position: tree.read(images[position][1]),
                lambda position: f"{folder}, {images[position][1]}",
                lambda done: progress(f"decoding the {part} images", done, len(images)),
            )
        if x.shape[1:] != self._spec.shape:
            raise DataError(f"{folder}: the {part} images have the shape {x.shape[1:]}, not {self._spec.shape}")
        return x, np.array([number[label] for label, _ in images], dtype=np.int64)


class _Tree:
    """The files below a folder or in a zip file."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._zip: zipfile.ZipFile | None = None
        if place.is_dir():
            self.names = [path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()]
            return
        try:
            self._zip = zipfile.ZipFile(place)
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(f"{place} is neither a folder nor a readable zip file: {error}") from error
        self.names = self._zip.namelist()

    def __enter__(self) -> _Tree:
        return self

    def __exit__(self, *error: object) -> None:
        if self._zip is not None:
            self._zip.close()

    def read(self, name: str) -> bytes:
        """The content of a file."""
        try:
            return self._zip.read(name) if self._zip is not None else (self._place / name).read_bytes()
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(f"{self._place}: {name} cannot be read: {error}") from error

    def train(self) -> list[tuple[str, str]]:
        """Label and name of the training images, sorted."""
        found = ((name, _TRAIN.search(name)) for name in self.names)
        return sorted((match["label"], name) for name, match in found if match)

    def test(self) -> list[tuple[str, str]]:
        """Label and name of the validation images, sorted: as they come, or moved into a folder for each class."""
        listed: dict[str, str] = {}
        for name in self.names:
            if _ANNOTATIONS.search(name):
                rows = (line.split("\t") for line in self.read(name).decode().splitlines())
                listed.update((row[0], row[1]) for row in rows if len(row) > 1)
        result = []
        for name in self.names:
            if match := _TEST.search(name):
                label = match["label"] or listed.get(f"{match['name']}.JPEG")
                if label is None:
                    raise DataError(f"{self._place}: val_annotations.txt does not name the class of {name}")
                result.append((label, name))
        return sorted(result)
