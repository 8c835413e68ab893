"""A table of files of one array each: scans with masks or classes, or other inputs, by hospital."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from rayfl.data.sources.base import LABELS, Labels
from rayfl.data.sources.columns.files import TableFile, form_of_names, no_column, owner
from rayfl.data.sources.columns.inputs import refuse_nulls
from rayfl.data.sources.columns.layout import AUTO
from rayfl.data.sources.columns.reading import Rows, client_names, split_names
from rayfl.data.sources.columns.targets import read_targets, target_columns
from rayfl.data.sources.preparation.preparing import PREPARED
from rayfl.data.sources.remarks import Remark, remarks_on
from rayfl.data.sources.rows.array_files import Fit, fitted, read_input, read_mask, scaled
from rayfl.data.sources.rows.copied import CopiedSource
from rayfl.data.sources.rows.parquet import located
from rayfl.data.sources.targets import IGNORE, WANTED, check_counted, mask_classes, no_pairs, ranked, without
from rayfl.data.sources.targets import Wanted as TargetOption
from rayfl.errors import DataError
from rayfl.examples import Target
from rayfl.metrics.language import IGNORED
from rayfl.naming.lists import EACH_ONCE

_CLASSES = ("class", "mask")


class ArraysSource(CopiedSource):
    """Configuration of your own files of one array each, .npy or NIfTI (.nii, .nii.gz), which a table names.

    A row of the table (CSV, TSV, JSON or Parquet) is a sample: columns with the path of its input (relative to the
    table's folder), the path of its mask or another target, and its client and split, if there are such. Masks are of
    the shape of their inputs without channels. At the first use all files are read, one by one, and copied to the data
    root; the copy is made again when a file or an option changes.
    """

    name: Literal["arrays"] = Field(default="arrays", description="Your own files of one array each.")
    path: Path = Field(
        description="The table. A relative path that does not exist in the working directory is looked up in the data "
        "root."
    )
    x: str = Field(default="image", description="Column of the paths of the inputs.")
    y: Annotated[str | tuple[str, ...], EACH_ONCE] = Field(
        default=AUTO,
        description="Column of the paths of masks, or of other targets: classes, integers from 0; of several labels "
        "and of numbers also several columns; of survival the time and the event (1 or 0); auto: y or label (or mask).",
    )
    client: str = Field(
        default=AUTO, description="Column of the clients' names; auto: client, if there is one; none: pool the samples."
    )
    split: str = Field(
        default=AUTO, description="Column with train or test; auto: split, if there is one; none: ignore the division."
    )
    target: TargetOption = Field(default="auto", description=WANTED)
    shape: tuple[int, ...] | None = Field(
        default=None, description="Sides that inputs and masks are brought to, without channels; null: they have one."
    )
    fit: Fit = Field(
        default="none",
        description="How arrays get the shape: none, they have it; crop cuts out the middle, or fills up around it; "
        "resize interpolates.",
    )
    scale: Literal["none", "sample"] | tuple[float, float] = Field(
        default="none",
        description="What becomes of an input's values: none; sample: mean 0 and standard deviation 1 of its own; "
        "[low, high]: they are cut off there, and these become 0 and 1 (Hounsfield units).",
    )
    ignore: int | None = Field(default=None, ge=0, description=IGNORE)
    labels: Labels = Field(default="as_found", description=LABELS)
    num_classes: int | None = Field(
        default=None, ge=1, description="Number of classes; null: the largest class plus 1."
    )

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.shape is not None and (not self.shape or min(self.shape) < 1):
            raise ValueError("shape must be a list of numbers of at least 1")
        if self.fit != "none" and self.shape is None:
            raise ValueError(f"fit={self.fit} needs shape: set that, or leave fit out")
        if isinstance(self.scale, tuple) and not self.scale[0] < self.scale[1]:
            raise ValueError("scale: the first of two values must be the smaller one")
        if self.target == "tokens":
            raise ValueError("target=tokens is for texts: leave it out")
        return self

    def aimed_at(self, target: Target) -> Self:
        """See the base class; raises DataError for options and tasks that do not go together."""
        no_pairs(target)
        found = self.model_copy(update={"target": target}) if self.target == "auto" else self
        if found._learns == "tokens":
            raise DataError("dataset: arrays have no next tokens; set another task, or choose other data")
        if found.ignore is not None and found._learns != "mask":
            raise DataError("dataset.ignore is for masks, and there are none: leave it out")
        if found._learns not in _CLASSES:
            for option in ("labels", "num_classes"):
                if getattr(found, option) != type(self).model_fields[option].default:
                    raise DataError(f"dataset.{option} is for classes, and there are none: leave it out")
        return found

    @property
    def files(self) -> tuple[Path, ...]:
        """The table; the files that it names are many, and only their sizes and times are known of."""
        return (located(self.path.expanduser()),)

    @property
    def _learns(self) -> Target:
        return "class" if self.target == "auto" else self.target

    def _choices(self) -> Mapping[str, Any]:
        table, columns = self._opened()
        named = [path for column in columns for path in self._paths(table, column)]
        try:
            stats = [path.stat() for path in named]
        except OSError as error:
            raise DataError(f"{self.files[0]}: {error.filename} cannot be read: {error.strerror}") from error
        return {
            **self.model_dump(mode="json", exclude={"root", "path"}),
            **form_of_names(self.files, self.client),
            "files": [(str(path), s.st_size, s.st_mtime_ns) for path, s in zip(named, stats, strict=True)],
        }

    def _rows(self) -> Rows:
        table, columns = self._opened()
        path, client = self.files[0], self._column(table, self.client, "client")
        filled = [(path, table)]
        clients, splits = client_names(filled, client), split_names(filled, self._column(table, self.split, "split"))
        x, masks = self._read(table, columns, client)
        again = self.labels == "renumbered"
        if masks is not None:
            present = mask_classes(masks, f"{path}: column {columns[1]!r}")
            if again:
                for place, mask in enumerate(masks):
                    masks[place] = ranked(mask, present)
            return Rows(x, masks, clients, splits, integers=False, num_labels=len(present))
        names = target_columns(path, table.schema, self.y, self._learns)
        y = read_targets(path, table, names, self._learns, client, again)
        if self._learns != "class":
            return Rows(x, y, clients, splits, integers=False, num_labels=0)
        present, numbers = np.unique(y, return_inverse=True)
        return Rows(x, numbers.astype(np.int64) if again else y, clients, splits, False, len(present))

    def _remarks(self, rows: Rows, num_classes: int) -> list[Remark]:
        if self._learns not in _CLASSES:
            return []
        return remarks_on(rows.x, rows.y, num_classes, self.num_classes is None, integers=False)

    def _num_classes(self, rows: Rows) -> int:
        if self._learns not in _CLASSES:
            return 0
        needed = rows.num_labels if self.labels == "renumbered" else max(int(rows.y.max()), 0) + 1
        if self.num_classes is not None and needed > self.num_classes:
            raise DataError(
                f"dataset.num_classes is {self.num_classes}, but the targets need {needed}: raise it, or set "
                "dataset.labels=renumbered, or dataset.ignore for pixels that do not count"
            )
        counted = self.num_classes is None and self.labels == "as_found"
        if counted and self._learns == "class" and rows.clients is None:
            check_counted(rows.y, str(self.files[0]))
        return self.num_classes or needed

    def _opened(self) -> tuple[pa.Table, tuple[str, ...]]:
        """The table, and its columns of paths."""
        file = TableFile(self.files[0], self.client)
        if self.x not in file.schema.names:
            raise no_column("x", file.path, self.x, file.schema)
        table = file.read(file.schema.names)
        if not table.num_rows:
            raise DataError(f"{file.path}: no rows")
        if self._learns != "mask":
            return table, (self.x,)
        return table, (self.x, *target_columns(file.path, file.schema, self.y, "mask"))

    def _column(self, table: pa.Table, wanted: str, default: str) -> str | None:
        if wanted == "none" or (wanted == AUTO and default not in table.schema.names):
            return None
        name = default if wanted == AUTO else wanted
        if name not in table.schema.names:
            raise no_column(default, self.files[0], name, table.schema, ", or none")
        return name

    def _paths(self, table: pa.Table, name: str) -> list[Path]:
        path, client = self.files[0], self._column(table, self.client, "client")
        if not (pa.types.is_string(table.schema.field(name).type) or pa.types.is_large_string(table.column(name).type)):
            raise DataError(
                f"{path}: column {name!r} has the type {table.column(name).type}; needed are paths of files"
            )
        refuse_nulls(path, table, name, client)
        return [path.parent / Path(one).expanduser() for one in table.column(name).to_pylist()]

    def _read(
        self, table: pa.Table, columns: tuple[str, ...], client: str | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """All inputs, and their masks, if there are masks; one after the other, on the disk."""
        found: list[np.ndarray] = []
        for row, files in enumerate(zip(*(self._paths(table, name) for name in columns), strict=True)):
            try:
                arrays = self._sample(*files, like=[array[0] for array in found])
            except DataError as error:
                raise DataError(f"{self.files[0]}, row {row}{owner(table, client, row)}: {error}") from error
            found = found or [self._room(array, table.num_rows) for array in arrays]
            for whole, array in zip(found, arrays, strict=True):
                whole[row] = array
        return found[0], found[1] if len(found) > 1 else None

    def _sample(self, file: Path, mask_file: Path | None = None, *, like: list[np.ndarray]) -> list[np.ndarray]:
        """An input and, if it has one, its mask.

        Args:
            file: of the input.
            mask_file: of the mask.
            like: those of the first row; empty for this one.
        """
        mask = None if mask_file is None else without(read_mask(mask_file), self.ignore)
        x = read_input(file, None if mask is None else mask.ndim)
        if mask is not None and x.shape[1:] != mask.shape:
            raise DataError(f"{mask_file} has the shape {mask.shape}, but {file}, whose mask it is, {x.shape[1:]}")
        first = like[0] if like else x
        sides = self.shape or (first.shape if mask is None else first.shape[1:])
        x = scaled(fitted(x, sides, self.fit, None, file), self.scale)
        if like and (x.shape != first.shape or x.dtype != first.dtype):
            raise DataError(
                f"{file} has the shape {x.shape} and the type {x.dtype}, but that of the first row has {first.shape} "
                f"and {first.dtype}: bring all to one number of channels and one type"
            )
        return [x] if mask is None else [x, fitted(mask, sides, self.fit, IGNORED, file)]

    def _room(self, array: np.ndarray, count: int) -> np.ndarray:
        """Room for arrays of one shape, in a file that goes with them."""
        with tempfile.TemporaryFile(dir=self.resolved_root / PREPARED) as file:
            return np.memmap(file, array.dtype, "w+", shape=(count, *array.shape))
