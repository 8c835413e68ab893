"""A user's own folder of images: a folder for each class, and for domains, clients or splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rayfl.data.images.images import count_turned, decode_images
from rayfl.data.sources.columns.reading import Rows
from rayfl.data.sources.preparation.preparing import PREPARED
from rayfl.data.sources.remarks import Remark, remarks_on
from rayfl.data.sources.root import nor_here
from rayfl.data.sources.rows.copied import CopiedSource
from rayfl.data.sources.rows.parquet import located
from rayfl.data.sources.split_names import SPLIT_NAMES
from rayfl.errors import DataError

Level = Literal["class", "domain", "client", "split", "any"]

_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


@dataclass(frozen=True, slots=True)
class _Image:
    """A file, and what its folders are called, by level."""

    path: Path
    folders: Mapping[str, str]


class ImageFolderSource(CopiedSource):
    """Configuration of your own folder of images, with a folder for each class (and domain, client or split).

    ``levels`` says what the folders are, from the outermost to the one of the files. Classes are numbered in the order
    of their names, over all domains, clients and splits. At the first use a copy is made in the data root that is read
    in place; it is made again when a file or an option changes.
    """

    ignoring_splits: ClassVar[str] = "any in place of split in dataset.levels"

    name: Literal["image_folder"] = Field(default="image_folder", description="Your own folder of images.")
    path: Path = Field(
        description="The folder. A relative path that does not exist in the working directory is looked up in the data "
        "root."
    )
    levels: tuple[Level, ...] = Field(
        default=("class",),
        description="What the folders are, from the outermost to the one of the files: class, domain, client, split "
        "(train, test; validation is left out), or any, which says nothing.",
    )
    side: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Height and width in pixels that images are brought to; null: they have one size.",
    )
    validation: Literal["leave_out", "train"] = Field(
        default="leave_out",
        description="What becomes of the images of a split validation; train: they are training images.",
    )

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        for level in ("class", "domain", "client", "split"):
            if self.levels.count(level) > 1:
                raise ValueError(f"levels names {level} twice: folders that say nothing are called any")
        if "class" not in self.levels:
            raise ValueError("levels must name class, the folders that say what an image shows")
        if "domain" in self.levels and "client" in self.levels:
            raise ValueError("levels names client and domain, but clients have no domains: call one of them any")
        for option, default in (("validation", "leave_out"), ("part", "both")):
            if getattr(self, option) != default and "split" not in self.levels:
                raise ValueError(f"{option} is for folders of splits: name split in levels, or leave it out")
        return self

    @property
    def files(self) -> tuple[Path, ...]:
        """The folder; its files are many, and of them only sizes and times are known."""
        return (located(self.path.expanduser()),)

    @property
    def on_record(self) -> tuple[Path, ...]:
        """See the base class."""
        return ()

    def _check_there(self) -> None:
        folder = self.files[0]
        if not folder.is_dir():
            what = "is no folder" if folder.exists() else f"does not exist{nor_here(folder)}"
            raise DataError(f"dataset.path: {folder} {what}; give the folder in which the images' folders are")

    def _choices(self) -> Mapping[str, Any]:
        self._check_there()
        stats = [(image.path, image.path.stat()) for image in self._images()]
        return {
            **self.model_dump(mode="json", exclude={"root", "path"}),
            "files": [(str(path), found.st_size, found.st_mtime_ns) for path, found in stats],
        }

    def _rows(self) -> Rows:
        left: list[Path] = []
        images = [image for image in self._images(left) if self._split(image) != "validation"]
        folder = self.files[0]
        if not images:
            raise DataError(f"dataset.path: {folder} has no images ({', '.join(_IMAGES)}) of which samples are made")
        images.sort(key=lambda image: [image.folders.get(level, "") for level in ("domain", "class")])
        x = decode_images(
            len(images),
            lambda row: images[row].path.read_bytes(),
            lambda row: str(images[row].path),
            side=self.side,
            remedy=", or set dataset.side=224 (pixels)",
        )
        classes = sorted({image.folders["class"] for image in images})
        number = {label: place for place, label in enumerate(classes)}
        return Rows(
            x,
            np.array([number[image.folders["class"]] for image in images], dtype=np.int64),
            self._column("client", images),
            None if "split" not in self.levels else np.array([self._split(image) for image in images]),
            integers=False,
            num_labels=len(classes),
            class_names=tuple(classes),
            domains=self._column("domain", images),
            notes=tuple(self._notes(images, left, classes)),
        )

    def _remarks(self, rows: Rows, num_classes: int) -> list[Remark]:
        return [*map(Remark, rows.notes), *remarks_on(rows.x, rows.y, num_classes, counted=False, integers=False)]

    def _num_classes(self, rows: Rows) -> int:
        return rows.num_labels

    def _column(self, level: str, images: list[_Image]) -> np.ndarray | None:
        """Each image's folder of a level; None where there is no such level."""
        return np.array([image.folders[level] for image in images]) if level in self.levels else None

    def _split(self, image: _Image) -> str:
        """``train``, ``test`` or ``validation``."""
        if "split" not in self.levels:
            return "train"
        folder = image.folders["split"]
        split = SPLIT_NAMES.get(folder.lower())
        if split is None:
            raise DataError(
                f"{image.path}: the folder {folder!r} is no split, which are called {', '.join(SPLIT_NAMES)}: rename "
                "it, or say with dataset.levels what the folders are"
            )
        return "train" if split == "validation" and self.validation == "train" else split

    def _notes(self, images: list[_Image], left: list[Path], classes: list[str]) -> Iterator[str]:
        if left:
            yield f"{len(left)} files are no images and left out, {left[0]} first"
        if empty := sorted(self._empty_classes(set(classes))):
            yield (
                f"{len(empty)} classes have folders without an image ({', '.join(empty[:8])}) and are left out: the "
                "others are numbered without them"
            )
        alike = Counter(label.casefold() for label in classes)
        if doubtful := [label for label in classes if alike[label.casefold()] > 1]:
            yield f"the classes {', '.join(doubtful[:8])} differ by capital letters only: rename folders of one class"
        if turned := count_turned(image.path.read_bytes() for image in images):
            yield (
                f"{turned} of {len(images)} images say in their EXIF data that they are to be turned or mirrored, and "
                "are read as they are stored: to have them upright, save them again after Pillow's "
                "ImageOps.exif_transpose"
            )

    def _empty_classes(self, found: set[str]) -> set[str]:
        """The folders of classes that have no image anywhere."""
        depth = self.levels.index("class") + 1
        folders = {path.name for path in self.files[0].glob("/".join("*" * depth)) if path.is_dir()}
        return {name for name in folders - found if not name.startswith(".") and name != PREPARED}

    def _images(self, left: list[Path] | None = None) -> list[_Image]:
        """All images, sorted by their paths; links are followed, and hidden files are none.

        Args:
            left: is given the files that are no images.

        Raises:
            DataError: an image lies above or below the folders that ``levels`` names.
        """
        root, found = self.files[0], []
        for path, folders in _below(root, self.resolved_root / PREPARED):
            if path.suffix.lower() not in _IMAGES:
                if left is not None:
                    left.append(path)
                continue
            if len(folders) != len(self.levels):
                raise DataError(
                    f"{path} lies in {_folders(len(folders))} below {root}, but dataset.levels names "
                    f"{_folders(len(self.levels))} ({', '.join(self.levels)}): say what each of them is, such as "
                    "[domain, class], or [any, class] for one that says nothing"
                )
            found.append(_Image(path, dict(zip(self.levels, folders, strict=True))))
        return found


def _below(folder: Path, left_out: Path, above: tuple[str, ...] = ()) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """The files in a folder and in those in it but one, by name, each with the folders it lies in."""
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror}; check that it may be read") from error
    for entry in entries:
        if entry.name.startswith(".") or entry == left_out:
            continue
        if entry.is_dir():
            yield from _below(entry, left_out, (*above, entry.name))
        else:
            yield entry, above


def _folders(count: int) -> str:
    return "1 folder" if count == 1 else f"{count} folders"
