"""Data sets that are folders of images, one for each class and, where there are some, for each domain."""

from __future__ import annotations

import re
import tarfile
import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.data.images.images import decode_images
from rayfl.data.sources.preparation.download import Progress, fetch, is_url, silent
from rayfl.data.sources.preparation.preparing import ImageSource, Order, PartRows, RawFiles, no_checksum
from rayfl.data.sources.preparation.trees import FileTree, open_tree
from rayfl.errors import DataError
from rayfl.examples import InputSpec

_LARGEST_IMAGE = 64 << 20


class ImageFolders(ImageSource):
    """What data sets of image folders share: an order of the samples by domain, class and file, and how it is read.

    Class attributes:
        layout: matches a file's path; groups ``label``, and ``domain`` or ``part`` where there are such.
        folder: what the files lie in, inside a data root.
        archive: the file's address, where there is one that anybody may read.
        class_folders: the folders' names of the classes, in the order of their numbers; empty where the files tell.
    """

    reads_directly: ClassVar[bool] = False
    layout: ClassVar[re.Pattern[str]]
    folder: ClassVar[str]
    archive: ClassVar[str | None] = None
    class_folders: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def _side(self) -> int:
        """Height and width to which images are brought."""

    @property
    def _spec(self) -> InputSpec:
        return InputSpec("image", (3, self._side, self._side), len(self.class_folders))

    def _obtain(self, order: Order) -> RawFiles:
        """--source is a folder or a zip file of the images, or path or address of the archive."""
        own = self.resolved_root / self.folder
        if order.place is not None and not is_url(order.place):
            place = Path(order.place).expanduser()
            if place.is_dir() or place.suffix == ".zip":
                no_checksum(order, f"{place} is read in place")
                return RawFiles(place, () if place.is_dir() else (place,))
        elif order.place is None and own.is_dir():
            no_checksum(order, f"{own} is a folder")
            return RawFiles(own, ())
        address = order.place or self.archive
        if address is None:
            raise DataError(
                f"{self.name}: its files have no address that anybody may read; get them from their authors "
                "(docs/data.md) and give the folder with --source"
            )
        archive = self.resolved_root / f"{self.folder}.tar.gz"
        digest = None if order.sha256 is None else f"sha256:{order.sha256}"
        fetch(address, archive, digest, offline=order.offline, progress=order.progress)
        order.progress(f"unpacking {archive.name}", 0, None)
        _unpack(archive, own)
        return RawFiles(own, (archive,))

    def _read(self, folder: Path, part: str, progress: Progress = silent) -> tuple[np.ndarray, np.ndarray]:
        rows = self._rows(folder, part, progress)
        return rows.x, rows.y

    def _rows(self, folder: Path, part: str, progress: Progress) -> PartRows:
        tree = open_tree(folder, _LARGEST_IMAGE)
        number = {label: position for position, label in enumerate(self._labels(tree))}
        found = [(domain, label, name) for domain, label, name in self._files(tree, part) if label in number]
        found.sort(key=lambda row: (row[0], number[row[1]], row[2]))
        if missing := sorted(set(number) - {label for _, label, _ in found}):
            raise DataError(
                f"{tree.root} has no {part} image of the class {missing[0]!r}; give the folder that holds the files of "
                f"{self.name} as their authors packed them, with --source"
            )
        x = decode_images(
            len(found),
            lambda position: tree.read(found[position][2]),
            lambda position: tree.place(found[position][2]),
            lambda done: progress(f"decoding the {part} images", done, len(found)),
            self._side,
        )
        if x.shape[1] == 1:
            x = np.repeat(x, 3, axis=1)
        domains = [domain for domain, _, _ in found]
        counts = {domain: domains.count(domain) for domain in dict.fromkeys(domains) if domain}
        return PartRows(x, np.array([number[label] for _, label, _ in found], dtype=np.int64), counts)

    def _labels(self, tree: FileTree) -> Sequence[str]:
        """The classes whose images are read, in the order of their numbers."""
        return self.class_folders

    def _files(self, tree: FileTree, part: str) -> list[tuple[str, str, str]]:
        """Domain (empty without), class and name of a part's files."""
        found = []
        for name in tree.names:
            if match := self.layout.search(name):
                groups = match.groupdict()
                if self._part_of(groups) == part:
                    found.append((groups.get("domain") or "", groups["label"], name))
        return found

    def _part_of(self, groups: Mapping[str, str]) -> str:
        """The official part that a file is of."""
        return groups.get("part", "train")


