"""Who of the clients takes part in a round, and how long it takes on the virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rayfl.randomness import RandomStreams
from rayfl.system.config import Waiting
from rayfl.system.devices import Device

PROCEDURE = "system"
"""What ``skipped.parquet`` calls the cause of clients that a simulated system has left out."""

DROPPED_OUT, UNAVAILABLE, TOO_LATE = "dropped out", "unavailable before it was done", "later than the deadline"
"""Why a client that was asked does not answer."""


@dataclass(frozen=True)
class Clock:
    """The virtual time, and what a client sends and receives in a round.

    All are whole numbers, so that a run that was interrupted continues to the same bits.

    Attributes:
        now_us: microseconds since the start.
        down: bytes to a client in a round, the most that one had in the last round.
        up: bytes from it.
        events: how many times a client was looked for to begin, where rounds have no barrier.
    """

    now_us: int = 0
    down: int = 0
    up: int = 0
    events: int = 0

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self.now_us / 1e6

    def after(self, duration_us: int, messages: Sequence[tuple[int, int]], events: int = 0) -> Clock:
        """The clock after a round.

        Args:
            duration_us: of the round.
            messages: bytes down and up of each client that took part; none: as before.
            events: how many more.
        """
        down = max((down for down, _ in messages), default=self.down)
        up = max((up for _, up in messages), default=self.up)
        return Clock(self.now_us + duration_us, down, up, self.events + events)


@dataclass(frozen=True, order=True)
class Update:
    """A client's local update that is under way when a round ends, where rounds have no barrier.

    Attributes:
        client: whose.
        began: the round in which it began: the number of steps that the server had taken by then.
        ends_us: when it ends, in microseconds on the virtual clock.
        lost: why it does not arrive; empty if it does.
    """

    client: int
    began: int
    ends_us: int
    lost: str = ""


@dataclass(frozen=True)
class Turnout:
    """What becomes of a round's clients.

    Attributes:
        cohort: those that take part, ascending.
        duration_us: how long the server waits, in microseconds.
        left_out: why the others that were asked do not, by client.
        started: the round in which a client of the cohort began, by client, if it was an earlier one.
        under_way: the updates that go on in the next round, by client ascending.
        events: how many times a client was looked for to begin.
    """

    cohort: tuple[int, ...]
    duration_us: int = 0
    left_out: Mapping[int, str] = field(default_factory=dict)
    started: Mapping[int, int] = field(default_factory=dict)
    under_way: tuple[Update, ...] = ()
    events: int = 0


Choose = Callable[[Sequence[int], int], Sequence[int]]
"""Chooses, of clients that can be asked, as many as are wanted."""


class Schedule:
    """Plans rounds before they are trained, so that nobody trains in vain.

    A client's time is its device's, for the samples that it trains on and for messages as long as the longest of the
    round before (in round 0: the server's whole tree, both ways). Those that are available when the round begins are
    sampled; of those that are done in time, the first ``cohort_size`` take part. The round ends when they are done;
    if too few are, at the deadline, or without one when the slowest that was asked would have been done.

    Args:
        config: over-sampling, deadline, drop-outs.
        devices: by client.
        samples: that a client trains on in a round, by client.
        cohort_size: clients wanted per round.
        streams: of the experiment.
    """

    def __init__(
        self,
        config: Waiting,
        devices: Sequence[Device],
        samples: Sequence[int],
        cohort_size: int,
        streams: RandomStreams,
    ) -> None:
        self._config = config
        self._devices = devices
        self._passes = [config.forward_passes * count for count in samples]
        self._size = cohort_size
        self._streams = streams

    def plan(self, round: int, clock: Clock, under_way: Sequence[Update] = (), choose: Choose | None = None) -> Turnout:
        """Returns what happens in a round, a function of (seed, round, clock, under_way) and of the choice.

        Args:
            round: 0-indexed.
            clock: when the round begins.
            under_way: updates that have begun earlier; none where rounds are synchronous.
            choose: chooses a number of the available clients; None: uniformly at random.
        """
        available = [client for client in range(len(self._devices)) if self._available(client, round, clock.now_us)]
        if not available:
            return Turnout((), self._idle_us(clock.now_us))
        asked = min(math.ceil(self._size * self._config.over_sampling - 1e-9), len(available))
        if choose is None:
            places = self._streams.generator("sampling", round).choice(len(available), size=asked, replace=False)
            chosen: Sequence[int] = [available[place] for place in places]
        else:
            chosen = choose(available, asked)
        times = {client: self.time_us(client, clock) for client in sorted(chosen)}
        lost = {client: why for client, time in times.items() if (why := self._loss(client, round, clock.now_us, time))}
        in_time = sorted((time, client) for client, time in times.items() if client not in lost)
        counted = in_time[: self._size]
        late = {client: f"not among the first {self._size}" for _, client in in_time[self._size :]}
        enough = len(counted) == min(self._size, len(times))
        return Turnout(
            tuple(sorted(client for _, client in counted)),
            counted[-1][0] if enough else self._patience_us(times),
            dict(sorted({**lost, **late}.items())),
        )

    def able(self) -> int:
        """Returns how many clients can be done in time in some round, however short messages are."""
        limit = math.inf if self._config.deadline_us is None else self._config.deadline_us
        return sum(
            device.availability > 0 and device.duration_us(passes, 0, 0) <= limit
            for device, passes in zip(self._devices, self._passes, strict=True)
        )

    def time_us(self, client: int, clock: Clock) -> int:
        """Returns how long a client is at work that begins now, in microseconds."""
        return self._devices[client].duration_us(self._passes[client], clock.down, clock.up)

    def _available(self, client: int, round: int, now_us: int) -> bool:
        device = self._devices[client]
        if device.hours is not None and device.hours.ends_us(now_us) is None:
            return False
        if device.availability == 1:
            return True
        return bool(self._streams.generator("system.available", round, client).random() < device.availability)

    def _loss(self, client: int, round: int, now_us: int, time_us: int) -> str:
        """Returns why a client that was asked does not answer in time; empty if it does."""
        dropout, deadline_us = self._config.dropout, self._config.deadline_us
        if dropout and self._streams.generator("system.dropout", round, client).random() < dropout:
            return DROPPED_OUT
        hours = self._devices[client].hours
        ends = hours.ends_us(now_us) if hours is not None else None
        if ends is not None and ends < now_us + time_us:
            return UNAVAILABLE
        if deadline_us is not None and time_us > deadline_us:
            return TOO_LATE
        return ""

    def _patience_us(self, times: Mapping[int, int]) -> int:
        deadline_us = self._config.deadline_us
        return max(times.values()) if deadline_us is None else deadline_us

    def _idle_us(self, now_us: int) -> int:
        """How long the server waits when nobody is available: for the next device, at most until the deadline."""
        begins = [device.hours.begins_us(now_us) - now_us for device in self._devices if device.hours is not None]
        if self._config.deadline_us is not None:
            begins.append(self._config.deadline_us)
        return min(begins, default=0)


def options_without_losses(config: Waiting, devices: Sequence[Device]) -> list[str]:
    """Returns what must be set so that every client that is sampled takes part; empty where that is so already.

    Args:
        config: drop-outs and deadline.
        devices: by client.
    """
    partly = any(device.availability < 1 or device.hours is not None for device in devices)
    losing = {
        "system.dropout=0": config.dropout > 0,
        "system.deadline_s=null": config.deadline_s is not None,
        "devices that are always available": partly,
    }
    return [option for option, loses in losing.items() if loses]
