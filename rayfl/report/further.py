"""What a page on a run says of others than the clients that train on their own data: newcomers, common test data."""

from __future__ import annotations

from rayfl.metrics import Metric
from rayfl.report.blocks import Block, Cell, Column, Table
from rayfl.results.schemas import first_metric
from rayfl.runs.further import FURTHER, further_rows
from rayfl.runs.loading import Run


def section(run: Run) -> list[Block]:
    """A table for each kind of evaluation that the run has in addition; the personalized model is bold."""
    first = first_metric(run.rounds)
    found = ((measured, title, further_rows(run.rounds, run.own, measured)) for measured, title in FURTHER.items())
    return [
        Table(
            f"further-{measured.cohort}-{measured.split}",
            f"{title[0].upper()}{title[1:]}, after round {rows[0]['round']}: mean and standard deviation over clients.",
            [Column("model", numeric=False), Column("clients"), Column(first.heading), Column("+- clients")],
            [
                [
                    Cell(str(row["choice"] or row["model"]), mark="own" if run.own.is_summary(row) else ""),
                    Cell(str(row["clients"]), row["clients"]),
                    _cell(row[first.name], first),
                    _cell(row[f"{first.name}_std"], first),
                ]
                for row in rows
            ],
        )
        for measured, title, rows in found
        if rows
    ]


def _cell(value: float | None, metric: Metric) -> Cell:
    return Cell("-", float("inf")) if value is None else Cell(metric.shown(value), metric.scale * value)
