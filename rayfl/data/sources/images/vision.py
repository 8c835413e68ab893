"""Image data sets read through torchvision, and MNIST, the first of them."""

from __future__ import annotations

import gzip
import importlib
import shutil
from abc import abstractmethod
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from rayfl.data.files.whole import new_file
from rayfl.data.sources.preparation.download import Progress, fetch, is_url, silent
from rayfl.data.sources.preparation.preparing import ImageSource, Order, RawFiles, no_checksum
from rayfl.errors import DataError
from rayfl.examples import InputSpec


class TorchvisionSource(ImageSource):
    """A data set whose own files torchvision reads."""

    def _read(self, folder: Path, part: str, progress: Progress = silent) -> tuple[np.ndarray, np.ndarray]:
        progress(f"reading the {part} part", 0, None)
        datasets = torchvision_datasets(self.name)
        # torchvision reports a damaged file by whichever line of its parser stumbles: among others OSError,
        # ValueError, RuntimeError, TypeError, KeyError and AssertionError.
        try:
            images, labels = self._arrays(self._dataset(datasets, folder, part == "train"))
        except Exception as error:
            if not self._raw_folder(folder).is_dir():
                raise DataError(
                    f"{self.name} is not there: {self._raw_folder(folder)} does not exist; {self.how_to_prepare()}"
                ) from error
            # torchvision's own advice would put the files elsewhere, and not prepare them.
            problem = str(error).partition(" You can use download=True")[0]
            raise self._unreadable(folder, problem or type(error).__name__) from error
        if images.shape[1:] != self._spec.shape or labels.shape != images.shape[:1]:
            raise self._unreadable(folder, f"images of shape {images.shape[1:]}, labels of shape {labels.shape}")
        return images, labels

    @abstractmethod
    def _dataset(self, datasets: ModuleType, folder: Path, train: bool) -> Any:
        """torchvision's object for a part."""

    @abstractmethod
    def _arrays(self, dataset: Any) -> tuple[np.ndarray, np.ndarray]:
        """Images of shape (n, channels, height, width) and labels."""

    @abstractmethod
    def _raw_folder(self, root: Path) -> Path:
        """Returns where the source's files lie, as torchvision lays them out."""

    def _unreadable(self, root: Path, problem: str) -> DataError:
        return DataError(
            f"{self.name} cannot be read from {self._raw_folder(root)}: {problem}; delete that folder first if its "
            f"files are damaged, then {self.how_to_prepare()}"
        )


class _IdxSource(TorchvisionSource):
    """What data sets in MNIST's format have in common: 60,000 + 10,000 grey images, 28 x 28, of 10 classes."""

    class_name: ClassVar[str]

    @property
    def _spec(self) -> InputSpec:
        return InputSpec("image", (1, 28, 28), 10)

    def _dataset(self, datasets: ModuleType, folder: Path, train: bool) -> Any:
        return getattr(datasets, self.class_name)(folder, train=train, download=False)

    def _arrays(self, dataset: Any) -> tuple[np.ndarray, np.ndarray]:
        return dataset.data.unsqueeze(1).numpy(), dataset.targets.numpy()

    def _raw_folder(self, root: Path) -> Path:
        return root / self.class_name / "raw"

    def _obtain(self, order: Order) -> RawFiles:
        """--source is a folder that holds MNIST/raw or FashionMNIST/raw, or has the four ``*.gz``; or an address."""
        no_checksum(order, f"{self.class_name} has four files, whose checksums torchvision knows")
        mnist = getattr(torchvision_datasets(self.name), self.class_name)
        names = [name.removesuffix(".gz") for name, _ in mnist.resources]
        if order.place is not None and not is_url(order.place):
            folder = Path(order.place).expanduser()
            if self._raw_folder(folder).is_dir():
                return RawFiles(folder, tuple(self._raw_folder(folder) / name for name in names))
        raw = self._raw_folder(self.resolved_root)
        for name, md5 in mnist.resources:
            target = raw / name.removesuffix(".gz")
            if not target.exists():
                mirrors = mnist.mirrors if order.place is None else [f"{order.place.rstrip('/')}/"]
                _fetch_from_any([f"{mirror}{name}" for mirror in mirrors], raw / name, f"md5:{md5}", order)
                with gzip.open(raw / name) as packed:
                    unpack(packed, target)
        return RawFiles(self.resolved_root, tuple(raw / name for name in names))


