"""How one of LEAF's data sets becomes arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rayfl.data.sources.natural import NaturalHeader
from rayfl.errors import DataError

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Part:
    """One user's samples of one split: ``x`` (n, values) and ``y`` (n,).

    What a codec makes first may still be numbers of its own (places in a list of words or files);
    :meth:`Codec.stored` turns them into what the file holds.
    """

    x: np.ndarray
    y: np.ndarray


class Codec(ABC):
    """Checks JSON values and makes arrays of them: :meth:`part` for everything, then the other methods."""

    @abstractmethod
    def part(self, x: list[object], y: list[object], split: Split, where: str) -> Part:
        """The samples of one user and split.

        Args:
            x: the user's inputs.
            y: the user's labels, as many as inputs.
            split: the part of the data set they are in.
            where: the file and the user, for errors.

        Raises:
            DataError: a value that this data set cannot have.
        """

    @abstractmethod
    def header(self, parts: Iterable[Part]) -> NaturalHeader:
        """Returns what the file's metadata say, given all parts."""

    def stored(self, part: Part, header: NaturalHeader) -> Part:
        """A part as the file holds it; here: as it is."""
        return part

    def metadata(self) -> Mapping[bytes, bytes]:
        """More metadata for the file, such as a vocabulary; here: none."""
        return {}


def malformed(where: str, problem: str) -> DataError:
    """The error of JSON that LEAF would not have written."""
    return DataError(f"{where}: {problem}; correct the file or make it again with LEAF's preprocess.sh")


def labels(y: list[object], num_classes: int, where: str, floats: bool = False) -> np.ndarray:
    """Class labels, int16 of shape (n,).

    Args:
        y: integers from 0 to ``num_classes - 1``.
        num_classes: number of classes.
        where: the file and the user, for errors.
        floats: whether whole floats such as 1.0 are labels too, as Python 3 made LEAF write them.

    Raises:
        DataError: another value; names its place.
    """
    for sample, label in enumerate(y):
        # A bool is an int to Python, but no label.
        whole = type(label) is int or (floats and isinstance(label, float) and label.is_integer())
        if not whole or not 0 <= label < num_classes:  # type: ignore[operator]
            raise malformed(where, f"y[{sample}] is {label!r}, not an integer from 0 to {num_classes - 1}")
    return np.array(y, dtype=np.int16)
