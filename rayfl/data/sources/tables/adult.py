"""Adult of the UCI repository: people of the United States' census of 1994, and whether they earn more than 50,000."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from rayfl.data.files.content import checksum
from rayfl.data.sources.base import Samples
from rayfl.data.sources.preparation.download import fetch, is_url
from rayfl.data.sources.preparation.preparing import Order, PreparableSource, no_checksum
from rayfl.data.tables import Standardize, TableColumns, TableOptions
from rayfl.errors import DataError
from rayfl.examples import InputSpec
from rayfl.randomness import RandomStreams

_URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult"
_FILES = ("adult.data", "adult.test")
_FIELDS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship", "race",
    "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income",
)  # fmt: skip
_NUMBERS = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")
_CATEGORIES = (
    "workclass",
    "education",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "native-country",
)
_LABELS = {"<=50K": 0, ">50K": 1}
_MISSING = "?"


class AdultSource(PreparableSource):
    """Configuration of Adult (census income): people with numbers and categories, and whether they earn over 50,000.

    Both files are read, adult.data and adult.test, and divided by a partition (FairFed: ``dirichlet`` with
    ``by="group"``). People of whom something is missing are left out, which leaves 45,222 of 48,842. The weight of the
    census (fnlwgt) is no input. Kohavi, KDD 1996.
    """

    name: Literal["adult"] = Field(default="adult", description="UCI's Adult, incomes of people with sex and race.")
    group: Literal["sex", "race"] = Field(default="sex", description="Groups of people: by sex, or by race.")
    group_input: bool = Field(default=True, description="Whether models see the column of the groups.")
    standardize: Standardize = Field(
        default="global",
        description="Numbers get mean 0 and standard deviation 1 by the training samples of all clients (global), or "
        "of each client's own (client); none: as they are.",
    )

    @property
    def folder(self) -> Path:
        """Returns where the two files lie."""
        return self.resolved_root / "adult"

    def prepare(self, order: Order) -> Path:
        """Gets the two files; --source is a folder or an address that has them."""
        no_checksum(order, "Adult has two files, of which no checksums are published")
        place = _URL if order.place is None else order.place.rstrip("/")
        for name in _FILES:
            file = self.folder / name
            if order.force:
                file.unlink(missing_ok=True)
            source = f"{place}/{name}" if is_url(place) else str(Path(place).expanduser() / name)
            fetch(source, file, offline=order.offline, progress=order.progress)
        self.open()
        return self.folder

    def open(self, streams: RandomStreams | None = None) -> Samples:
        """All people: x float32 of shape (N, D + 1), y int64 of shape (N,), 1 for more than 50,000."""
        rows = np.array([row for name in _FILES for row in self._rows(self.folder / name)])
        fields = dict(zip(_FIELDS, rows.T, strict=True))
        parts, titles, sizes = [fields[name].astype(np.float32)[:, np.newaxis] for name in _NUMBERS], [*_NUMBERS], []
        for name in _CATEGORIES:
            if name == self.group and not self.group_input:
                continue
            values = np.unique(fields[name])
            parts.append((fields[name][:, np.newaxis] == values).astype(np.float32))
            titles += [f"{name}={value}" for value in values]
            sizes.append(len(values))
        people, group = np.unique(fields[self.group], return_inverse=True)
        x = np.concatenate([*parts, group[:, np.newaxis].astype(np.float32)], axis=1)
        y = np.array([_LABELS[label] for label in fields["income"]], dtype=np.int64)
        columns = TableColumns(
            tuple(titles), tuple(range(len(_NUMBERS), len(titles))), groups=tuple(sizes), people=tuple(map(str, people))
        )
        table = TableOptions(columns, self.standardize)
        spec = InputSpec("image", (x.shape[1],), 2)
        return Samples(x, y, spec, table=table, content=partial(checksum, x, y, None))

    def _rows(self, path: Path) -> list[list[str]]:
        """The people of a file of whom nothing is missing, by field.

        Raises:
            DataError: naming file and line.
        """
        rows = []
        try:
            with path.open(newline="") as file:
                for line, fields in enumerate(csv.reader(file, skipinitialspace=True), start=1):
                    if not fields or fields[0].startswith("|"):  # the first line of adult.test says what it is
                        continue
                    found = [field.strip() for field in fields]
                    if len(found) != len(_FIELDS):
                        raise DataError(f"{path}, line {line}: {len(found)} fields, not {len(_FIELDS)}; get it again")
                    found[-1] = found[-1].rstrip(".")  # as adult.test writes labels
                    if found[-1] not in _LABELS:
                        raise DataError(f"{path}, line {line}: the income is {found[-1]!r}, not <=50K or >50K")
                    if _MISSING not in found:
                        for name in _NUMBERS:
                            float(found[_FIELDS.index(name)])
                        rows.append(found)
        except ValueError as error:
            raise DataError(f"{path}, line {line}: {error}; get the file again") from error
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}; get it with `rayfl data prepare {self.name}` (add --source "
                "for files you have), or set the source's root or RAYFL_DATA to the folder that has it"
            ) from error
        if not rows:
            raise DataError(f"{path} has nobody of whom nothing is missing; get the file again")
        return rows
