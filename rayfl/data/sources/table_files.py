"""A user's own files of rows and named columns: Parquet, CSV or JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from rayfl.errors import DataError
from rayfl.naming.plain_json import read_json
from rayfl.naming.spelling import nearest


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
    """An open file; CSV and JSON are read as a whole, their types found from their values.

    Args:
        path: a file whose name ends in .csv or .tsv (commas, tabs; a header with the columns' names), in .json (a list
            of objects) or .jsonl (an object a line), or Parquet. A field that an object lacks is null.
        client: the column of the clients' names, which are as a CSV file has them: 007 and 7 are two, and so are 1.1
            and 1.10; ``auto``: client.

    Raises:
        DataError: no such file, one that cannot be read, or one with two columns of a name.
    """

    classes: Mapping[str, int] = {}
    shapes: Mapping[str, tuple[int, ...]] = {}

    def __init__(self, path: Path, client: str) -> None:
        if path.is_dir():
            raise DataError(f"dataset.path: {path} is a folder: name its files with dataset.paths=[FILE, FILE, ...]")
        if not path.is_file():
            raise DataError(f"dataset.path: {path} does not exist")
        if path.suffix.lower() in _PACKED:
            raise DataError(f"dataset.path: {path} is compressed: unpack it, and give the file that is in it")
        self.path = path
        kind, read = _READERS.get(path.suffix.lower(), ("Parquet", None))
        try:
            if read is not None:
                self._table: pa.Table | None = read(path, "client" if client == "auto" else client)
                self.schema: pa.Schema = self._table.schema
            else:
                self._table, self._file = None, pq.ParquetFile(path)
                self.schema = self._file.schema_arrow
        except (OSError, ValueError, pa.ArrowException) as error:
            other = read is None and path.suffix.lower() != ".parquet"
            why = f", which it is read as because its name ends in none of {', '.join(_READERS)}" if other else ""
            raise DataError(f"dataset.path: {path} is not a readable {kind} file{why}: {str(error).strip()}") from error
        names = self.schema.names
        if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
            raise DataError(f"dataset.path: {path} has several columns called {twice!r}: rename or remove one of them")

    def read(self, names: Sequence[str]) -> pa.Table:
        """See :class:`NamedTable`."""
        try:
            return self._file.read(columns=list(names)) if self._table is None else self._table.select(list(names))
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self.path} cannot be read: {str(error).strip()}") from error


def _read_csv(path: Path, client: str) -> pa.Table:
    separator = "\t" if path.suffix.lower() == ".tsv" else ","

    def read(**options: Any) -> pa.Table:
        return pa.csv.read_csv(
            path,
            parse_options=pa.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            convert_options=pa.csv.ConvertOptions(
                strings_can_be_null=True, quoted_strings_can_be_null=False, **options
            ),
        )

    table = read()
    place = table.schema.get_field_index(client)
    if place < 0 or table.schema.types[place] in (pa.string(), pa.null()):
        return table
    names = read(include_columns=[client], column_types={client: pa.string()}).column(client)
    return table.set_column(place, client, pc.utf8_trim_whitespace(names))  # as it is done to numbers


def form_of_names(files: Sequence[Path], client: str) -> dict[str, str]:
    """Returns what tells copies of files from those of older releases, in which names that are numbers were one.

    Args:
        files: that are copied.
        client: the column of the clients' names, or ``none``.
    """
    written = client != "none" and any(_READERS.get(path.suffix.lower(), ("",))[0] == "CSV" for path in files)
    return {"names": "as written"} if written else {}


def _read_json(path: Path, client: str) -> pa.Table:
    content = read_json(path.read_text(encoding="utf-8-sig"))
    if not isinstance(content, list):
        raise ValueError("needed is a list of objects, one a row")
    return _of_objects(content)


def _read_lines(path: Path, client: str) -> pa.Table:
    lines = path.read_text(encoding="utf-8-sig").split("\n")  # strings may have other ends of lines, such as U+2028
    return _of_objects([read_json(line) for line in lines if line.strip()])


def _of_objects(rows: list[Any]) -> pa.Table:
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is no object with a value for each column")
    names = dict.fromkeys(key for row in rows for key in row)
    return pa.table({name: _column(name, [row.get(name) for row in rows]) for name in names})


def _column(name: str, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except OverflowError as error:
        raise ValueError(
            f"column {name!r} has an integer of more than 64 bits: write names as text, and numbers with a point"
        ) from error
    except pa.ArrowException as error:
        raise ValueError(f"column {name!r}: {error}") from error


_READERS: dict[str, tuple[str, Callable[[Path, str], pa.Table]]] = {
    ".csv": ("CSV", _read_csv),
    ".tsv": ("CSV", _read_csv),
    ".json": ("JSON", _read_json),
    ".jsonl": ("JSON", _read_lines),
}
"""By the ending of a file's name, what it is, and what reads all of it; others are Parquet."""

_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")


def no_column(field: str, path: Path, name: str, schema: pa.Schema, otherwise: str = "") -> DataError:
    """The error of an option that names a column which a file does not have.

    Args:
        field: the option, such as ``x``, ``y`` or ``client``.
        path: the file.
        name: the column.
        schema: the file's columns.
        otherwise: what else the option may be, if anything.
    """
    names = ", ".join(schema.names)
    return DataError(
        f"dataset.{field}: {path} has no column {name!r}{nearest(name, schema.names)}, only {names}; name one of "
        f"them{otherwise}"
    )


def owner(table: pa.Table, client: str | None, row: int) -> str:
    """Returns whose a row is, for messages; nothing where there are no clients."""
    return "" if client is None else f" (client {table.column(client)[row].as_py()!r})"
