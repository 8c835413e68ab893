"""What a page on a run says of its stages: how the personalized model does on the samples of each, after each."""

from __future__ import annotations

import math

from rayfl.data.partitions.stages import recorded_stages
from rayfl.report.blocks import Block, Cell, Column, Facts, Table
from rayfl.results.stages import by_stage
from rayfl.runs.loading import Run


def section(run: Run) -> list[Block]:
    """The table, and the three numbers that papers make of it; nothing for a run without such scores."""
    found = by_stage(run.rounds, recorded_stages(run.content).stage_of, run.own)
    if found is None:
        return []
    metric, size = found.metric, len(found.scores)
    table = Table(
        "stages",
        f"{metric.heading[0].upper()}{metric.heading[1:]} of {run.own.label} on test samples of each stage, after each "
        "stage: mean over clients.",
        [Column("after stage"), *(Column(f"of stage {stage + 1}") for stage in range(size))],
        [
            [
                Cell(str(after + 1), after + 1),
                *(Cell("", math.inf) if math.isnan(value) else Cell(metric.shown(value), value) for value in row),
            ]
            for after, row in enumerate(found.scores.tolist())
        ],
    )
    values = {
        "Average": found.average,
        "Forgetting": found.forgetting,
        "Backward transfer": found.backward_transfer,
    }
    return [table, Facts([(name, f"{metric.shown(value)} {metric.unit}".rstrip()) for name, value in values.items()])]
