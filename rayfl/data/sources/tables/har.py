"""UCI HAR: what 30 people do, told by the sensors of a smartphone at their waist; each person is a client."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.data.sources.columns.reading import Rows
from rayfl.data.sources.preparation.pooled_file import Part
from rayfl.data.sources.preparation.trees import FileTree
from rayfl.data.sources.remarks import Remark
from rayfl.data.sources.rows.archived import ArchivedSource
from rayfl.errors import DataError
from rayfl.examples import InputSpec

_PARTS = ("train", "test")
_WINDOWS = {"train": 7352, "test": 2947, "both": 10299}
"""How many the official files have."""
_ACTIVITIES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
_SIGNALS = tuple(f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
_SUBJECTS, _STEPS, _FEATURES = 30, 128, 561


class HarSource(ArchivedSource):
    """Configuration of UCI HAR (Anguita et al., 2013): 10,299 windows of 2.56 seconds, six activities, 30 people.

    A window is nine signals (acceleration without gravity, angular velocity, acceleration) at 128 times, as images of
    shape (9, 1, 128): a signal is a channel. Or it is the 561 features that the authors computed, each in [-1, 1].

    People are clients. The official parts are divided by people, 21 and 9, so nobody has samples in both: ``part=both``
    pools them, and ``holdout.test`` draws each one's test part. With ``part=train`` the nine others are the official
    test part.
    """

    url: ClassVar[str] = (
        "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip"
    )
    archive: ClassVar[str] = "UCI HAR Dataset.zip"
    folder: ClassVar[str] = "UCI HAR Dataset"
    download_sha256: ClassVar[str | None] = "c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031"
    archive_sha256: ClassVar[str | None] = "2045e435c955214b38145fb5fa00776c72814f01b203fec405152dac7d5bfeb0"

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

    def _members(self) -> tuple[str, ...]:
        return tuple(name for part in _PARTS for name in self._names(part))

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
        tree = self._tree()
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
        y = self._numbers(tree, activities, 1, np.int64, range(1, len(_ACTIVITIES) + 1))[:, 0]
        owners = self._numbers(tree, people, 1, np.int64, range(1, _SUBJECTS + 1))[:, 0]
        width = _FEATURES if self.inputs == "features" else _STEPS
        arrays = [self._numbers(tree, name, width, np.float32) for name in inputs]
        for name, array in zip((people, *inputs), (owners, *arrays), strict=True):
            if len(array) != len(y):
                raise DataError(
                    f"{tree.place(name)} has {len(array)} rows, but {activities} has {len(y)}; get both again"
                )
        x = arrays[0] if self.inputs == "features" else np.stack(arrays, axis=1)[:, :, np.newaxis]
        return x, y, owners

    def _numbers(
        self, tree: FileTree, name: str, columns: int, kind: type[np.generic], allowed: Sequence[int] = ()
    ) -> np.ndarray:
        """The numbers of a text file, of shape (rows, columns).

        Raises:
            DataError: there is no such file, or it holds something else.
        """
        place, content = self._content(tree, name)
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
