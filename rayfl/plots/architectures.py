"""Which architectures clients have come to, and what choosing them gains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rayfl.errors import ConfigError
from rayfl.models.zoo import Candidates
from rayfl.plots.metrics import need_accuracy
from rayfl.plots.series import Series, series_of
from rayfl.plots.style import colour, legend_below, new_panels
from rayfl.runs.folder import RunFolder
from rayfl.runs.measured import Split
from rayfl.runs.rows import last_round, personalized_model, where

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAST = 3.0
"""Width of a panel in inches below which the architectures' names cover each other."""
_MOST_LETTERS = 45
"""Of all names in one line; longer ones are turned."""


def draw(runs: Sequence[RunFolder], split: Split = "test") -> tuple[Figure, pa.Table]:
    """Left: clients by architecture in the newest commit. Right: accuracy of all clients after the last round.

    Runs with ``algorithm.initial_architecture=0`` (1, ...) and ``algorithm.model_tuning=false`` are the fixed
    architectures of the paper's table 5. Whiskers are standard deviations over clients.

    Args:
        runs: with ``model.candidates``, the same in all.
        split: ``validation`` or ``test``.

    Raises:
        RayflError: for runs with one architecture, or with other candidates.
    """
    need_accuracy(runs, "the figure architectures")
    from matplotlib.ticker import MaxNLocator

    _check(runs)
    series = series_of(runs)
    names = _names(runs[0])
    rows = [row for one in series for row in _rows(one, names, split)]
    figure, (counts, accuracies) = new_panels(2, 4.1, 3.6, _LEAST)
    width = 0.8 / len(series)
    places = np.arange(len(names))
    for position, one in enumerate(series):
        mine = [row for row in rows if row["series"] == one.label]
        values = [row["clients"] for row in mine]
        at = places + (position - (len(series) - 1) / 2) * width
        bars = counts.bar(at, values, width, color=colour(position), label=one.label)
        counts.bar_label(bars, [f"{value:g}" for value in values], fontsize="small", padding=2)
        mean, spread = 100 * mine[0]["all_top1"], 100 * mine[0]["all_top1_std_over_clients"]
        accuracies.bar(position, mean, 0.7, color=colour(position))
        up = min(spread, 100 - mean)
        accuracies.errorbar(position, mean, [[spread], [up]], fmt="none", ecolor="0.3", elinewidth=0.8, capsize=3)
        accuracies.annotate(f"{mean:.1f}", (position, 2), ha="center", va="bottom", fontsize="small", color="white")
    ticks = [name.replace(" ", "\n", 1).replace("; ", "\n") for name in names]
    turned = len(ticks) * max(len(line) for tick in ticks for line in tick.split("\n")) > _MOST_LETTERS
    counts.set_xticks(places, ticks, rotation=30 if turned else 0, ha="right" if turned else "center")
    counts.yaxis.set_major_locator(MaxNLocator(integer=True))
    counts.set_ylabel("clients")
    counts.margins(y=0.12)
    accuracies.set_xticks([])
    accuracies.set_xlim(-1, len(series))
    accuracies.set(ylabel="accuracy (%)", ylim=(0, 102), title="of all clients")
    for axes in (counts, accuracies):
        axes.grid(axis="x", visible=False)
    legend_below(figure, counts)
    return figure, pa.Table.from_pylist(rows)


def _check(runs: Sequence[RunFolder]) -> None:
    for run in runs:
        if not isinstance(run.config.model, Candidates):
            raise ConfigError(
                f"{run.uri} has one architecture for all clients: architectures is of runs with "
                "model.candidates (algorithm=fedme)"
            )
        if run.config.model != runs[0].config.model:
            raise ConfigError(f"{run.uri} has other model.candidates than {runs[0].uri}")


def _names(run: RunFolder) -> list[str]:
    """The candidates: their model, and the fields in which those differ."""
    contents = [candidate.model_dump(mode="json") for candidate in run.config.model.candidates]  # type: ignore[union-attr]
    fields = dict.fromkeys(field for content in contents for field in content if field != "name")
    varied = [f for f in fields if len({str(content.get(f)) for content in contents}) > 1]
    return [
        " ".join([content["name"], "; ".join(f"{f}={content[f]}" for f in varied if f in content)]).strip()
        for content in contents
    ]


def _rows(series: Series, names: Sequence[str], split: Split) -> list[dict[str, Any]]:
    counts: Counter[int] = Counter()
    accuracies: dict[int, list[float]] = {}
    everybody = []
    for run in series.runs:
        manifest = run.manifest()
        found = run.store.read_server(manifest).get("architectures", {})
        table = where(run.clients, cohort="all", phase="received", split=split)
        last = last_round(table)
        rows = where(table, round=last, model=personalized_model(run, last)).to_pylist()
        top1 = {row["client"]: row["top1"] for row in rows}
        for client, number in found.items():
            counts[int(number)] += 1
            if int(client) in top1:
                accuracies.setdefault(int(number), []).append(top1[int(client)])
        everybody += list(top1.values())
    return [
        {
            "series": series.label,
            "number": number,
            "architecture": name,
            "clients": counts[number] / len(series.runs),
            "top1": float(np.mean(accuracies[number])) if number in accuracies else None,
            "all_top1": float(np.mean(everybody)),
            "all_top1_std_over_clients": float(np.std(everybody)),
            "all_clients": len(everybody) // len(series.runs),
            "seeds": len(series.runs),
        }
        for number, name in enumerate(names)
    ]
