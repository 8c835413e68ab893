"""What it took until a model had reached a score: rounds, bytes, seconds, operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from rich.box import SIMPLE_HEAD
from rich.table import Table as TerminalTable

from rayfl.errors import ConfigError
from rayfl.report.blocks import Cell, Column, Table
from rayfl.report.columns import Metric
from rayfl.report.costs import COSTS, Cost, cell_of
from rayfl.report.grouping import Group
from rayfl.report.harm import Over
from rayfl.report.rows import RowKey, drawn
from rayfl.runs.loading import Run
from rayfl.runs.rows import summaries


def _virtual_time(run: Run, rounds: np.ndarray) -> np.ndarray | None:
    if "simulated_s" not in run.rounds.schema.names:
        return None
    known = dict(zip(run.rounds["round"].to_pylist(), run.rounds["simulated_s"].to_pylist(), strict=True))
    return np.array([known[int(round)] for round in rounds], dtype=float)


def _unknown(run: Run) -> None:
    return None


_PERCENT = 100
"""The scale of metrics that are fractions."""
_ROUNDS = Cost("rounds", "rounds", 1.0, _unknown, lambda run, rounds: rounds)
_VIRTUAL = Cost("simulated_s", "virtual time (h)", 1 / 3600, _unknown, _virtual_time)
REACHED_BY = (_ROUNDS, *(cost for cost in COSTS if cost.until is not None), _VIRTUAL)
"""What is known until a round."""


@dataclass(frozen=True)
class Reached:
    """What a model of a method took.

    Attributes:
        method: label of its group.
        model: of the row.
        seeds: how many runs have the row.
        reached: how many of them have reached the score.
        costs: by name of the cost, over the seeds that have; None where one of them does not know it, or none has.
    """

    method: str
    model: str
    seeds: int
    reached: int
    costs: Mapping[str, Over | None]


@dataclass(frozen=True)
class Reaching:
    """Tables of what it took to reach a score.

    Attributes:
        metric: the column.
        score: what is to be reached, in the column's own unit.
    """

    metric: Metric
    score: float

    @classmethod
    def of(cls, runs: Sequence[Run], metric: Metric, text: str) -> Reaching:
        """Returns the tables for a score as a person writes it: ``0.8``, ``80%``.

        Raises:
            ConfigError: it is no score of the metric, or runs have no course of it.
        """
        number, percent, rest = text.strip().partition("%")
        try:
            score = float(number) / (100 if percent else 1)
        except ValueError:
            score = float("nan")
        fraction = metric.scale == _PERCENT
        if rest or not np.isfinite(score) or (percent and not fraction) or (fraction and not 0 <= score <= 1):
            form = "a fraction, such as 0.8 or 80%" if fraction else "a number in its own unit, such as 0.5"
            raise ConfigError(f"--target {text}: {metric.column} ({metric.heading}) is {form}")
        if missing := [run.name for run in runs if metric.column not in run.rounds.schema.names]:
            raise ConfigError(f"--metric {metric.column}: {', '.join(missing)} did not record it: choose another")
        return cls(metric, score)

    def found(self, groups: Sequence[Group], keys: Mapping[str, Sequence[RowKey]]) -> tuple[list[Reached], list[str]]:
        """Returns what each row of each group took, and what a reader should know, a sentence each.

        Args:
            groups: the methods.
            keys: by label of the group, the rows that are looked at.
        """
        lines, gaps = [], []
        for group in groups:
            for key in keys.get(group.label, ()):
                rows = [(run, summaries(run.rounds, key.model, key.selected_on, run.measured)) for run in group.runs]
                rows = [(run, table) for run, table in rows if table.num_rows]
                if rows:
                    lines.append(self._line(group.label, key, rows))
                gaps += [_widest_gap(table) for _, table in rows if table.num_rows > 1]  # others are of the end alone
        notes = []
        if (gap := max(gaps, default=1)) > 1:
            notes.append(
                f"Between evaluations nothing is known: they are up to {gap} rounds apart (evaluation.every), and a "
                "score counts as reached at the first evaluation that has it."
            )
        if any(0 < line.reached < line.seeds for line in lines):
            notes.append("Where not all seeds have reached it, the numbers are those of the seeds that have.")
        return lines, notes

    def _line(self, label: str, key: RowKey, rows: Sequence[tuple[Run, pa.Table]]) -> Reached:
        values: dict[str, list[float]] = {cost.name: [] for cost in REACHED_BY}
        reached = 0
        for run, table in rows:
            scores = table[self.metric.column].to_numpy(zero_copy_only=False).astype(float)
            sign = self.metric.sign
            hits = np.flatnonzero(sign * scores >= sign * self.score)
            if not len(hits):
                continue
            reached += 1
            rounds = table["round"].to_numpy()[[hits[0]]]
            for cost in REACHED_BY:
                sent = _sent(table, int(hits[0])) if cost.name == "bytes_sent" else None
                made = sent if cost.name == "bytes_sent" or cost.until is None else cost.until(run, rounds)
                if made is not None and np.isfinite(made).all():
                    values[cost.name].append(float(made[0]))
        costs = {name: Over.of(known) if reached and len(known) == reached else None for name, known in values.items()}
        return Reached(label, key.label, len(rows), reached, costs)

    def as_rows(self, lines: Sequence[Reached]) -> list[dict[str, Any]]:
        """The lines as plain data: rounds, bytes, seconds, operations."""
        made = []
        for line in lines:
            row: dict[str, Any] = {"method": line.method, "model": line.model, "seeds": line.seeds}
            row |= {"target": self.score, "reached": line.reached}
            for name, over in line.costs.items():
                row |= {name: over and over.mean, f"{name}_std_over_seeds": over and over.std}
            made.append(row)
        return made

    def caption(self, groups: Sequence[Group]) -> str:
        """Returns what the table shows."""
        run = groups[0].runs[0]
        least = "at least" if self.metric.sign > 0 else "at most"
        unit = " %" if self.metric.scale == _PERCENT else ""
        # The name of the worst 5 % ends like one whose unit is per cent.
        name = self.metric.heading.removesuffix(unit) if self.metric.by_client else self.metric.heading
        of = "mean over " if self.metric.by_client else ""
        return (
            f"What it took until {name} was {least} {self.metric.scale * self.score:g}{unit}: {of}"
            f"{run.measured.whose}{run.measured.when} on {run.measured.split} samples, at the first evaluation that "
            "has it; a later one may be worse. Sent: messages down and up, counted. Client seconds: measured, without "
            "evaluation. With several seeds: mean, and sample standard deviation over seeds."
            f"{drawn(run for group in groups for run in group.runs)}"
        )

    def table(self, groups: Sequence[Group], lines: Sequence[Reached]) -> Table:
        """The lines for a page and a paper."""
        shown = _shown(lines)
        heads = (Column("method", numeric=False), Column("model", numeric=False), Column("reached"))
        return Table(
            "target-table",
            self.caption(groups),
            [*heads, *(Column(cost.heading) for cost in shown)],
            [[Cell(line.method), Cell(line.model), *_cells(line, shown)] for line in lines],
        )

    def terminal_table(self, groups: Sequence[Group], lines: Sequence[Reached]) -> TerminalTable:
        """The lines for a terminal."""
        table = TerminalTable(caption=self.caption(groups), caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for heading in ("method", "model"):
            table.add_column(heading, overflow="fold")
        shown = _shown(lines)
        for heading in ("reached", *(cost.heading for cost in shown)):
            table.add_column(heading, justify="right")
        for line in lines:
            table.add_row(line.method, line.model, *(cell.text for cell in _cells(line, shown)))
        return table


def _shown(lines: Sequence[Reached]) -> list[Cost]:
    """The costs that a line knows, rounds in any case."""
    return [cost for cost in REACHED_BY if cost is _ROUNDS or any(line.costs[cost.name] for line in lines)]


def _cells(line: Reached, shown: Sequence[Cost]) -> list[Cell]:
    of = Cell(f"{line.reached} of {line.seeds}", line.reached / line.seeds)
    return [of, *(cell_of(line.costs[cost.name], cost) for cost in shown)]


def _sent(table: pa.Table, place: int) -> np.ndarray:
    both = [table[name].to_numpy(zero_copy_only=False)[[place]].astype(float) for name in ("bytes_down", "bytes_up")]
    total: np.ndarray = both[0] + both[1]
    return total


def _widest_gap(table: pa.Table) -> int:
    return int(np.diff(np.append(0, table["round"].to_numpy())).max())
