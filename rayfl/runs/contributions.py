"""What clients have contributed over a run, in words and as the table at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rayfl.experiment.result import Result
from rayfl.metrics import Metric
from rayfl.results.contributions import COSINE, Contributions, contributions_of
from rayfl.results.schemas import metrics_of

KINDS = {"shapley": "Shapley value", "leave_one_out": "leave-one-out value", COSINE: "cosine with the mean update"}
"""The kinds of values in words."""

_PLAIN = Metric(COSINE, "cosine", "higher")
_ENDS = 10
"""Clients of the greatest and of the smallest values that the table at the end of a run has."""


def unit_of(found: Contributions, rounds: pa.Table) -> Metric:
    """Returns the metric in whose units values are shown.

    Args:
        found: the values.
        rounds: of the run.
    """
    return next((one for one in metrics_of(rounds) if one.name == found.metric), _PLAIN)


def described(found: Contributions, metric: Metric) -> str:
    """Returns what the values are of, in words: of which utility, over which rounds."""
    if found.kind == COSINE:
        return "cosine of a client's update with the mean update, mean over its rounds"
    sign = "" if metric.sign > 0 else "minus "
    return f"{KINDS[found.kind]} of a client for {sign}{metric.axis}, summed over rounds"


def facts(found: Contributions, metric: Metric) -> list[tuple[str, str]]:
    """Returns what is to be known of all values together, as pairs of a name and a text."""
    rounds = ", ".join(f"{count:,} {how}" for how, count in found.found.items())
    pairs = [("rounds", rounds)]
    if found.kind != COSINE:
        total = metric.shown(float(np.nansum(found.values)))
        pairs = [("sum of values", f"{total}, rounds have added {metric.shown(found.utility)}"), *pairs]
        pairs.append(("models evaluated", f"{found.evaluations:,}"))
    if found.truncated:
        pairs.append(("places left out", f"{found.truncated:,}"))
    return pairs


def ranked(found: Contributions) -> list[int]:
    """Returns the places of clients, those of the greatest values first; those without one are the last."""
    order = np.argsort(-np.where(np.isnan(found.values), -np.inf, found.values), kind="stable")
    return [int(place) for place in order]


def label_of(client: int, name: str | None, malicious: bool) -> str:
    """Returns what a client is called."""
    named = str(client) if name is None or name == str(client) else f"{client} ({name})"
    return f"{named}, malicious" if malicious else named


def contribution_rows(result: Result) -> list[dict[str, Any]]:
    """Returns the values of the clients of a run as plain data, the greatest first; empty without any."""
    found = contributions_of(result.contributions)
    if found is None:
        return []
    return [
        {"client": found.clients[n].item(), "rounds": found.rounds[n].item(), "value": found.values[n].item()}
        for n in ranked(found)
    ]


def contribution_table(result: Result) -> Table | None:
    """Returns the values of the clients of a run, the greatest first; None without any."""
    found = contributions_of(result.contributions)
    if found is None:
        return None
    metric = unit_of(found, result.rounds)
    title = described(found, metric)
    table = Table(
        title=f"{title[0].upper()}{title[1:]}",
        min_width=len(title),
        caption="; ".join(f"{name}: {text}" for name, text in facts(found, metric)),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    table.add_column("client", overflow="fold")
    for heading in ("samples", "rounds", "value"):
        table.add_column(heading, justify="right")
    names = dict(zip(result.clients["client"].to_pylist(), result.clients["name"].to_pylist(), strict=True))
    for place in _both_ends(ranked(found)):
        if place is None:
            table.add_row("...", "", "", "")
            continue
        client = int(found.clients[place])
        samples = str(result.samples[client]) if client < len(result.samples) else ""
        label = label_of(client, names.get(client), client in result.malicious)
        table.add_row(label, samples, str(found.rounds[place]), metric.shown(float(found.values[place])))
    return table


def _both_ends(order: Sequence[int]) -> list[int | None]:
    if len(order) <= 2 * _ENDS:
        return list(order)
    return [*order[:_ENDS], None, *order[-_ENDS:]]
