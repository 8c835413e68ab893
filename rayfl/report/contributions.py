"""What a page on a run says of what its clients have contributed."""

from __future__ import annotations

import math

import numpy as np

from rayfl.metrics import Metric
from rayfl.plots.style import colour, whole_numbers
from rayfl.report.blocks import Block, Cell, Column, Facts, Table, figures, number
from rayfl.report.drawing import FAINT, Drawing, table_of
from rayfl.results.contributions import COSINE, Contributions, contributions_of, rows_that_count
from rayfl.runs.contributions import described, facts, label_of, ranked, unit_of
from rayfl.runs.loading import Run

_WIDTH = 9.6
_MOST_CLIENTS = 1000


def section(run: Run) -> list[Block]:
    """The values of all clients, and how they came about; nothing for a run that has not valued its clients."""
    found = contributions_of(run.contributions)
    if found is None:
        return []
    metric, order = unit_of(found, run.rounds), ranked(found)
    names = dict(zip(run.clients["client"].to_pylist(), run.clients["name"].to_pylist(), strict=True))
    what = described(found, metric)
    limit = f" The first {_MOST_CLIENTS:,} of {len(order):,}." if len(order) > _MOST_CLIENTS else ""
    table = Table(
        "contributions-table",
        f"{what[0].upper()}{what[1:]}, of the clients that took part, the greatest first.{limit}",
        [Column("client", numeric=False), Column("rounds"), Column("value")],
        [
            [
                Cell(label_of(client, names.get(client), False), client),
                number(found.rounds[place], 0),
                _value(float(found.values[place]), metric),
            ]
            for place in order[:_MOST_CLIENTS]
            for client in [int(found.clients[place])]
        ],
    )
    pairs = [(f"{name[0].upper()}{name[1:]}", text) for name, text in facts(found, metric)]
    return [Facts(pairs), *figures([_drawing(run, found, metric, order)]), table]


def _value(value: float, metric: Metric) -> Cell:
    return Cell("-", math.inf) if math.isnan(value) else Cell(metric.shown(value), metric.scale * value)


def _drawing(run: Run, found: Contributions, metric: Metric, order: list[int]) -> Drawing:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    values = metric.scale * found.values[order]
    left.bar(np.arange(1, len(values) + 1), values, width=0.9, color=colour(0), linewidth=0)
    left.set(xlabel="clients, greatest value first", ylabel=_axis(found, metric))
    rows = rows_that_count(run.contributions)
    rounds, clients = rows["round"].to_numpy(), rows["client"].to_numpy()
    each = np.nan_to_num(rows["value"].to_numpy(zero_copy_only=False).astype(float))
    for rank, place in reversed(list(enumerate(order))):
        own = clients == found.clients[place]
        course = metric.scale * (each[own] if found.kind == COSINE else np.cumsum(each[own]))
        ends = {0: colour(0), len(order) - 1: colour(1)}
        right.plot(rounds[own], course, color=ends.get(rank, FAINT), linewidth=1.6 if rank in ends else 0.6)
    course_of = "of the round" if found.kind == COSINE else "so far"
    right.set(xlabel="round", ylabel=f"{_axis(found, metric)} {course_of}")
    whole_numbers(left)
    whole_numbers(right)
    best, worst = (int(found.clients[order[place]]) for place in (0, -1))
    caption = (
        f"What clients have contributed: {described(found, metric)}. Left: all clients; right: {course_of}, by round, "
        f"with client {best}, whose value is the greatest, and client {worst}, whose value is the smallest, in colour."
    )
    data = table_of({"client": found.clients, "rounds": found.rounds, "value": found.values})
    return Drawing("contributions", "Contributions", caption, figure, data)


def _axis(found: Contributions, metric: Metric) -> str:
    return "cosine" if found.kind == COSINE else f"value ({metric.unit})" if metric.unit else "value"
