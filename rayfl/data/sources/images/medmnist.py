"""MedMNIST: twelve sets of small medical images, each in one NumPy file of its authors."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.data.sources.images.medmnist_sets import SETS, MedMnistSet
from rayfl.data.sources.preparation.download import Progress, fetch, is_url, silent
from rayfl.data.sources.preparation.preparing import ImageSource, Order, RawFiles
from rayfl.errors import DataError
from rayfl.examples import InputSpec

_URL = "https://zenodo.org/records/10519652/files"
_FOLDER = "medmnist"


class MedMnistSource(ImageSource):
    """Configuration of a set of MedMNIST v2 (Yang et al., 2023): medical images of 28 to 224 pixels, with labels.

    Eleven sets have one class an image: several ones, two, or the five grades of RetinaMNIST, which its authors predict
    by ordinal regression and which are classes here. ChestMNIST has fourteen findings, each of which an image has or
    has not (``task=multilabel``). The parts are the official ones.
    """

    reads_directly: ClassVar[bool] = False

    name: Literal["medmnist"] = Field(default="medmnist", description="A set of medical images of MedMNIST.")
    subset: Literal[
        "pathmnist",
        "chestmnist",
        "dermamnist",
        "octmnist",
        "pneumoniamnist",
        "retinamnist",
        "breastmnist",
        "bloodmnist",
        "tissuemnist",
        "organamnist",
        "organcmnist",
        "organsmnist",
    ] = Field(default="pathmnist", description="Which of the twelve sets of two-dimensional images.")
    side: Literal[28, 64, 128, 224] = Field(
        default=28, description="Height and width in pixels: which of the official files is read."
    )
    validation: Literal["leave_out", "train"] = Field(
        default="leave_out",
        description="What becomes of the official validation images; train: they are training images.",
    )

    def class_names(self) -> tuple[str, ...]:
        """See the base class; of ChestMNIST, the names of the findings."""
        return self._set.classes

    @property
    def _set(self) -> MedMnistSet:
        return SETS[self.subset]

    @property
    def _file(self) -> str:
        return f"{self.subset}.npz" if self.side == 28 else f"{self.subset}_{self.side}.npz"

    @property
    def _stem(self) -> str:
        return f"{self.subset}-{self.side}" + ("" if self.validation == "leave_out" else "-validation")

    @property
    def _spec(self) -> InputSpec:
        shape = (self._set.channels, self.side, self.side)
        return InputSpec("image", shape, len(self._set.classes), target=self._set.target)

    def _choices(self) -> Mapping[str, str]:
        return {"name": self.name, "subset": self.subset, "side": str(self.side), "validation": self.validation}

    def _obtain(self, order: Order) -> RawFiles:
        """--source is path or address of the set's file, or a folder that has it."""
        place = f"{_URL}/{self._file}?download=1" if order.place is None else order.place
        if not is_url(place) and (folder := Path(place).expanduser()).is_dir():
            place = str(folder / self._file)
        file = self.resolved_root / _FOLDER / self._file
        digest = f"md5:{self._set.md5[self.side]}" if order.sha256 is None else f"sha256:{order.sha256}"
        fetch(place, file, digest, offline=order.offline, progress=order.progress)
        return RawFiles(file, (file,))

    def _read(self, folder: Path, part: str, progress: Progress = silent) -> tuple[np.ndarray, np.ndarray]:
        official = ("train", "val") if part == "train" and self.validation == "train" else (part,)
        found = []
        for number, one in enumerate(official):
            progress(f"reading the {one} part", number, len(official))
            found.append(self._official(folder, one))
        if len(found) == 1:
            return found[0]
        x, y = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        return x, y

    def _official(self, file: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
        """An official part (``train``, ``val`` or ``test``) of the file: x uint8 of the spec's shape, and y."""
        images, labels = _arrays(file, part)
        rows, channels, of_classes = self._set.rows[part], self._set.channels, self._set.target == "class"
        pixels = (self.side, self.side) if channels == 1 else (self.side, self.side, channels)
        columns = 1 if of_classes else len(self._set.classes)
        for what, array, wanted in (("images", images, (rows, *pixels)), ("labels", labels, (rows, columns))):
            if array.shape != wanted:
                raise DataError(
                    f"{file}: {part}_{what} has the shape {array.shape}, but that of {self._file} is {wanted}; delete "
                    "the file and get the official one"
                )
        if images.dtype != np.uint8 or labels.dtype.kind not in "iu":
            raise DataError(
                f"{file}: {part}_images holds {images.dtype} and {part}_labels {labels.dtype}, but the official file "
                "has uint8 and integers; delete the file and get the official one"
            )
        largest = len(self._set.classes) - 1 if of_classes else 1
        if labels.min() < 0 or labels.max() > largest:
            raise DataError(
                f"{file}: {part}_labels has values from {labels.min()} to {labels.max()}, but labels of {self.subset} "
                f"are 0 to {largest}; delete the file and get the official one"
            )
        x = images[:, np.newaxis] if channels == 1 else np.ascontiguousarray(images.transpose(0, 3, 1, 2))
        return x, labels[:, 0].astype(np.int64) if of_classes else labels.astype(np.float32)


def _arrays(file: Path, part: str) -> tuple[Any, Any]:
    """Images and labels of a part, as the file has them."""
    try:
        with np.load(file) as content:
            names = [f"{part}_{what}" for what in ("images", "labels")]
            if missing := [name for name in names if name not in content]:
                raise DataError(
                    f"{file} lacks {missing[0]}, it has {', '.join(content) or 'nothing'}; delete the file and get the "
                    "official one"
                )
            return content[names[0]], content[names[1]]
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{file} is not a readable file of MedMNIST: {error}; delete it and get the official one"
        ) from error
