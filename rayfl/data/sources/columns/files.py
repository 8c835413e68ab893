"""A user's own files of rows and named columns: Parquet, CSV or JSON."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

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


Decimal = Literal[".", ","]


@dataclass(frozen=True)
class Dialect:
    """How a CSV file is written.

    Attributes:
        separator: what is between columns, one character; None: a tab in .tsv, else the only one of comma, semicolon
            and tab that the header has outside of quotes, or a comma.
        decimal: the sign before decimals.
    """

    separator: str | None = None
    decimal: Decimal = "."


class TableFile:
    """An open file; CSV and JSON are read as a whole, their types found from their values.

    Args:
        path: a file whose name ends in .csv, .txt or .tsv (CSV: a header with the columns' names), in .json (a list of
            objects) or .jsonl (an object a line), or Parquet. A field that an object lacks is null.
        client: the column of the clients' names, which are as a CSV file has them: 007 and 7 are two, and so are 1.1
            and 1.10; ``auto``: client.
        texts: further columns that are as a CSV file has them.
        dialect: how it is written, if it is CSV; None: as by default, and no user can say otherwise.

    Attributes:
        kind: CSV, JSON or Parquet.

    Raises:
        DataError: no such file, one that cannot be read, or one with two columns of a name.
    """

    classes: Mapping[str, int] = {}
    shapes: Mapping[str, tuple[int, ...]] = {}

    def __init__(
        self, path: Path, client: str | None, texts: Sequence[str] = (), dialect: Dialect | None = None
    ) -> None:
        if path.is_dir():
            raise DataError(f"dataset.path: {path} is a folder: name its files with dataset.paths=[FILE, FILE, ...]")
        if not path.is_file():
            raise DataError(f"dataset.path: {path} does not exist")
        if path.suffix.lower() in _PACKED:
            raise DataError(f"dataset.path: {path} is compressed: unpack it, and give the file that is in it")
        self.path = path
        self.kind, read = _READERS.get(path.suffix.lower(), ("Parquet", None))
        if self.kind != "CSV" and dialect not in (None, Dialect()):
            raise DataError(
                f"dataset.separator and dataset.decimal are for CSV, and {path} is read as {self.kind}: leave them out"
            )
        self._dialect = dialect
        try:
            if read is not None:
                names = texts if client is None else (*texts, "client" if client == "auto" else client)
                self._table: pa.Table | None = read(path, names, dialect or Dialect())
                self.schema: pa.Schema = self._table.schema
            else:
                self._table, self._file = None, pq.ParquetFile(path)
                self.schema = self._file.schema_arrow
        except (OSError, ValueError, pa.ArrowException) as error:
            other = read is None and path.suffix.lower() != ".parquet"
            why = f", which it is read as because its name ends in none of {', '.join(_READERS)}" if other else ""
            hint = "" if isinstance(error, OSError) else self.other_separator
            raise DataError(
                f"dataset.path: {path} is not a readable {self.kind} file{why}: {str(error).strip()}{hint}"
            ) from error
        names = self.schema.names
        if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
            raise DataError(f"dataset.path: {path} has several columns called {twice!r}: rename or remove one of them")

    def read(self, names: Sequence[str]) -> pa.Table:
        """See :class:`NamedTable`."""
        try:
            return self._file.read(columns=list(names)) if self._table is None else self._table.select(list(names))
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self.path} cannot be read: {str(error).strip()}") from error

    def place(self, row: int) -> str:
        """Returns where a row is, for messages: in CSV its line, which blank lines and texts of several lines shift."""
        if self.kind == "CSV":
            with self.path.open(encoding="utf-8-sig", newline="") as file:
                lines = csv.reader(file, delimiter=self._separators[0])
                before = 0
                try:
                    for fields in lines:
                        row -= bool(fields)
                        if row < -1:
                            return f"line {before + 1}"
                        before = lines.line_num
                except csv.Error:  # a field of more than 128 KiB
                    pass
        return f"row {row}"

    @property
    def other_separator(self) -> str:
        """Returns for messages which other separator may be meant; empty where only one is in the header."""
        if self.kind != "CSV" or self._dialect is None or len(self._separators) < 2:
            return ""
        one, *others = map(repr, self._separators)
        return f", or set dataset.separator, which is taken to be {one}, if it is {' or '.join(others)}"

    @cached_property
    def _separators(self) -> list[str]:
        return _separators_of(self.path, self._dialect or Dialect())


def _separators_of(path: Path, dialect: Dialect) -> list[str]:
    """Returns what may be between a CSV file's columns; the first one is taken."""
    if dialect.separator is not None:
        return [dialect.separator]
    if path.suffix.lower() == ".tsv":
        return ["\t"]
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        header = _QUOTED.sub("", file.readline())
    return [one for one in _SEPARATORS if one in header] or [","]


_SEPARATORS = (",", ";", "\t")
_QUOTED = re.compile(r'"[^"]*"')


def _read_csv(path: Path, texts: Sequence[str], dialect: Dialect) -> pa.Table:
    separator = _separators_of(path, dialect)[0]

    def read(threads: bool = True, **options: Any) -> pa.Table:
        return pa.csv.read_csv(
            path,
            read_options=pa.csv.ReadOptions(use_threads=threads),
            parse_options=pa.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            convert_options=pa.csv.ConvertOptions(
                strings_can_be_null=True, quoted_strings_can_be_null=False, decimal_point=dialect.decimal, **options
            ),
        )

    try:
        table = read()
    except pa.ArrowInvalid:
        table = read(threads=False)  # whose error says in which row
    for name in texts:
        place = table.schema.get_field_index(name)
        if place < 0 or table.schema.types[place] in (pa.string(), pa.null()):
            continue
        column = read(include_columns=[name], column_types={name: pa.string()}).column(name)
        table = table.set_column(place, name, pc.utf8_trim_whitespace(column))  # as it is done to numbers
    return table


def form_of_names(files: Sequence[Path], client: str) -> dict[str, str]:
    """Returns what tells copies of files from those of older releases, in which names that are numbers were one.

    Args:
        files: that are copied.
        client: the column of the clients' names, or ``none``.
    """
    written = client != "none" and any(_READERS.get(path.suffix.lower(), ("",))[0] == "CSV" for path in files)
    return {"names": "as written"} if written else {}


def _read_json(path: Path, texts: Sequence[str], dialect: Dialect) -> pa.Table:
    content = read_json(path.read_text(encoding="utf-8-sig"))
    if not isinstance(content, list):
        raise ValueError("needed is a list of objects, one a row")
    return _of_objects(content)


def _read_lines(path: Path, texts: Sequence[str], dialect: Dialect) -> pa.Table:
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


_READERS: dict[str, tuple[str, Callable[[Path, Sequence[str], Dialect], pa.Table]]] = {
    ".csv": ("CSV", _read_csv),
    ".txt": ("CSV", _read_csv),
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
