"""The clients in a file of TensorFlow Federated, one client at a time: HDF5, or the SQLite of its ``SqlClientData``."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rayfl.data.sources.tff.examples import reader
from rayfl.errors import DataError

_GROUP = "examples"
Columns = Mapping[str, Sequence[Any]]
"""By column, a value for each sample of a client."""


class ClientFile(ABC):
    """One part (train, test, held out) of a data set.

    Attributes:
        path: the file.
        sizes: by client, its number of samples.
    """

    path: Path
    sizes: Mapping[str, int]

    @abstractmethod
    def client(self, name: str) -> Columns:
        """The columns of a client.

        Raises:
            DataError: they cannot be read; names file, client and column.
        """


class Hdf5File(ClientFile):
    """Groups ``examples/<client>/<column>``; a column's first axis is the samples.

    Raises:
        DataError: no such file, or another one.
    """

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        try:
            h5py = import_module("h5py")
        except ImportError:
            raise DataError(f"{path} needs the package h5py: pip install 'rayfl[tff]'") from None
        self.path, self._columns = path, columns
        try:
            file = h5py.File(path, "r")
        except OSError as error:
            raise DataError(f"{path} is not a readable HDF5 file: {error}; unpack TFF's archive again") from error
        if _GROUP not in file:
            raise DataError(f"{path} has no group {_GROUP!r}, but {', '.join(file) or 'nothing'}; give TFF's own file")
        self._clients = file[_GROUP]
        self.sizes = {name: self._size(name) for name in self._clients}

    def client(self, name: str) -> Columns:
        """See the base class."""
        try:
            return {column: self._clients[name][column][()] for column in self._columns}
        except OSError as error:
            raise DataError(f"{self.path}, client {name!r}: {error}; unpack TFF's archive again") from error

    def _size(self, name: str) -> int:
        lengths = {}
        for column in self._columns:
            if column not in self._clients[name]:
                has = ", ".join(self._clients[name])
                raise DataError(f"{self.path}, client {name!r}: there is no column {column!r}, but {has}")
            lengths[column] = int(self._clients[name][column].shape[0])
        if len(set(lengths.values())) > 1:
            raise DataError(f"{self.path}, client {name!r}: the columns differ in length: {lengths}")
        return lengths[self._columns[0]]


class SqliteFile(ClientFile):
    """Tables ``client_metadata`` and ``examples``, whose rows are serialized ``tf.train.Example``.

    Args:
        path: the file.
        columns: those to read.
        split: the value of ``split_name``.

    Raises:
        DataError: no such file, another one, or no client of the split.
    """

    def __init__(self, path: Path, columns: tuple[str, ...], split: str) -> None:
        self.path, self._split, self._reader = path, split, reader(columns)
        try:
            self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
            rows = self._connection.execute(
                "SELECT client_id, num_examples FROM client_metadata WHERE split_name = ?", (split,)
            ).fetchall()
            known = [name for (name,) in self._connection.execute("SELECT DISTINCT split_name FROM client_metadata")]
        except sqlite3.Error as error:
            raise DataError(f"{path} is not an SQLite file of TFF: {error}; unpack it (unlzma) again") from error
        if not rows:
            raise DataError(f"{path} has no client of the split {split!r}, but splits {', '.join(map(repr, known))}")
        self.sizes = {str(name): int(count) for name, count in rows}

    def client(self, name: str) -> Columns:
        """See the base class."""
        where = f"{self.path}, client {name!r}"
        try:
            rows = self._connection.execute(
                "SELECT serialized_example_proto FROM examples WHERE client_id = ? AND split_name = ? ORDER BY rowid",
                (name, self._split),
            ).fetchall()
            found = [self._reader(serialized) for (serialized,) in rows]
        except sqlite3.Error as error:
            raise DataError(f"{where}: {error}; unpack the file (unlzma) again") from error
        except KeyError as error:
            raise DataError(f"{where}: there is no column {error}; give the file of this data set") from error
        except ValueError as error:
            raise DataError(f"{where}: {error}; unpack the file (unlzma) again") from error
        if len(found) != self.sizes[name]:
            raise DataError(f"{where}: {len(found)} examples, but client_metadata says {self.sizes[name]}")
        return {column: [one[column] for one in found] for column in found[0]} if found else {}
