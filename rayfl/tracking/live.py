"""What a terminal shows while a run goes on: round, cohort, the metric over time, speed, time left, actors."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rayfl.metrics import Metric
from rayfl.results.personalized import PersonalizedRows, of_clients

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN_CLIENTS = 12
_SHOWN_POINTS = 40
_SPEED_ROUNDS = 10


class LiveView:
    """The picture of a run; redrawn by ``rich.live.Live``.

    Args:
        rounds: T.
        completed: rounds done when the run starts.
        hosts: a description of each actor.
        label: of the metric that is shown.
    """

    def __init__(
        self, rounds: int, completed: int, hosts: Sequence[Mapping[str, Any]], label: str = "accuracy"
    ) -> None:
        self.rounds = rounds
        self.completed = completed
        self.score, self.newcomers, self._label = "", "", label
        self.state, self.over = "starting", False
        self._devices = Counter(str(host["device"]) for host in hosts)
        self._failures = 0
        self._curve: list[tuple[int, float]] = []
        self._cohort: Sequence[int] = ()
        self._newest: deque[tuple[int, float]] = deque(maxlen=_SPEED_ROUNDS)

    def round_done(self, completed: int, cohort: Sequence[int], seconds: float) -> None:
        """A round has ended."""
        self.completed, self._cohort, self.state = completed, cohort, "training"
        self._newest.append((len(cohort), seconds))

    def evaluated(self, round: int, value: float) -> None:
        """All clients were scored; value is that of the metric."""
        self._curve = [point for point in self._curve if point[0] < round] + [(round, value)]

    def rewound(self, completed: int) -> None:
        """An actor died; the run continues from an earlier round."""
        self.completed, self.state = completed, "an actor was replaced"
        self._failures += 1
        self._curve = [point for point in self._curve if point[0] <= completed]

    @property
    def clients_per_second(self) -> float:
        """Over the last rounds; 0 before the first."""
        seconds = sum(spent for _, spent in self._newest)
        return sum(clients for clients, _ in self._newest) / seconds if seconds else 0.0

    @property
    def seconds_a_round(self) -> float | None:
        """Over the last rounds; None before the first."""
        return sum(spent for _, spent in self._newest) / len(self._newest) if self._newest else None

    def paced(self, seconds: float | None) -> None:
        """Takes the mean time of a round from elsewhere, in seconds; None leaves it unknown."""
        if seconds is not None:
            self._newest.append((0, seconds))

    @property
    def seconds_left(self) -> float | None:
        """At the speed of the last rounds; None before the first, 0 once the run is over."""
        pace = self.seconds_a_round
        return None if pace is None else (0 if self.over else self.rounds - self.completed) * pace

    def line(self) -> str:
        """The view in one line: the time of day, round, pace, time left and score."""
        now = time.strftime("%H:%M:%S")
        parts = [now, f"round {self.completed}/{self.rounds}", *self._pace(), self.score, self.newcomers]
        return "  ".join(part for part in parts if part)

    def _pace(self) -> list[str]:
        if self.seconds_a_round is None:
            return []
        speed = [f"{self.clients_per_second:.1f} clients/s"] if self.clients_per_second else []
        return [*speed, f"{self.seconds_a_round:.3g} s a round", f"{clock(self.seconds_left)} left"]

    def __rich__(self) -> Group:
        actors = ", ".join(f"{count} on {device}" for device, count in sorted(self._devices.items()))
        replaced = f", replaced {self._failures} times" if self._failures else ""
        clients = ", ".join(map(str, self._cohort[:_SHOWN_CLIENTS]))
        more = f" and {len(self._cohort) - _SHOWN_CLIENTS} more" if len(self._cohort) > _SHOWN_CLIENTS else ""
        table = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self.rounds, completed=self.completed, width=40)
        table.add_row("round", Group(Text(f"{self.completed}/{self.rounds}"), bar))
        table.add_row("cohort", Text(f"{clients}{more}" or "-"))
        table.add_row(self._label, Text(f"{sparkline([value for _, value in self._curve])}  {self.score}".strip()))
        if self.newcomers:
            table.add_row("newcomers", Text(self.newcomers))
        table.add_row("speed", Text(", ".join(self._pace()) or "-"))
        table.add_row("actors", Text(f"{actors or 'none: in this process'}{replaced}; {self.state}"))
        return Group(table)


def score_text(
    rows: Sequence[Mapping[str, Any]], own: PersonalizedRows, clients: int | None, metric: Metric
) -> tuple[str, float | None]:
    """The scores of an evaluation in words, and the one that a curve has; None where it is undefined.

    Never the best on test data: only the global model and the method's own personalized one, or its choice by
    validation.

    Args:
        rows: summaries of all clients on test data after one round.
        own: which of them is the personalized model.
        clients: K; None where it is not known.
        metric: that the task is judged by first.
    """
    shared = [row for row in rows if row["model"] == "global"]
    personal = [row for row in rows if own.is_summary(row) and row["model"] != "global"]
    if not rows:
        return "", None
    shown, name = replace(metric, digits=1) if metric.unit == "%" else metric, metric.name
    parts = [f"global {shown.told(row[name])}" for row in shared]
    parts += [f"{row['choice'] or row['model']} {shown.told(row[name])}" for row in personal]
    fewest = min(int(row["clients"]) for row in rows)
    whose = "" if clients is None or fewest >= clients else f" of {of_clients(fewest, clients)} clients"
    curve = [row[name] for row in personal or shared][:1]
    return f"test {shown.label}{whose}: {', '.join(parts)}", None if curve in ([], [None]) else float(curve[0])


def newcomers_text(rows: Sequence[Mapping[str, Any]], own: PersonalizedRows, metric: Metric) -> str:
    """The scores of clients held out from training in words; empty without any.

    Args:
        rows: summaries of these clients on test data after one round.
        own: which of them is the personalized model.
        metric: that the task is judged by first.
    """
    said, _ = score_text(rows, own, None, metric)
    return f"clients held out: {said}" if said else ""


def clock(seconds: float | None) -> str:
    """A duration as hours, minutes and seconds."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def sparkline(values: Sequence[float]) -> str:
    """The newest values as a row of bars, the lowest of them lowest; those that are not finite are blanks."""
    shown = list(values)[-_SHOWN_POINTS:]
    finite = [value for value in shown if math.isfinite(value)]
    low = min(finite, default=0.0) / 2  # halves: a difference of large numbers may be infinite
    width = max(finite, default=0.0) / 2 - low or 1.0
    bars = {value: _BARS[min(len(_BARS) - 1, int((value / 2 - low) / width * len(_BARS)))] for value in finite}
    return "".join(bars.get(value, " ") for value in shown)
