"""Heart Disease of the UCI repository: patients of four hospitals, each a client, as FLamby prepares them."""

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

_URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease"
_HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
_FIELDS = 14
_NUMBERS = {0: "age", 1: "sex", 3: "trestbps", 4: "chol", 5: "fbs", 7: "thalach", 8: "exang", 9: "oldpeak"}
_CATEGORIES = {2: ("cp", (2, 3, 4)), 6: ("restecg", (1, 2))}
"""By field, its name and the values that get a column; the first value is all zeros."""

_MISSING = "?"


class HeartDiseaseSource(PreparableSource):
    """Configuration of Heart Disease: patients of four hospitals with 13 numbers each, ill or not (Janosi, 1988).

    As in FLamby (Ogier du Terrail et al., 2022): the fields slope, ca and thal are left out, and so are patients with
    a missing value in another field, which leaves 740. Chest pain (cp) and electrocardiogram (restecg) are categories.
    The hospitals are clients; FLamby takes 66 % of each one's patients for training, which ``holdout.test=0.34`` draws.
    """

    name: Literal["heart_disease"] = Field(default="heart_disease", description="UCI's Heart Disease, by hospital.")
    standardize: Standardize = Field(
        default="global",
        description="Numbers get mean 0 and standard deviation 1 by the training samples of all clients (global), or "
        "of each client's own (client); none: as they are.",
    )

    @property
    def folder(self) -> Path:
        """Returns where the four files lie."""
        return self.resolved_root / "heart_disease"

    def prepare(self, order: Order) -> Path:
        """Gets the four files; --source is a folder or an address that has them."""
        no_checksum(order, "Heart Disease has four files, of which no checksums are published")
        if order.force:
            for hospital in _HOSPITALS:
                self._file(hospital).unlink(missing_ok=True)
        place = _URL if order.place is None else order.place.rstrip("/")
        for hospital in _HOSPITALS:
            file = self._file(hospital)
            source = f"{place}/{file.name}" if is_url(place) else str(Path(place).expanduser() / file.name)
            fetch(source, file, offline=order.offline, progress=order.progress)
        self.open()
        return self.folder

    def open(self, streams: RandomStreams | None = None) -> Samples:
        """All patients: x float32 of shape (740, 13), y int64 of shape (740,), 1 where there is a disease."""
        rows = {hospital: self._rows(hospital) for hospital in _HOSPITALS}
        x = np.array([row[:-1] for found in rows.values() for row in found], dtype=np.float32)
        y = np.array([row[-1] for found in rows.values() for row in found], dtype=np.int64)
        clients = np.array([hospital for hospital, found in rows.items() for _ in found])
        names = [*_NUMBERS.values(), *(f"{name}={value}" for name, values in _CATEGORIES.values() for value in values)]
        columns = TableColumns(tuple(names), categories=tuple(range(len(_NUMBERS), len(names))))
        spec = InputSpec("image", (len(names),), 2)
        table = TableOptions(columns, self.standardize)
        return Samples(x, y, spec, clients, table=table, content=partial(checksum, x, y, clients))

    def _file(self, hospital: str) -> Path:
        return self.folder / f"processed.{hospital}.data"

    def _rows(self, hospital: str) -> list[list[float]]:
        """The patients of a hospital, without those of whom something is missing; the last number is the label."""
        path, rows = self._file(hospital), []
        try:
            with path.open(newline="") as file:
                for line, fields in enumerate(csv.reader(file), start=1):
                    if not fields:
                        continue
                    if len(fields) != _FIELDS:
                        raise DataError(f"{path}, line {line}: {len(fields)} fields, not {_FIELDS}; get the file again")
                    wanted = [fields[place].strip() for place in (*_NUMBERS, *_CATEGORIES, _FIELDS - 1)]
                    if _MISSING not in wanted:
                        rows.append(_row([float(value) for value in wanted]))
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}; get it with `rayfl data prepare {self.name}` (add --source "
                "for files you have), or set the source's root or RAYFL_DATA to the folder that has it"
            ) from error
        except ValueError as error:
            raise DataError(f"{path}, line {line}: {error}; get the file again") from error
        if not rows:
            raise DataError(f"{path} has no patient without missing values; get the file again")
        return rows


def _row(values: list[float]) -> list[float]:
    """Numbers, a 0 or 1 for each value of a category, and the label."""
    numbers, categories, label = values[: len(_NUMBERS)], values[len(_NUMBERS) : -1], values[-1]
    coded = [
        float(value == one) for value, (_, known) in zip(categories, _CATEGORIES.values(), strict=True) for one in known
    ]
    return [*numbers, *coded, float(label > 0)]
