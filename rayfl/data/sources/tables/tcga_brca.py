"""Fed-TCGA-BRCA: patients with breast cancer from six regions, each a client, in the form of FLamby."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv
from pydantic import Field

from rayfl.data.sources.columns.reading import Rows
from rayfl.data.sources.columns.tables import read_table
from rayfl.data.sources.columns.targets import read_targets
from rayfl.data.sources.preparation.download import fetch, is_url
from rayfl.data.sources.preparation.preparing import Order, no_checksum
from rayfl.data.sources.remarks import Remark
from rayfl.data.sources.rows.copied import CopiedSource
from rayfl.data.tables import Standardize, TableColumns, TableOptions
from rayfl.errors import DataError
from rayfl.examples import Target

_ADDRESS = "https://raw.githubusercontent.com/owkin/FLamby/main/flamby/datasets/fed_tcga_brca"
_FOLDER, _PATIENTS, _SPLIT = "fed_tcga_brca", "brca.csv", "dataset_creation_scripts/train_test_split.csv"
_EVENT, _TIME = "E", "T"
_REGIONS = ("northeast", "south", "west", "midwest", "europe", "canada")
"""By FLamby's number of the center."""


class TcgaBrcaSource(CopiedSource):
    """Configuration of Fed-TCGA-BRCA: 1,088 patients with 39 numbers each, days and deaths, six regions (FLamby, 2022).

    The files are FLamby's ``brca.csv``, with the columns pid, the inputs, E (1: the patient died) and T (days), and
    ``train_test_split.csv``, with the columns pid, fold and fold2 (such as train_0: the part and the region). The
    regions are clients, with FLamby's own training and test parts. The first input is the age in years; the others are
    0 or 1.
    """

    name: Literal["tcga_brca"] = Field(default="tcga_brca", description="Survival with breast cancer, by region.")
    standardize: Standardize = Field(
        default="none",
        description="none: the age is in years, as in FLamby; it gets mean 0 and standard deviation 1 by the training "
        "samples of all clients (global), or of each client's own (client).",
    )

    @property
    def files(self) -> tuple[Path, ...]:
        """FLamby's two files on this machine."""
        return tuple(self.resolved_root / _FOLDER / name for name in (_PATIENTS, _SPLIT))

    def prepare(self, order: Order) -> Path:
        """Gets the two files, unless they are there, and makes the copy.

        ``--source`` is the folder ``flamby/datasets/fed_tcga_brca`` of FLamby, or its address.
        """
        no_checksum(order, "tcga_brca has two files, of which no checksums are published")
        place = _ADDRESS if order.place is None else order.place.rstrip("/")
        for path, name in zip(self.files, (_PATIENTS, _SPLIT), strict=True):
            if order.force:
                path.unlink(missing_ok=True)
            source = f"{place}/{name}" if is_url(place) else str(Path(place).expanduser() / name)
            fetch(source, path, offline=order.offline, progress=order.progress)
        return super().prepare(replace(order, place=None))

    def _check_there(self) -> None:
        for path in self.files:
            if not path.is_file():
                raise DataError(
                    f"tcga_brca is not there: {path} does not exist; get it with `rayfl data prepare tcga_brca` (add "
                    "--source for FLamby's folder flamby/datasets/fed_tcga_brca), or set the source's root or "
                    "RAYFL_DATA to the folder that has it"
                )

    def _choices(self) -> Mapping[str, Any]:
        return self.model_dump(mode="json", exclude={"root", "standardize"})

    @property
    def _learns(self) -> Target:
        return "survival"

    def _table(self, columns: TableColumns) -> TableOptions:
        return TableOptions(columns, self.standardize)

    def _remarks(self, rows: Rows, num_classes: int) -> list[Remark]:
        return []

    def _rows(self) -> Rows:
        path, split_file = self.files
        table = _read(path, ("pid", _EVENT, _TIME))
        inputs = [name for name in table.column_names if name not in ("pid", _EVENT, _TIME)]
        parts = _parts(split_file)
        patients = table.column("pid").to_pylist()
        if len(set(patients)) < len(patients) or set(patients) != set(parts):
            other = {pid for pid in patients if patients.count(pid) > 1} or set(patients) ^ set(parts)
            raise DataError(
                f"{path} and {split_file} must have each patient once, but not so {min(other)}; get both again"
            )
        splits, clients = (np.array([parts[pid][place] for pid in patients], dtype=object) for place in (0, 1))
        table = table.append_column("region", pa.array(clients))
        x, columns = read_table([(path, table)], inputs, "region", "error")
        y = read_targets(path, table, (_TIME, _EVENT), "survival", "region", False)
        of_two = tuple(place for place in range(x.shape[1]) if np.isin(x[:, place], (0, 1)).all())
        return Rows(x, y, clients, splits, False, 0, table=replace(columns, categories=of_two))


def _parts(path: Path) -> dict[str, tuple[str, str]]:
    """The part, ``train`` or ``test``, and the region of each patient."""
    names, found = ("pid", "fold", "fold2"), dict[str, tuple[str, str]]()
    table = _read(path, names)
    for row, (pid, fold, both) in enumerate(zip(*(table[name].to_pylist() for name in names), strict=True)):
        part, _, number = str(both).partition("_")
        if part != fold or part not in ("train", "test") or number not in map(str, range(len(_REGIONS))):
            raise DataError(
                f"{path}, row {row}: fold is {fold!r} and fold2 {both!r}; needed are train or test, and that with the "
                f"number of a region, 0 to {len(_REGIONS) - 1}, such as train_0: get the file again"
            )
        found[pid] = (part, _REGIONS[int(number)])
    return found


def _read(path: Path, needed: tuple[str, ...]) -> pa.Table:
    try:
        table = pyarrow.csv.read_csv(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {str(error).strip()}; get it again") from error
    if missing := [name for name in needed if name not in table.column_names]:
        raise DataError(f"{path} has no column {missing[0]!r}, only {', '.join(table.column_names)}; get it again")
    return table