class Cinic10Source(ImageFolders):
    """Configuration of CINIC-10: 90,000 images each for training, validation and test, 10 classes, 3 x 32 x 32.

    CIFAR-10's images and reduced ones of ImageNet (Darlow et al., 2018). Classes are numbered as in CIFAR-10.
    """

    layout: ClassVar[re.Pattern[str]] = re.compile(r"(?:^|/)(?P<part>train|valid|test)/(?P<label>[a-z]+)/[^/]+\.png$")
    folder: ClassVar[str] = "CINIC-10"
    archive: ClassVar[str | None] = "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz"
    class_folders: ClassVar[tuple[str, ...]] = (
        *("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    )

    name: Literal["cinic10"] = Field(default="cinic10", description="The images of CINIC-10.")
    validation: Literal["leave_out", "train"] = Field(
        default="leave_out",
        description="What becomes of the official validation images; train: they are training images.",
    )

    @property
    def _side(self) -> int:
        return 32

    @property
    def _stem(self) -> str:
        return self.name if self.validation == "leave_out" else f"{self.name}-180000"

    def _choices(self) -> Mapping[str, str]:
        return {"name": self.name, "validation": self.validation}

    def _part_of(self, groups: Mapping[str, str]) -> str:
        part = groups["part"]
        return "train" if part == "valid" and self.validation == "train" else part


class OfficeCaltechSource(ImageFolders):
    """Configuration of Office-Caltech10: 2,533 photographs of ten things from four domains (Gong et al., 2012).

    The domains are amazon, caltech, dslr and webcam. There is no official test part.
    """

    layout: ClassVar[re.Pattern[str]] = re.compile(
        r"(?:^|/)(?P<domain>amazon|caltech|dslr|webcam)/(?:images/)?(?P<label>[a-z_]+)/[^/]+\.(?:jpg|png)$"
    )
    folder: ClassVar[str] = "office_caltech_10"
    class_folders: ClassVar[tuple[str, ...]] = (
        *("back_pack", "bike", "calculator", "headphones", "keyboard", "laptop_computer", "monitor", "mouse", "mug"),
        "projector",
    )

    name: Literal["office_caltech"] = Field(
        default="office_caltech", description="The photographs of Office-Caltech10."
    )
    side: int = Field(default=256, ge=8, le=1024, description="Height and width in pixels that images are brought to.")

    @property
    def parts(self) -> tuple[str, ...]:
        """See the base class."""
        return ("train",)

    @property
    def _side(self) -> int:
        return self.side

    @property
    def _stem(self) -> str:
        return f"{self.name}-{self.side}"

    def _choices(self) -> Mapping[str, str]:
        return {"name": self.name, "side": str(self.side)}


class DomainNetSource(ImageFolders):
    """Configuration of DomainNet: things in six styles, with official training and test lists (Peng et al., 2019).

    The domains are clipart, infograph, painting, quickdraw, real and sketch. ``classes="ten"`` takes the ten of FedBN's
    experiments (Li et al., 2021); all 345 fit into memory for small sides only.
    """

    layout: ClassVar[re.Pattern[str]] = re.compile(
        r"(?:^|/)(?P<file>(?P<domain>clipart|infograph|painting|quickdraw|real|sketch)/(?P<label>[^/]+)/[^/]+\.(?:jpg|png))$"
    )
    folder: ClassVar[str] = "DomainNet"

    name: Literal["domainnet"] = Field(default="domainnet", description="The images of DomainNet.")
    classes: Literal["ten", "all"] = Field(
        default="ten", description="The ten classes of FedBN's experiments, or all 345."
    )
    side: int = Field(default=256, ge=8, le=1024, description="Height and width in pixels that images are brought to.")

    @property
    def _spec(self) -> InputSpec:
        return InputSpec("image", (3, self.side, self.side), 10 if self.classes == "ten" else 345)

    def _labels(self, tree: FileTree) -> Sequence[str]:
        if self.classes == "ten":
            return _TEN_OF_DOMAINNET
        found = sorted({label for part in self.parts for _, label, _ in self._files(tree, part)})
        if len(found) != self._spec.num_classes:
            raise DataError(
                f"{tree.root} has images of {len(found)} classes, not 345; give the folder of all six domains"
            )
        return found

    def _files(self, tree: FileTree, part: str) -> list[tuple[str, str, str]]:
        listed = set()
        lists = [name for name in tree.names if name.endswith(f"_{part}.txt")]
        for name in lists:
            listed |= {line.split()[0] for line in tree.read(name).decode().splitlines() if line.strip()}
        if not lists:
            raise DataError(
                f"{tree.root} lacks DomainNet's lists <domain>_{part}.txt; put them beside the domains' folders"
            )
        found, present = [], set()
        for name in tree.names:
            if (match := self.layout.search(name)) and match["file"] in listed:
                present.add(match["file"])
                found.append((match["domain"], match["label"], name))
        if missing := sorted(listed - present):
            raise DataError(
                f"{tree.root} lacks the image {missing[0]} of its lists, one of {len(missing)}; unpack them all"
            )
        return found

    @property
    def _side(self) -> int:
        return self.side

    @property
    def _stem(self) -> str:
        return f"{self.name}-{self.classes}-{self.side}"

    def _choices(self) -> Mapping[str, str]:
        return {"name": self.name, "classes": self.classes, "side": str(self.side)}


_TEN_OF_DOMAINNET = (
    *("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra"),
)


def _unpack(archive: Path, folder: Path) -> None:
    """The archive's files, in a folder that appears when it is complete."""
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=archive.parent) as scratch:
        inside = Path(scratch) / "files"
        try:
            with tarfile.open(archive) as packed:
                packed.extractall(inside, filter="data")
        except (OSError, tarfile.TarError) as error:
            raise DataError(f"{archive} cannot be unpacked: {error}; delete it and try again") from error
        inside.rename(folder)