class MnistSource(_IdxSource):
    """Configuration of MNIST: 60,000 training and 10,000 test images of digits, 28 x 28 (LeCun et al., 1998)."""

    class_name: ClassVar[str] = "MNIST"

    name: Literal["mnist"] = Field(default="mnist", description="The digits of MNIST.")


class FashionMnistSource(_IdxSource):
    """Configuration of Fashion-MNIST: 60,000 + 10,000 images of clothes, 28 x 28, 10 classes (Xiao et al., 2017)."""

    class_name: ClassVar[str] = "FashionMNIST"

    name: Literal["fashion_mnist"] = Field(default="fashion_mnist", description="The clothes of Fashion-MNIST.")


class SvhnSource(TorchvisionSource):
    """Configuration of SVHN: 73,257 + 26,032 digits of house numbers, 3 x 32 x 32 (Netzer et al., 2011).

    The label of the digit 0 is 0 (10 in the files). The 531,131 further images are not used.
    """

    name: Literal["svhn"] = Field(default="svhn", description="The house numbers of SVHN, cropped to digits.")

    @property
    def _spec(self) -> InputSpec:
        return InputSpec("image", (3, 32, 32), 10)

    def _dataset(self, datasets: ModuleType, folder: Path, train: bool) -> Any:
        return datasets.SVHN(self._raw_folder(folder), split="train" if train else "test", download=False)

    def _arrays(self, dataset: Any) -> tuple[np.ndarray, np.ndarray]:
        return np.ascontiguousarray(dataset.data), dataset.labels.astype(np.int64)

    def _raw_folder(self, root: Path) -> Path:
        return root / "svhn"

    def _obtain(self, order: Order) -> RawFiles:
        """--source is a folder that holds svhn/, or a folder or address with the two ``*_32x32.mat`` files."""
        no_checksum(order, "SVHN has two files, whose checksums torchvision knows")
        listed = torchvision_datasets(self.name).SVHN.split_list
        wanted = [listed["train"], listed["test"]]
        if order.place is not None and not is_url(order.place):
            folder = Path(order.place).expanduser()
            if self._raw_folder(folder).is_dir():
                return RawFiles(folder, tuple(self._raw_folder(folder) / name for _, name, _ in wanted))
        raw = self._raw_folder(self.resolved_root)
        for address, name, md5 in wanted:
            place = address if order.place is None else f"{order.place.rstrip('/')}/{name}"
            fetch(place, raw / name, f"md5:{md5}", offline=order.offline, progress=order.progress)
        return RawFiles(self.resolved_root, tuple(raw / name for _, name, _ in wanted))


def unpack(packed: gzip.GzipFile, target: Path) -> None:
    """Writes what a compressed stream holds to a file, which appears when it is complete."""
    try:
        with new_file(target) as file:
            shutil.copyfileobj(packed, file)
    except (EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{target} cannot be unpacked: {error}; delete the compressed file and try again") from error


def _fetch_from_any(places: list[str], destination: Path, digest: str, order: Order) -> None:
    for position, place in enumerate(places):
        try:
            fetch(place, destination, digest, offline=order.offline, progress=order.progress)
            return
        except DataError:
            if position + 1 == len(places):
                raise


def torchvision_datasets(name: str) -> ModuleType:
    """torchvision's module of data sets.

    Args:
        name: the data set that is asked for, for messages.

    Raises:
        DataError: torchvision cannot be imported.
    """
    # A torchvision built for another torch fails on import with RuntimeError ("operator torchvision::nms does not
    # exist") or AttributeError ("partially initialized module 'torchvision' has no attribute 'extension'").
    try:
        return importlib.import_module("torchvision.datasets")
    except (ImportError, RuntimeError, AttributeError) as error:
        try:
            found = f"torchvision {version('torchvision')}"
        except PackageNotFoundError:
            found = "no torchvision"
        raise DataError(
            f"{name} is read with torchvision, which cannot be imported ({error}); {found} is installed beside torch "
            f"{torch.__version__}; install matching versions, e.g. `pip install --upgrade torch torchvision`"
        ) from error
