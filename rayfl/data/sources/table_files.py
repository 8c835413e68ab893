"""A user's own files of rows and named columns: Parquet or CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from rayfl.errors import DataError

_CSV = (".csv", ".tsv")


class NamedTable(Protocol):
    """Rows with named columns.

    Attributes:
        path: where they are, for messages.
        schema: the columns.
        classes: by column, how many classes it is known to tell apart.
        shapes: by column of lists, the shape that these lists have.
    """

    @property
    def path(self) -> Path: ...
    @property
    def schema(self) -> pa.Schema: ...
    @property
    def classes(self) -> Mapping[str, int]: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, names: Sequence[str]) -> pa.Table:
        """Some columns of all rows.

        Raises:
            DataError: they cannot be read.
        """
        ...


class TableFile:
    """An open file; a CSV file is read as a whole, its types found from its values.

    Args:
        path: a file whose name ends in .csv or .tsv (commas, tabs; a header with the columns' names), or Parquet.

    Raises:
        DataError: no such file, or one that cannot be read.
    """

    classes: Mapping[str, int] = {}
    shapes: Mapping[str, tuple[int, ...]] = {}

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(f"dataset.path: {path} does not exist")
        self.path = path
        kind = "CSV" if path.suffix.lower() in _CSV else "Parquet"
        try:
            if kind == "CSV":
                self._table: pa.Table | None = _read_csv(path)
                self.schema: pa.Schema = self._table.schema
            else:
                self._table, self._file = None, pq.ParquetFile(path)
                self.schema = self._file.schema_arrow
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"dataset.path: {path} is not a readable {kind} file: {str(error).strip()}") from error

    def read(self, names: Sequence[str]) -> pa.Table:
        """See :class:`NamedTable`."""
        try:
            return self._file.read(columns=list(names)) if self._table is None else self._table.select(list(names))
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self.path} cannot be read: {str(error).strip()}") from error


def _read_csv(path: Path) -> pa.Table:
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    return pa.csv.read_csv(
        path,
        parse_options=pa.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=False),
    )


def owner(table: pa.Table, client: str | None, row: int) -> str:
    """Returns whose a row is, for messages; nothing where there are no clients."""
    return "" if client is None else f" (client {table.column(client)[row].as_py()!r})"
