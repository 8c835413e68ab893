"""What clients have contributed to the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rayfl.errors import ConfigError
from rayfl.plots.series import Series, series_of
from rayfl.plots.style import colour, new_panels, wrapped
from rayfl.results.contributions import COSINE, Contributions, contributions_of
from rayfl.runs.contributions import KINDS, unit_of
from rayfl.runs.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _LEAST = 4.0, 2.4
"""Of a panel in inches; below the second a line has fewer of them."""


def draw(runs: Sequence[RunFolder]) -> tuple[Figure, pa.Table]:
    """Draws the value of each client, by its number: the mean over seeds, with the standard deviation over them.

    Args:
        runs: with the section ``contribution``.

    Raises:
        ConfigError: a run has not valued its clients.
    """
    every = series_of(runs)
    figure, panels = new_panels(len(every), _WIDTH, 2.8, _LEAST)
    rows: list[dict[str, Any]] = []
    for axes, series in zip(panels, every, strict=True):
        found = _found(series)
        metric = unit_of(found[0], series.runs[0].rounds)
        clients = np.unique(np.concatenate([one.clients for one in found]))
        table = np.full((len(found), len(clients)), np.nan)
        for values, one in zip(table, found, strict=True):
            values[np.searchsorted(clients, one.clients)] = one.values
        known = [column[~np.isnan(column)] for column in table.T]
        means = np.array([own.mean() if len(own) else np.nan for own in known])
        spreads = np.array([own.std(ddof=1) if len(own) > 1 else np.nan for own in known])
        spread = None if np.isnan(spreads).all() else metric.scale * np.nan_to_num(spreads)
        axes.bar(clients, metric.scale * means, yerr=spread, width=0.85, color=colour(0), linewidth=0, ecolor="0.3")
        axes.axhline(0, color="0.5", linewidth=0.8)
        kind = KINDS[found[0].kind]
        unit = "" if found[0].kind == COSINE else f", {metric.axis}"
        axes.set_title(wrapped(series.label, _WIDTH))
        axes.set(xlabel="client", ylabel=f"{kind}{unit}")
        axes.locator_params(axis="x", integer=True)
        rows += [
            {
                "series": series.label,
                "kind": found[0].kind,
                "metric": found[0].metric,
                "client": int(client),
                "value": float(mean),
                "std_over_seeds": float(deviation),
                "seeds": len(own),
            }
            for client, mean, deviation, own in zip(clients, means, spreads, known, strict=True)
        ]
    return figure, pa.Table.from_pylist(rows)


def _found(series: Series) -> list[Contributions]:
    found = []
    for run in series.runs:
        one = contributions_of(run.contributions)
        if one is None:
            raise ConfigError(
                f"{run.uri} has not valued its clients: run it with contribution=shapley, or another kind"
            )
        found.append(one)
    return found
