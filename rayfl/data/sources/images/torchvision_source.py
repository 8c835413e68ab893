"""Further image data sets that torchvision gets and reads: signs, flowers, food, textures, satellites' images, ..."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rayfl.data.images.images import pixels_of
from rayfl.data.sources.images.torchvision_sets import SETS, TorchvisionSet
from rayfl.data.sources.images.vision import torchvision_datasets
from rayfl.data.sources.preparation.download import Progress, is_url, silent
from rayfl.data.sources.preparation.preparing import ImageSource, Order, RawFiles, no_checksum
from rayfl.errors import DataError
from rayfl.examples import InputSpec

_SIDE = 64
"""Of sets whose images have several sizes."""


class TorchvisionSetSource(ImageSource):
    """Configuration of one of fourteen image data sets that torchvision reads, such as GTSRB, Flowers102 or EuroSAT.

    Images of several sizes are brought to one. The parts are the official ones; EuroSAT has no test part.
    """

    reads_directly: ClassVar[bool] = False

    name: Literal["torchvision"] = Field(default="torchvision", description="An image data set that torchvision reads.")
    subset: Literal[
        "country211",
        "dtd",
        "eurosat",
        "fgvc_aircraft",
        "flowers102",
        "food101",
        "gtsrb",
        "imagenette",
        "kmnist",
        "oxford_iiit_pet",
        "rendered_sst2",
        "stanford_cars",
        "stl10",
        "usps",
    ] = Field(description="Which of the sets.")
    side: int | None = Field(
        default=None,
        ge=8,
        le=1024,
        description="Height and width in pixels that images are brought to; null: the set's own, or 64 where its "
        "images have several sizes.",
    )
    validation: Literal["leave_out", "train"] = Field(
        default="leave_out",
        description="What becomes of the official validation images; train: they are training images.",
    )

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.validation == "train" and "val" not in self._set.parts:
            raise ValueError(f"validation=train: {self.subset} has no official validation images: leave it out")
        if self.part != "train" and "test" not in self._set.parts:
            raise ValueError(f"part={self.part}: {self.subset} has no official test part: leave it out")
        return self

    @property
    def parts(self) -> tuple[str, ...]:
        """See the base class."""
        return tuple(part for part in ("train", "test") if part in self._set.parts)

    @property
    def _set(self) -> TorchvisionSet:
        return SETS[self.subset]

    @property
    def _side(self) -> int:
        return self.side or self._set.side or _SIDE

    @property
    def _stem(self) -> str:
        return f"{self.subset}-{self._side}" + ("" if self.validation == "leave_out" else "-validation")

    @property
    def _spec(self) -> InputSpec:
        return InputSpec("image", (self._set.channels, self._side, self._side), self._set.classes)

    def _choices(self) -> Mapping[str, str]:
        return {"name": self.name, "subset": self.subset, "side": str(self._side), "validation": self.validation}

    def _obtain(self, order: Order) -> RawFiles:
        """--source is a folder that has the files as torchvision lays them out; without it, torchvision gets them."""
        no_checksum(order, "torchvision knows the checksums of what it downloads")
        if order.place is not None and is_url(order.place):
            raise DataError(
                "--source: torchvision has the addresses of its data sets itself; give the folder in which it has laid "
                "out the files, or leave it out"
            )
        folder = self.resolved_root if order.place is None else Path(order.place).expanduser()
        for part in self._set.parts:
            self._official(folder, part, None if order.offline or order.place is not None else order.progress)
        return RawFiles(folder, ())

    def _read(self, folder: Path, part: str, progress: Progress = silent) -> tuple[np.ndarray, np.ndarray]:
        official = ("train", "val") if part == "train" and self.validation == "train" else (part,)
        found = [self._images(folder, one, progress) for one in official]
        x, y = (np.concatenate(arrays) if len(found) > 1 else arrays[0] for arrays in zip(*found, strict=True))
        return x, y

    def _official(self, folder: Path, part: str, download: Progress | None = None) -> Any:
        """torchvision's object for an official part; it gets missing files if ``download`` is to be told of it.

        Raises:
            DataError: the files are not there, are not all there, or cannot be got.
        """
        name, (rows, arguments) = self._set.class_name, self._set.parts[part]
        made = getattr(torchvision_datasets(self.name), name)
        # torchvision reports what is missing or damaged by whichever line stumbles.
        try:
            found = made(folder, **arguments)
        except Exception as error:
            if download is None:
                raise self._unreadable(folder, part, error) from error
            download(f"torchvision downloads {name}", 0, None)
            try:
                found = made(folder, **arguments, download=True)
            except Exception as again:
                raise self._unreadable(folder, part, again) from again
        if len(found) != rows:
            raise DataError(
                f"{self.subset}: {folder} has {len(found):,} images of the {part} part, and the official one has "
                f"{rows:,}; delete what torchvision has laid out there, and prepare it again"
            )
        return found

    def _images(self, folder: Path, part: str, progress: Progress) -> tuple[np.ndarray, np.ndarray]:
        """An official part: x uint8 of the spec's shape, and y."""
        dataset, shape = self._official(folder, part), self._spec.shape
        count, mode = len(dataset), "L" if self._set.channels == 1 else "RGB"
        try:
            x, y = np.empty((count, *shape), np.uint8), np.empty(count, np.int64)
        except MemoryError as error:
            size = count * math.prod(shape) / 2**30
            raise DataError(
                f"{count:,} images of {self._side} x {self._side} pixels do not fit into memory ({size:,.0f} GiB): set "
                "a smaller side"
            ) from error

        def read(row: int) -> None:
            image, y[row] = dataset[row]
            x[row] = pixels_of(image, mode, (self._side, self._side))

        try:
            with ThreadPoolExecutor() as threads:
                for done, _ in enumerate(threads.map(read, range(count)), 1):
                    if done % 256 == 0 or done == count:
                        progress(f"decoding the {part} images", done, count)
        except Exception as error:
            raise self._unreadable(folder, part, error) from error
        if y.min() < 0 or y.max() >= self._set.classes:
            raise DataError(
                f"{self.subset}: the {part} part in {folder} has labels from {y.min()} to {y.max()}, and the official "
                f"ones are 0 to {self._set.classes - 1}; delete what torchvision has laid out there and prepare again"
            )
        return x, y

    def _unreadable(self, folder: Path, part: str, error: Exception) -> DataError:
        problem = str(error).partition(" You can use download=True")[0] or type(error).__name__
        return DataError(
            f"{self.subset}: torchvision cannot read the {part} part from {folder}: {problem.rstrip('.')}; give the "
            "folder in which it has laid out the files with --source, or have it download them (without --source and "
            "--offline); what is damaged must be deleted first"
        )
