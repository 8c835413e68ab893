"""CIFAR-10 and CIFAR-100."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.data.sources.images.vision import TorchvisionSource, torchvision_datasets
from rayfl.data.sources.preparation.download import fetch, is_url
from rayfl.data.sources.preparation.preparing import Order, RawFiles, no_checksum
from rayfl.examples import InputSpec


class _Cifar(TorchvisionSource):
    """What both data sets have in common."""

    class_name: ClassVar[str]
    archive_sha256: ClassVar[str]
    """Of the archive from the authors' page. Its files are pickles, which could run code: nothing else is unpacked."""

    num_classes: ClassVar[int]

    @property
    def _spec(self) -> InputSpec:
        return InputSpec("image", (3, 32, 32), self.num_classes)

    def _dataset(self, datasets: ModuleType, folder: Path, train: bool) -> Any:
        return getattr(datasets, self.class_name)(folder, train=train, download=False)

    def _arrays(self, dataset: Any) -> tuple[np.ndarray, np.ndarray]:
        return np.ascontiguousarray(dataset.data.transpose(0, 3, 1, 2)), np.array(dataset.targets, dtype=np.int64)

    def _raw_folder(self, root: Path) -> Path:
        # not asked of torchvision, which may be what is missing
        return root / {"CIFAR10": "cifar-10-batches-py", "CIFAR100": "cifar-100-python"}[self.class_name]

    def _obtain(self, order: Order) -> RawFiles:
        """--source is a folder that holds the unpacked archive's folder, or path or address of the archive."""
        no_checksum(order, f"{self.name} is taken from the authors' archive alone, whose checksum is known")
        cifar = getattr(torchvision_datasets(self.name), self.class_name)
        folder = self.resolved_root
        if order.place is not None and not is_url(order.place) and Path(order.place).expanduser().is_dir():
            folder = Path(order.place).expanduser()
        raw = self._raw_folder(folder)
        if folder == self.resolved_root and not raw.is_dir():
            archive = folder / cifar.filename
            digest = f"sha256:{self.archive_sha256}"
            fetch(order.place or cifar.url, archive, digest, offline=order.offline, progress=order.progress)
            order.progress(f"unpacking {archive.name}", 0, None)
            _unpack(archive, raw)
        return RawFiles(folder, tuple(raw / name for name, _ in [*cifar.train_list, *cifar.test_list]))


def _unpack(archive: Path, raw: Path) -> None:
    """The archive's folder, which appears when it is complete."""
    from torchvision.datasets.utils import extract_archive

    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=archive.parent) as scratch:
        extract_archive(str(archive), scratch)
        (Path(scratch) / raw.name).rename(raw)


class Cifar10Source(_Cifar):
    """Configuration of CIFAR-10: 50,000 training and 10,000 test images, 10 classes, 3 x 32 x 32 (Krizhevsky, 2009)."""

    class_name: ClassVar[str] = "CIFAR10"
    archive_sha256: ClassVar[str] = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
    num_classes: ClassVar[int] = 10

    name: Literal["cifar10"] = Field(default="cifar10", description="The images of CIFAR-10.")


class Cifar100Source(_Cifar):
    """Configuration of CIFAR-100: 50,000 training and 10,000 test images, 100 classes, 3 x 32 x 32 (Krizhevsky)."""

    class_name: ClassVar[str] = "CIFAR100"
    archive_sha256: ClassVar[str] = "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"
    num_classes: ClassVar[int] = 100

    name: Literal["cifar100"] = Field(default="cifar100", description="The images of CIFAR-100, with its fine labels.")
