"""Figures of how a run went: who owns what, who took part, and where the time went."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from rayfl.config.redaction import redact
from rayfl.data.federated import FederatedDataset
from rayfl.errors import RayflError
from rayfl.examples import SPLITS
from rayfl.experiment.parts import Parts
from rayfl.plots.partition import KINDS, draw_partition, label_matrix
from rayfl.plots.style import colour, whole_numbers
from rayfl.report.blocks import Cell, Column, Table, number
from rayfl.report.charts import Axis, Chart, Series
from rayfl.report.drawing import FAINT, Drawing, table_of
from rayfl.report.rows import split_sizes
from rayfl.runs.loading import Run
from rayfl.runs.participation import participants
from rayfl.runs.rows import attendance

OpenParts = Callable[[Mapping[str, Any]], Parts]
"""Makes data set and partition of a configuration; raises RayflError where it cannot or should not."""

_WIDTH = 9.6
_PHASES, _OPTIONAL = ("clients", "server", "evaluation", "commit"), ("contribution",)
_MOST_DOTS = 1500


def partition_picture(run: Run, open_parts: OpenParts) -> Drawing | None:
    """Returns the samples by client and class; without the data set by client alone; None where nothing is known.

    What stands in the way of the classes is said in the caption.
    """
    if run.partition is None:
        return None
    try:
        parts = open_parts(run.content)
        same = None in (contents := {parts.dataset.content_hash(), run.content_hash}) or len(contents) == 1
        if same and parts.partition_hash == run.partition_hash:
            return _classes(parts.dataset)
        what = "another partition" if same else "other samples"
        reason = f"the configuration now gives {what}, so the data set's files have changed since the run"
    except RayflError as error:
        reason = redact(str(error))
    return _sizes(run.partition, reason)


def _classes(dataset: FederatedDataset) -> Drawing:
    counts = label_matrix(dataset)
    client, label = np.nonzero(counts)
    names = np.array(dataset.names, dtype=object)
    data = table_of({"client": client, "name": names[client], "class": label, "samples": counts[client, label]})
    held, kind, samples = (counts > 0).sum(1), KINDS[dataset.spec.target], dataset.sizes().sum(1)
    kinds = {"class": "classes", "label": "labels"}.get(kind, "rows")
    caption = (
        f"Samples of the {len(counts)} clients by {kind}, over all splits; above, the clients' sizes by split, beside, "
        f"the sizes of the {kinds}. A client has {_span(held)} of the {counts.shape[1]} {kinds} and "
        f"{_span(samples)} samples."
    )
    return Drawing("partition", "Partition", caption, draw_partition(dataset, ""), data)


def _sizes(partition: pa.Table, reason: str) -> Drawing:
    from matplotlib.figure import Figure

    by_split = split_sizes(partition)
    total = np.sum(list(by_split.values()), axis=0)
    figure = Figure(figsize=(_WIDTH, 2.8), layout="constrained")
    axes = figure.subplots()
    order, base = np.argsort(-total, kind="stable"), np.zeros(len(total))
    for position, split in enumerate(SPLITS):
        sizes = by_split[split][order]
        axes.stairs(
            base + sizes, np.arange(len(total) + 1), baseline=base, fill=True, color=colour(position), label=split
        )
        base = base + sizes
    axes.set(xlabel="clients, largest first", ylabel="samples", xlim=(0, len(total)))
    axes.legend()
    caption = f"Samples of the {len(total)} clients by split, {_span(total)} each. Classes are not shown: {reason}."
    data = table_of({"client": np.arange(len(total)), **{split: by_split[split] for split in SPLITS}})
    return Drawing("partition", "Partition", caption, figure, data)


def phases(run: Run) -> Drawing | Table | None:
    """Returns the seconds of every round by phase; of a single round a table; None for runs without times."""
    from matplotlib.figure import Figure

    if not run.timings:
        return None
    rounds = np.array([int(line["round"]) for line in run.timings])
    known = [*_PHASES, *(phase for phase in _OPTIONAL if any(phase in line for line in run.timings))]
    seconds = {phase: np.array([line.get(phase, 0.0) for line in run.timings]) for phase in known}
    what = (
        "Wall time of the rounds: waiting for clients, the rest of the method's round, evaluation, and waiting for the "
        "commit of an earlier round."
    )
    if len(rounds) == 1:
        rows = [[Cell(phase), number(float(values[0]), 3)] for phase, values in seconds.items()]
        columns = [Column("phase", numeric=False), Column("seconds")]
        return Table("phases-table", f"{what} There is one round with times, round {rounds[0]}.", columns, rows)
    figure = Figure(figsize=(_WIDTH, 2.8), layout="constrained")
    axes = figure.subplots()
    base = np.zeros(len(rounds))
    for position, (phase, values) in enumerate(seconds.items()):
        axes.bar(rounds, values, width=0.9, bottom=base, color=colour(position), label=phase, linewidth=0)
        base = base + values
    axes.set(xlabel="round", ylabel="seconds", xlim=(rounds.min() - 0.6, rounds.max() + 0.6))
    whole_numbers(axes)
    figure.legend(loc="outside right upper")
    words = ", ".join(f"{phase} {values.sum():.1f} s" for phase, values in seconds.items())
    chart = Chart([Axis("round", whole=True)], "seconds", 3, [Series(p, [rounds], v) for p, v in seconds.items()])
    table = table_of({"round": rounds, **seconds})
    return Drawing("phases", "Time per phase", f"{what} In all: {words}.", figure, table, chart)


def cohorts(run: Run) -> Drawing | None:
    """Returns which client took part in which round, or else was scored in it; None where no cohort was scored."""
    from matplotlib.figure import Figure

    scored = attendance(run.clients)
    if not scored.num_rows:
        return None
    exact = participants(run)
    present = scored if exact is None else exact
    rounds, clients = present["round"].to_numpy(), present["client"].to_numpy()
    covered = np.unique(rounds) if exact is None else np.arange(1, run.rounds_completed + 1)
    count = run.num_clients or int(max(clients.max(), run.clients["client"].to_numpy().max())) + 1
    times = np.bincount(clients, minlength=count)
    sizes = np.bincount(rounds, minlength=covered[-1] + 1)[covered]
    figure = Figure(figsize=(_WIDTH, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 1])
    if len(rounds) <= _MOST_DOTS:
        left.scatter(rounds, clients, s=10, marker="s", color=colour(0), linewidth=0)
        left.set(xlabel="round", ylabel="client", ylim=(-0.6, count - 0.4))
        left.locator_params(integer=True)
    else:
        left.stairs(np.sort(times)[::-1], np.arange(count + 1), fill=True, color=colour(0))
        left.set(xlabel="clients, most often first", ylabel="rounds", xlim=(0, count))
    right.hist(times, np.arange(times.max() + 2) - 0.5, color=FAINT, rwidth=0.9)
    right.set(xlabel="rounds with the client", ylabel="clients")
    right.locator_params(integer=True)
    never = int((times == 0).sum())
    if exact is None:
        caption = (
            f"Clients of the cohorts that were scored in {len(covered)} rounds, {_span(sizes)} in each. Rounds whose "
            "cohort was not scored, and clients without a sample that was, are not counted, though they may have "
            f"trained. A client was scored {_span(times)} times; {never} of {count} clients are not counted once."
        )
    else:
        caption = (
            f"The cohorts of {len(covered)} rounds, of {_span(sizes)} clients: who took part when, and how "
            f"often. A client took part {_span(times)} times; {never} of {count} clients never did."
        )
    return Drawing("cohorts", "Cohorts", caption, figure, table_of({"round": rounds, "client": clients}))


def _span(values: np.ndarray) -> str:
    """Returns the smallest and the largest value in words."""
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
