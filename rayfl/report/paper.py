"""A table as papers print it: a row for each method, a column for each data set and metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayfl.report.columns import Metric
from rayfl.report.comparison import Comparison
from rayfl.report.definitions import told_apart
from rayfl.report.grouping import Group
from rayfl.report.lines import Cell, Line, undefined
from rayfl.report.protocol import marks_caption, paper_caption
from rayfl.report.significance import PairTest, over_clients, over_seeds
from rayfl.runs.rows import row_label


@dataclass(frozen=True)
class PaperCell:
    """A number with its spread.

    Attributes:
        mean: as it is printed.
        spread: the standard deviation as it is printed; empty without one.
        rank: 1 for the best of the column, 2 for the second, 0 for all others.
        marks: ``c`` and ``s`` where the best is significantly better over clients and over seeds.
    """

    mean: str
    spread: str
    rank: int
    marks: str


@dataclass(frozen=True)
class PaperTable:
    """A table for a paper.

    Attributes:
        caption: plain text.
        datasets: names of the data sets, in the order of the columns.
        headings: of what each of them has a column for.
        heads: of the columns that name a row: the method, and its model if a method has several rows.
        rows: by what names them, a cell for each data set and metric; None where there is no number.
        notes: what else a reader must know, a sentence each.
        label: what LaTeX refers to the table by, behind ``tab:``.
    """

    caption: str
    datasets: Sequence[str]
    headings: Sequence[str]
    heads: Sequence[str]
    rows: Mapping[tuple[str, ...], Sequence[PaperCell | None]]
    notes: Sequence[str]
    label: str = "comparison"


def paper_table(comparisons: Mapping[str, Comparison]) -> PaperTable:
    """Makes the table.

    The spreads are over seeds if all lines have several, else over clients: one table never has both.

    Args:
        comparisons: by data set, all of the same metrics.
    """
    metrics = next(iter(comparisons.values())).wanted.metrics
    everything = [line for one in comparisons.values() for line in one.lines]
    by_seed = all(line.seeds > 1 for line in everything)
    alone = all(len({line.method for line in one.lines}) == len(one.lines) for one in comparisons.values())
    marks = {(name, metric.column): _marks(one, metric) for name, one in comparisons.items() for metric in metrics}
    rows: dict[tuple[str, ...], dict[tuple[str, str], PaperCell]] = {}
    for name, one in comparisons.items():
        labels = {group.label: group.printed for group in one.groups}
        for line in one.lines:
            method = f"{labels[line.method]}{'' if line.finished else ' †'}"
            row = rows.setdefault((method,) if alone else (method, _model(line)), {})
            for metric in metrics:
                marked = marks[name, metric.column].get(line.method, "")
                row[name, metric.column] = _cell(line.cells[metric.column], metric, by_seed, marked)
    spreads = [cell.spread for row in rows.values() for cell in row.values()]
    kinds = {kind for found in marks.values() for text in found.values() for kind in text}
    caption = paper_caption(comparisons, [metric.heading for metric in metrics], by_seed if any(spreads) else None)
    tested = marks_caption("c" in kinds, "s" in kinds)
    columns = [(name, metric.column) for name in comparisons for metric in metrics]
    unfinished = ["† unfinished: after its last evaluation so far"] if any(not n.finished for n in everything) else []
    starred = any(line.key.seen_test for line in everything) or any(metric.chosen for metric in metrics)
    seen = ["* chosen on test data: not a fair estimate"] if starred else []
    runs = [[run for group in one.groups for run in group.runs] for one in comparisons.values()]
    apart = list(dict.fromkeys(note for family in runs for note in told_apart(family, metrics)[1]))
    return PaperTable(
        f"{caption} {tested}".strip(),
        list(comparisons),
        [metric.heading for metric in metrics],
        ("method",) if alone else ("method", "model"),
        {label: [row.get(column) for column in columns] for label, row in rows.items()},
        [*unfinished, *seen, *apart, *undefined(everything, metrics)],
    )


def _model(line: Line) -> str:
    """Returns what a row is called; of a choice among a sweep without the values that were chosen."""
    return row_label(*line.key).replace("lambda", "λ")


def _cell(cell: Cell, metric: Metric, by_seed: bool, marks: str) -> PaperCell:
    spread = cell.over_seeds if by_seed else cell.over_clients
    return PaperCell(
        metric.text(cell.mean),
        "" if spread is None or math.isnan(spread) else metric.text(spread),
        1 if cell.best else 2 if cell.second else 0,
        marks,
    )


def _marks(comparison: Comparison, metric: Metric) -> dict[str, str]:
    """Returns by method the marks of the tests against the best one."""
    best = [line.method for line in comparison.lines if line.cells[metric.column].best]
    if len(best) != 1 or len(comparison.wanted.models) > 1:
        return {}
    finished: list[Group] = [group for group in comparison.groups if group.finished]
    found: dict[str, str] = {}
    for kind, tests in (
        ("c", over_clients(finished, metric.column) if metric.by_client else []),
        ("s", over_seeds(finished, metric.column)),
    ):
        for test in tests:
            if test.significant and best[0] in (test.first, test.second) and _favours(test, best[0], metric):
                other = test.second if test.first == best[0] else test.first
                found[other] = found.get(other, "") + kind
    return found


def _favours(test: PairTest, method: str, metric: Metric) -> bool:
    # Not by the mean difference: one client may turn that against what the test says of all of them.
    better = test.first if metric.sign * test.larger > 0 else test.second
    return better == method
