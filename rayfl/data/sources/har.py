"""UCI HAR: what 30 people do, told by the sensors of a smartphone at their waist; each person is a client."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from rayfl.data.files.whole import file_digest, locked, new_file
from rayfl.data.sources.columns import Rows
from rayfl.data.sources.copied import CopiedSource
from rayfl.data.sources.download import fetch, is_url
from rayfl.data.sources.leaf.trees import FileTree, open_tree
from rayfl.data.sources.pooled_file import Part
from rayfl.data.sources.preparing import Order, no_checksum
from rayfl.data.sources.remarks import Remark
from rayfl.errors import DataError
from rayfl.examples import InputSpec

_URL = "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip"
_DOWNLOAD, _DOWNLOAD_SHA256 = "har-download.zip", "c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031"
_ARCHIVE, _ARCHIVE_SHA256 = "UCI HAR Dataset.zip", "2045e435c955214b38145fb5fa00776c72814f01b203fec405152dac7d5bfeb0"
"""UCI's download is a zip file that holds the authors' own."""

_FOLDER = "UCI HAR Dataset"
_LARGEST_FILE = 256 << 20
_PARTS = ("train", "test")
_WINDOWS = {"train": 7352, "test": 2947, "both": 10299}
"""How many the official files have."""
_ACTIVITIES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
_SIGNALS = tuple(f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
_SUBJECTS, _STEPS, _FEATURES = 30, 128, 561


class HarSource(CopiedSource):
    """Configuration of UCI HAR (Anguita et al., 2013): 10,299 windows of 2.56 seconds, six activities, 30 people.

    A window is nine signals (acceleration without gravity, angular velocity, acceleration) at 128 times, as images of
    shape (9, 1, 128): a signal is a channel. Or it is the 561 features that the authors computed, each in [-1, 1].

    People are clients. The official parts are divided by people, 21 and 9, so nobody has samples in both: ``part=both``
    pools them, and ``holdout.test`` draws each one's test part. With ``part=train`` the nine others are the official
    test part.
    """

    name: Literal["har"] = Field(default="har", description="Activities of 30 people by a smartphone's sensors.")
    inputs: Literal["signals", "features"] = Field(
        default="signals",
        description="What a sample is: nine signals at 128 times, shape (9, 1, 128); or the authors' 561 features.",
    )
    part: Part = Field(
        default="both",
        description="Whose samples are used: of the 21 people of the official training part, of the 9 of the test "
        "part, or of all 30. Each one's test part is drawn by holdout.test.",
    )

    @property
    def known_spec(self) -> InputSpec:
        """See the base class."""
        shape = (len(_SIGNALS), 1, _STEPS) if self.inputs == "signals" else (_FEATURES,)
        return InputSpec("image", shape, len(_ACTIVITIES))

    @property
    def files(self) -> tuple[Path, ...]:
        """The archive; where it is not there, but the unpacked folder is, the text files that are read."""
        archive, folder = self.resolved_root / _ARCHIVE, self.resolved_root / _FOLDER
        unpacked = tuple(folder / name for part in _PARTS for name in self._names(part))
        return unpacked if not archive.exists() and all(file.is_file() for file in unpacked) else (archive,)

    def prepare(self, order: Order) -> Path:
        """Gets the files, unless they are there, and makes the copy.

        ``--source`` is the folder ``UCI HAR Dataset``, or path or address of a zip file: UCI's, or the one in it.
        """
        folder = None if order.place is None or is_url(order.place) else Path(order.place).expanduser()
        if folder is not None and folder.is_dir():
            no_checksum(order, f"{folder} is a folder")
            self._copy(folder / _FOLDER if (folder / _FOLDER).is_dir() else folder, order)
        elif order.place is None and len(self.files) > 1:
            no_checksum(order, f"{self.resolved_root / _FOLDER} is a folder")
        else:
            self._get(order)
        return super().prepare(replace(order, place=None, sha256=None))

    def _copy(self, folder: Path, order: Order) -> None:
        if (archive := self.resolved_root / _ARCHIVE).exists():
            raise DataError(f"--source: {archive} is there and is what would be read; delete it to use {folder}")
        for part in _PARTS:
            for name in self._names(part):
                path = self.resolved_root / _FOLDER / name
                if order.force:
                    path.unlink(missing_ok=True)
                fetch(str(folder / name), path, offline=order.offline, progress=order.progress)

    def _get(self, order: Order) -> None:
        archive, download = self.resolved_root / _ARCHIVE, self.resolved_root / _DOWNLOAD
        if order.force:
            archive.unlink(missing_ok=True)
        with locked(archive, lambda: order.progress(f"waiting for another process that gets {_ARCHIVE}", 0, None)):
            made = not archive.exists()
            if made:
                digest = order.sha256 or (_DOWNLOAD_SHA256 if order.place is None else None)
                known = None if digest is None else f"sha256:{digest}"
                fetch(order.place or _URL, download, known, offline=order.offline, progress=order.progress)
                _unwrap(download, archive)
            found = file_digest(archive)
            if order.sha256 is None and found != _ARCHIVE_SHA256:
                if made:
                    archive.unlink()
                raise DataError(
                    f"{order.place if made else archive} has the sha256 {found}, but {_ARCHIVE} has {_ARCHIVE_SHA256}: "
                    "it is damaged or another file; get it again, or say with --sha256 that it is meant"
                )

    def _check_there(self) -> None:
        if not self.files[0].is_file():
            raise DataError(
                f"har is not there: neither {self.files[0]} exists, nor all files of {self.resolved_root / _FOLDER}; "
                f"get it with `rayfl data prepare har` (add --source for the folder {_FOLDER} or its zip file), or set "
                "the source's root or RAYFL_DATA to the folder that has it"
            )

    def _names(self, part: str) -> tuple[str, ...]:
        """The files of a part that are read: activities, people, then inputs."""
        names = [f"{part}/y_{part}.txt", f"{part}/subject_{part}.txt"]
        if self.inputs == "features":
            return (*names, f"{part}/X_{part}.txt")
        return (*names, *(f"{part}/Inertial Signals/{signal}_{part}.txt" for signal in _SIGNALS))

    def _choices(self) -> Mapping[str, Any]:
        return self.model_dump(mode="json", exclude={"root"})

    def _num_classes(self, rows: Rows) -> int:
        return len(_ACTIVITIES)

    def _remarks(self, rows: Rows, num_classes: int) -> list[Remark]:
        if len(rows.y) == _WINDOWS[self.part]:
            return []
        return [
            Remark(
                f"the files of har have {len(rows.y)} samples (part={self.part}), but the official ones have "
                f"{_WINDOWS[self.part]}: get them again, if the official ones are meant"
            )
        ]

    def _of_part(self, rows: Rows) -> Rows:
        """The rows of :attr:`part`; the official parts are people, so they say nothing of a client's own parts."""
        return replace(super()._of_part(rows), splits=None)

    def _rows(self) -> Rows:
        files = self.files
        packed = len(files) == 1
        tree = open_tree(files[0] if packed else self.resolved_root / _FOLDER, _LARGEST_FILE)
        found = [self._part_rows(tree, part) for part in _PARTS]
        x, y, people = (np.concatenate(column) for column in zip(*found, strict=True))
        if both := set(found[0][2]) & set(found[1][2]):
            raise DataError(
                f"{tree.root}: the person {min(both)} is in both parts, but the official files divide people; get them "
                "again"
            )
        clients = np.array([f"subject_{person:02d}" for person in people.tolist()], dtype=object)
        splits = np.repeat(np.array(_PARTS, dtype=object), [len(labels) for _, labels, _ in found])
        return Rows(x, y - 1, clients, splits, False, len(_ACTIVITIES), class_names=_ACTIVITIES)

    def _part_rows(self, tree: FileTree, part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs, activities from 1 and people from 1 of an official part."""
        activities, people, *inputs = self._names(part)
        y = _numbers(tree, activities, 1, np.int64, range(1, len(_ACTIVITIES) + 1))[:, 0]
        owners = _numbers(tree, people, 1, np.int64, range(1, _SUBJECTS + 1))[:, 0]
        width = _FEATURES if self.inputs == "features" else _STEPS
        arrays = [_numbers(tree, name, width, np.float32) for name in inputs]
        for name, array in zip((people, *inputs), (owners, *arrays), strict=True):
            if len(array) != len(y):
                raise DataError(
                    f"{tree.place(name)} has {len(array)} rows, but {activities} has {len(y)}; get both again"
                )
        x = arrays[0] if self.inputs == "features" else np.stack(arrays, axis=1)[:, :, np.newaxis]
        return x, y, owners


def _numbers(
    tree: FileTree, name: str, columns: int, kind: type[np.generic], allowed: Sequence[int] = ()
) -> np.ndarray:
    """The numbers of a text file, of shape (rows, columns).

    Raises:
        DataError: there is no such file, or it holds something else.
    """
    # Beside each file, archives made on a Mac have one that is none, in a folder of its own.
    known = [one for one in tree.names if f"/{one}".endswith(f"/{name}") and not one.startswith("__MACOSX/")]
    if not known:
        raise DataError(f"{tree.root} lacks {name}; give the whole folder {_FOLDER}, or its zip file, with --source")
    place, content = tree.place(known[0]), tree.read(known[0])
    if not content.strip():
        raise DataError(f"{place} is empty; get it again")
    try:
        found: np.ndarray = np.loadtxt(io.BytesIO(content), dtype=kind, ndmin=2)
    except ValueError as error:
        raise DataError(f"{place}: {error}; get it again") from error
    if found.shape[1] != columns:
        raise DataError(f"{place} has {found.shape[1]} numbers a row, not {columns}; get it again")
    wrong = ~np.isin(found, list(allowed)) if allowed else ~np.isfinite(found)
    if wrong.any():
        row, column = (int(axis[0]) for axis in np.nonzero(wrong))
        must = f"must be from {allowed[0]} to {allowed[-1]}" if allowed else "must be finite"
        raise DataError(f"{place}, row {row}: the value {found[row, column]:g} {must}; get the file again")
    return found


def _unwrap(download: Path, archive: Path) -> None:
    """Makes the authors' archive of a file that is it, or that holds it; the file is gone then."""
    try:
        with zipfile.ZipFile(download) as packed:
            inside = _ARCHIVE in packed.namelist()
            if inside:
                with packed.open(_ARCHIVE) as member, new_file(archive) as file:
                    shutil.copyfileobj(member, file)
    except (OSError, zipfile.BadZipFile) as error:
        download.unlink()
        raise DataError(f"{download} is not a readable zip file: {error}; get it again") from error
    if inside:
        download.unlink()
    else:
        os.replace(download, archive)
