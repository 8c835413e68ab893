"""Runs the experiments of a paper's table one after the other; the same command continues where it stopped."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from cluster.run import run_config
from rayfl.errors import DataError, RayflError
from rayfl.experiment.parts import Parts
from rayfl.reproduction.comparison import Comparison, compare
from rayfl.reproduction.output import as_arrow, as_markdown
from rayfl.reproduction.tables import PlannedRun, Reproduction
from rayfl.results.plain_csv import write_csv
from rayfl.storage.files import Storage
from rayfl.storage.tables import to_parquet
from rayfl.tracking.callback import Callback

_TABLE = "table"


@dataclass(frozen=True)
class ReproductionResult:
    """The results of the runs of a table.

    Attributes:
        rows: all cells, also those without a number yet.
        failures: reasons of failures, by run.
    """

    rows: Sequence[Comparison]
    failures: dict[PlannedRun, str]


def reproduce(
    planned: Reproduction,
    folder: str,
    say: Callable[[str], None],
    listeners: Callable[[], Sequence[Callback]] = tuple,
) -> ReproductionResult:
    """Runs the remaining runs of a table, and writes the table after each. A failed run does not end the others.

    Args:
        planned: the runs.
        folder: receives ``table.md``, ``table.csv`` and ``table.parquet``; a path or a URI.
        say: prints a line about each run that starts or fails.
        listeners: makes the listeners of a run.

    Raises:
        DataError: before anything starts, naming all data that are missing and how to get them.
        RunError: when the table cannot be written.
    """
    check_data(planned)
    storage = Storage(folder)
    results: dict[PlannedRun, pa.Table] = {}
    failures: dict[PlannedRun, str] = {}
    for count, run in enumerate(planned.runs, 1):
        say(f"run {count}/{len(planned.runs)}: {run.method} on {run.setting}, seed {run.seed}")
        try:
            results[run] = run_config(run.config, listeners()).rounds
        except RayflError as error:
            failures[run] = str(error)
            say(f"failed: {run.method} on {run.setting}, seed {run.seed}: {error}")
        rows = compare(planned, results)
        _write(storage, planned, rows)
    return ReproductionResult(rows, failures)


def check_data(planned: Reproduction) -> None:
    """Opens the data of every setting.

    Raises:
        DataError: naming all that are missing and the commands that get them.
    """
    problems: dict[str, list[str]] = {}
    for run in {run.setting: run for run in planned.runs}.values():
        try:
            Parts(run.config).dataset  # noqa: B018 -- opened to find out what is wrong with it
        except RayflError as error:
            problems.setdefault(str(error), []).append(run.setting)
    if problems:
        lines = [f"  {', '.join(settings)}: {problem}" for problem, settings in problems.items()]
        raise DataError("data cannot be opened, so nothing was started:\n" + "\n".join(lines))


def _write(storage: Storage, planned: Reproduction, rows: Sequence[Comparison]) -> None:
    table = as_arrow(planned, rows)
    storage.write(f"{_TABLE}.md", as_markdown(planned, rows).encode())
    storage.write(f"{_TABLE}.parquet", to_parquet(table))
    out, place = io.BytesIO(), table.schema.get_field_index("remarks")
    remarks = pa.array([" ".join(found) for found in table["remarks"].to_pylist()], pa.string())
    write_csv(table.set_column(place, "remarks", remarks), out)
    storage.write(f"{_TABLE}.csv", out.getvalue())
