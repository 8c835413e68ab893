"""EMNIST: handwritten letters and digits."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
from pydantic import Field

from rayfl.data.sources.images.vision import TorchvisionSource, torchvision_datasets, unpack
from rayfl.data.sources.preparation.download import fetch, is_url
from rayfl.data.sources.preparation.preparing import Order, RawFiles, no_checksum
from rayfl.errors import DataError
from rayfl.examples import InputSpec

_CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}


class EmnistSource(TorchvisionSource):
    """Configuration of EMNIST: digits and letters of NIST's Special Database 19, 28 x 28 (Cohen et al., 2017).

    Labels are the official ones (byclass: 0-9, A-Z, a-z), but those of ``letters`` count from 0. Images are turned
    upright: the official files hold them transposed.
    """

    name: Literal["emnist"] = Field(default="emnist", description="The letters and digits of EMNIST.")
    split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"] = Field(
        default="byclass", description="Which of EMNIST's six data sets: its own choice of classes and samples."
    )

    @property
    def _stem(self) -> str:
        return f"emnist-{self.split}"

    @property
    def _spec(self) -> InputSpec:
        return InputSpec("image", (1, 28, 28), _CLASSES[self.split])

    def _choices(self) -> Mapping[str, str]:
        return {"name": self.name, "split": self.split}

    def _dataset(self, datasets: ModuleType, folder: Path, train: bool) -> Any:
        return datasets.EMNIST(folder, split=self.split, train=train, download=False)

    def _arrays(self, dataset: Any) -> tuple[np.ndarray, np.ndarray]:
        upright = dataset.data.unsqueeze(1).transpose(2, 3).contiguous().numpy()
        labels = dataset.targets.numpy()
        return upright, labels - 1 if self.split == "letters" else labels

    def _raw_folder(self, root: Path) -> Path:
        return root / "EMNIST" / "raw"

    def _obtain(self, order: Order) -> RawFiles:
        """--source is a folder that holds EMNIST/raw, or path or address of ``gzip.zip``."""
        emnist = torchvision_datasets(self.name).EMNIST
        names = [
            f"emnist-{self.split}-{part}-{content}-ubyte"
            for part in ("train", "test")
            for content in ("images-idx3", "labels-idx1")
        ]
        if order.place is not None and not is_url(order.place):
            folder = Path(order.place).expanduser()
            if self._raw_folder(folder).is_dir():
                no_checksum(order, f"{self._raw_folder(folder)} has the unpacked files")
                return RawFiles(folder, tuple(self._raw_folder(folder) / name for name in names))
        raw = self._raw_folder(self.resolved_root)
        archive = raw / "gzip.zip"
        files = tuple(raw / name for name in names)
        unpacked = all(file.exists() for file in files)
        if unpacked and not archive.exists():
            no_checksum(order, f"{raw} has the unpacked files")
            return RawFiles(self.resolved_root, files)
        digest = f"md5:{emnist.md5}" if order.sha256 is None else f"sha256:{order.sha256}"
        fetch(order.place or emnist.url, archive, digest, offline=order.offline, progress=order.progress)
        if not unpacked:
            _extract(archive, raw, names)
        return RawFiles(self.resolved_root, (*files, archive))


def _extract(archive: Path, raw: Path, names: list[str]) -> None:
    try:
        with zipfile.ZipFile(archive) as packed:
            for name in names:
                with packed.open(f"gzip/{name}.gz") as member, gzip.open(member) as content:
                    unpack(content, raw / name)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError(f"{archive} is not EMNIST's archive: {error}; delete it and try again") from error
