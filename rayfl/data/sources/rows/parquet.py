"""A user's own files of rows: Parquet, CSV or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rayfl.data.sources.columns.files import TableFile, form_of_names
from rayfl.data.sources.columns.layout import AUTO
from rayfl.data.sources.root import data_root
from rayfl.data.sources.rows.column_source import ColumnSource
from rayfl.naming.lists import EACH_ONCE


class ParquetSource(ColumnSource):
    """Configuration of your own Parquet, CSV or JSON files: columns x (image), y (label), client and split.

    With clients they are kept (partition ``natural``), with the source's division into train and test if there is a
    column ``split``; without clients the samples are pooled. Inputs are lists of numbers, several numeric columns whose
    names begin with x, raw bytes of a known ``shape``, or encoded images (PNG, JPEG, WebP). Values of the type uint8
    stand for x / 255; all others are taken as they are. At the first use a copy is made in the data root that is read
    in place; it is made again when a file or an option changes.
    """

    name: Literal["parquet"] = Field(default="parquet", description="Your own Parquet files.")
    path: Path | None = Field(
        default=None,
        description="The file. A relative path that does not exist in the working directory is looked up in the data "
        "root.",
    )
    paths: Annotated[tuple[Path, ...], EACH_ONCE] = Field(
        default=(), description="Several files with the same columns, in place of path."
    )
    split: str = Field(
        default=AUTO, description="Column with train or test; auto: split, if there is one; none: ignore the division."
    )

    @model_validator(mode="after")
    def _one_way(self) -> ParquetSource:
        if (self.path is None) == (not self.paths):
            raise ValueError("give either path, a file, or paths, several files")
        return self

    @property
    def files(self) -> tuple[Path, ...]:
        """The files on this machine."""
        given = self.paths if self.path is None else (self.path,)
        return tuple(located(path.expanduser()) for path in given)

    @property
    def split_column(self) -> str:
        """See the base class."""
        return self.split

    def _choices(self) -> Mapping[str, Any]:
        return {**super()._choices(), **form_of_names(self.files, self.client)}

    def tables(self) -> list[TableFile]:
        """See the base class."""
        return [TableFile(path, self.client) for path in self.files]


def located(path: Path) -> Path:
    """A file on this machine: one that is not in the working directory is looked up in the data root."""
    return path.absolute() if path.exists() else data_root() / path
