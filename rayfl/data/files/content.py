"""A checksum of samples that does not depend on the file that holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import numpy as np


class ContentHash:
    """SHA-256 over inputs, labels and, where there are any, clients and splits, row after row in any portions."""

    def __init__(self) -> None:
        self._columns = {name: hashlib.sha256() for name in ("x", "y", "owner")}

    def update(self, x: np.ndarray, y: np.ndarray, owners: Iterable[str] = ()) -> ContentHash:
        """Adds rows.

        Args:
            x: inputs, uint8 or float32 of shape (n, ...).
            y: targets of shape (n, ...), integers or float32.
            owners: names that belong to the rows, such as each row's client and split.
        """
        self._columns["x"].update(_bytes(x, x.dtype.newbyteorder("<")))
        self._columns["y"].update(_bytes(y, np.dtype("<f4" if y.dtype.kind == "f" else "<i8")))
        self._columns["owner"].update("".join(f"{name}\0" for name in owners).encode())
        return self

    def hexdigest(self) -> str:
        """The checksum of all rows so far."""
        return hashlib.sha256(b"".join(column.digest() for column in self._columns.values())).hexdigest()


Content = Callable[[], str | None]
"""Gives the checksum of samples, which may have to be computed; None where it is not known."""


def checksum(x: np.ndarray, y: np.ndarray, owners: np.ndarray | None) -> str:
    """The checksum of samples in arrays; see :meth:`ContentHash.update`."""
    return ContentHash().update(x, y, () if owners is None else map(str, owners)).hexdigest()


def unknown() -> None:
    """The :data:`Content` of samples that have no checksum."""


def _bytes(values: np.ndarray, dtype: np.dtype) -> memoryview:
    return np.ascontiguousarray(values, dtype=dtype).reshape(-1).view(np.uint8).data
