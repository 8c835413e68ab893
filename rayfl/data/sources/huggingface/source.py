"""Data sets of Hugging Face that lie in a folder."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rayfl.data.sources.columns.layout import AUTO, NONE
from rayfl.data.sources.columns.reading import Rows
from rayfl.data.sources.huggingface.columns import SPLIT_COLUMN, SplitTable, check_same_classes
from rayfl.data.sources.huggingface.files import Split, data_files, library, splits_of
from rayfl.data.sources.preparation.preparing import Order
from rayfl.data.sources.remarks import Remark
from rayfl.data.sources.root import data_root
from rayfl.data.sources.rows.column_source import ColumnSource
from rayfl.errors import DataError
from rayfl.naming.lists import EACH_ONCE

_LABELS = ("y", "label")


class HuggingFaceSource(ColumnSource):
    """Configuration of a data set of Hugging Face: a folder that `save_to_disk` wrote, a cache, or Parquet files.

    Columns are chosen as in ``parquet``. Features that are taken: numbers, text, ClassLabel (classes where they are
    learned, else categories or clients by name), Image, lists of numbers or of tokens, lists of ClassLabel (several
    labels), and arrays. Nothing is downloaded but by `rayfl data prepare`.
    """

    ignoring_splits: ClassVar[str] = "both splits in dataset.train"

    name: Literal["huggingface"] = Field(
        default="huggingface", description="A data set of Hugging Face in a folder (needs the extra hf)."
    )
    path: Path = Field(
        description="The folder. A relative path that does not exist in the working directory is looked up in the data "
        "root."
    )
    train: Annotated[str | tuple[str, ...], EACH_ONCE] = Field(
        default=AUTO, description="The split whose rows train, or several; auto: train, or the only one there is."
    )
    test: Annotated[str | tuple[str, ...], EACH_ONCE] = Field(
        default=AUTO, description="The split that tests, or several; auto: test, if there is one; none: no split does."
    )

    @property
    def folder(self) -> Path:
        """The folder on this machine."""
        path = self.path.expanduser()
        return path.absolute() if path.exists() else data_root() / path

    @property
    def files(self) -> tuple[Path, ...]:
        """See the base class."""
        return tuple(data_files(self.folder))

    @property
    def split_column(self) -> str:
        """See the base class."""
        return SPLIT_COLUMN if self._parts(splits_of(self.folder))["test"] else NONE

    def tables(self) -> Sequence[SplitTable]:
        """See the base class."""
        found = splits_of(self.folder)
        parts = self._parts(found)
        given = (self.y,) if isinstance(self.y, str) else self.y
        client = "client" if self.client == AUTO else self.client
        learned = _LABELS if self.y == AUTO else given
        check_same_classes([found[name] for names in parts.values() for name in names], learned)
        return [
            SplitTable(found[name], learned, part if parts["test"] else None, client)
            for part, names in parts.items()
            for name in names
        ]

    def prepare(self, order: Order) -> Path:
        """Makes the copy; with ``--source`` gets the data set of that name from the Hub first, and saves it."""
        if order.place is not None:
            self._fetch(order, order.place)
        return super().prepare(replace(order, place=None))

    def _remarks(self, rows: Rows, num_classes: int) -> list[Remark]:
        found = splits_of(self.folder)
        left = sorted(found.keys() - {name for names in self._parts(found).values() for name in names})
        if not left:
            return super()._remarks(rows, num_classes)
        text = (
            f"of {self.folder} the splits {', '.join(left)} are left out: name them with dataset.train or dataset.test "
            "to use them"
        )
        return [Remark(text), *super()._remarks(rows, num_classes)]

    def _parts(self, found: dict[str, Split]) -> dict[str, tuple[str, ...]]:
        """The splits that train and those that test.

        Raises:
            DataError: a split is not there, or both train and test are to have it.
        """
        shown = ", ".join(found)
        if self.train != AUTO:
            train = (self.train,) if isinstance(self.train, str) else self.train
        elif "train" in found or len(found) == 1:
            train = ("train",) if "train" in found else tuple(found)
        else:
            raise DataError(
                f"dataset.train: {self.folder} has no split train, only {shown}: name the split that trains"
            )
        if self.test == AUTO:
            test: tuple[str, ...] = ("test",) if "test" in found and "test" not in train else ()
        else:
            test = (self.test,) if isinstance(self.test, str) else self.test
            test = () if test == (NONE,) else test
        for field, names in (("train", train), ("test", test)):
            if missing := [name for name in names if name not in found]:
                raise DataError(f"dataset.{field}: {self.folder} has no split {missing[0]!r}, only {shown}")
        if both := sorted(set(train) & set(test)):
            raise DataError(f"dataset.train and dataset.test both name the split {both[0]!r}: name it once")
        return {"train": train, "test": test}

    def _fetch(self, order: Order, place: str) -> None:
        """Saves a data set of the Hub as :attr:`folder`, which appears when it is complete."""
        folder = self.path.expanduser().absolute()
        if folder.exists():
            raise DataError(f"{folder} exists already: leave out --source to prepare it, or move it away")
        if order.offline:
            raise DataError(f"{folder} does not exist, and with --offline nothing is downloaded: leave one of both out")
        datasets = library(f"--source {place}")
        name, _, choice = (place, "", "") if Path(place).exists() else place.partition(":")
        order.progress(f"getting {place}", 0, None)
        try:
            found = datasets.load_dataset(name, choice or None)
        except Exception as error:  # the library, and those under it, raise many kinds
            raise DataError(
                f"--source {place}: {type(error).__name__}: {str(error).strip()}; needed is NAME or NAME:CONFIGURATION "
                "of a data set of the Hub"
            ) from error
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder.parent) as scratch:
            found.save_to_disk(str(Path(scratch) / "saved"))
            (Path(scratch) / "saved").rename(folder)
