"""Digit-Five: digits from five domains, in the MATLAB files of its authors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from PIL import Image
from pydantic import Field

from rayfl.data.sources.preparation.download import Progress, silent
from rayfl.data.sources.preparation.preparing import ImageSource, Order, PartRows, RawFiles, no_checksum
from rayfl.errors import DataError
from rayfl.examples import InputSpec

Arrays = tuple[Any, Any]
"""Images and labels as a file has them."""


class _Domain(NamedTuple):
    """How a domain is stored.

    Attributes:
        files: of the training and of the test part.
        of_part: finds images and labels of a part, named ``train`` or ``test``.
        axes: of the images, which axes are (sample, row, column, channel); None where there are no channels.
        scale: what values are multiplied by for 0..255.
    """

    files: Mapping[str, str]
    of_part: Callable[[Mapping[str, Any], str], Arrays]
    axes: tuple[int, ...] | None
    scale: float = 1


def _both(name: str) -> dict[str, str]:
    return {"train": name, "test": name}


_DOMAINS: Mapping[str, _Domain] = {
    "mnist": _Domain(
        _both("mnist_data.mat"), lambda content, part: (content[f"{part}_28"], content[f"label_{part}"]), None
    ),
    "mnist_m": _Domain(
        _both("mnistm_with_label.mat"), lambda content, part: (content[part], content[f"label_{part}"]), (0, 1, 2, 3)
    ),
    "svhn": _Domain(
        {"train": "svhn_train_32x32.mat", "test": "svhn_test_32x32.mat"},
        lambda content, part: (content["X"], content["y"]),
        (3, 0, 1, 2),
    ),
    "synthetic": _Domain(
        _both("syn_number.mat"),
        lambda content, part: (content[f"{part}_data"], content[f"{part}_label"]),
        (0, 1, 2, 3),
    ),
    "usps": _Domain(
        _both("usps_28x28.mat"), lambda content, part: tuple(content["dataset"][int(part == "test")]), None, scale=255
    ),
}


class DigitFiveSource(ImageSource):
    """Configuration of Digit-Five: digits of MNIST, MNIST-M, SVHN, Synthetic Digits and USPS (Peng et al., 2019).

    Images are brought to 3 x 28 x 28, as in FedBN's experiments (Li et al., 2021). Samples lie in the order of the
    domains and of their files.
    """

    reads_directly: ClassVar[bool] = False

    name: Literal["digit_five"] = Field(default="digit_five", description="The digits of five domains of Digit-Five.")

    @property
    def _spec(self) -> InputSpec:
        return InputSpec("image", (3, _SIDE, _SIDE), 10)

    def _obtain(self, order: Order) -> RawFiles:
        """--source is the folder with the six ``*.mat`` files."""
        no_checksum(order, "Digit-Five has six files, of which no checksums are published")
        folder = self.resolved_root / "Digit-Five" if order.place is None else Path(order.place).expanduser()
        names = dict.fromkeys(name for domain in _DOMAINS.values() for name in domain.files.values())
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise DataError(
                f"{folder} lacks {', '.join(missing)}; get Digit-Five's files from its authors (docs/data.md) and give "
                "their folder with --source"
            )
        return RawFiles(folder, tuple(folder / name for name in names))

    def _read(self, folder: Path, part: str, progress: Progress = silent) -> tuple[np.ndarray, np.ndarray]:
        rows = self._rows(folder, part, progress)
        return rows.x, rows.y

    def _rows(self, folder: Path, part: str, progress: Progress) -> PartRows:
        found = {}
        for number, (name, domain) in enumerate(_DOMAINS.items()):
            progress(f"reading the {part} part", number, len(_DOMAINS))
            path = folder / domain.files[part]
            try:
                images, labels = domain.of_part(_matlab(path), part)
                found[name] = _images(images, domain), _labels(labels)
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise DataError(
                    f"{path} is not Digit-Five's file of {name} ({type(error).__name__}: {error}); get it again"
                ) from error
            if len(found[name][0]) != len(found[name][1]):
                raise DataError(f"{path}: {len(found[name][0])} {part} images, but {len(found[name][1])} labels")
        x, y = (np.concatenate(column) for column in zip(*found.values(), strict=True))
        return PartRows(x, y, {name: len(labels) for name, (_, labels) in found.items()})


_SIDE = 28


def _matlab(path: Path) -> Mapping[str, Any]:
    # Slow to import, and only this source needs it.
    from scipy.io import loadmat

    try:
        content: Mapping[str, Any] = loadmat(path)
    except Exception as error:  # of a damaged file, whichever line of the parser stumbles
        raise DataError(f"{path} is not a readable MATLAB file: {error}; get it again") from error
    return content


def _images(values: Any, domain: _Domain) -> np.ndarray:
    """uint8 of shape (n, 3, 28, 28); grey images are repeated."""
    if domain.axes is None:
        pixels = np.asarray(values).reshape(len(values), _SIDE, _SIDE, 1).repeat(3, axis=-1)
    else:
        pixels = np.asarray(values).transpose(domain.axes)
    pixels = np.clip(np.rint(pixels.astype(np.float64) * domain.scale), 0, 255).astype(np.uint8)
    if pixels.shape[1:3] != (_SIDE, _SIDE):
        size = (_SIDE, _SIDE)
        pixels = np.stack([np.asarray(Image.fromarray(p).resize(size, Image.Resampling.BILINEAR)) for p in pixels])
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


def _labels(values: Any) -> np.ndarray:
    """int64 of shape (n,), from numbers or one-hot rows; SVHN's 10 is the digit 0."""
    labels = np.asarray(values)
    labels = labels.argmax(1) if labels.ndim == 2 and labels.shape[1] == 10 else labels.reshape(-1)
    found: np.ndarray = labels.astype(np.int64) % 10
    return found
