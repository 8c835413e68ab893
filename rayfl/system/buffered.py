"""Rounds without a barrier on the virtual clock: clients begin and end at any time, and a round is a full buffer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rayfl.errors import ConfigError
from rayfl.system.schedule import DROPPED_OUT, TOO_LATE, UNAVAILABLE, Choose, Clock, Schedule, Turnout, Update

_EVENTS, _EVENTS_PER_CLIENT = 10_000, 20
"""How many times a client is looked for to begin, and that many times more per client, before a round is given up."""


class BufferedSchedule(Schedule):
    """Plans rounds without a barrier.

    ``system.concurrency`` clients are at work at a time. At each instant at which an update ends

    1. all updates that end then are received, by client ascending; as soon as ``cohort_size`` have arrived since the
       server's last step it takes the next one, which ends the round;
    2. then every free slot is given to a client, drawn uniformly from those that are available, not at work and not
       among the arrived that the server has not used yet. It begins from the newest model.

    An update is lost if its client drops out, becomes unavailable, or takes longer than the deadline; its slot is free
    from then on (of one that drops out, from when it would have been done). If nobody is at work, the server waits for
    the first that becomes available. Messages are as long as the longest of the last finished round.

    Source: Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous
    Aggregation, AISTATS 2022, Algorithm 1.
    """

    def plan(self, round: int, clock: Clock, under_way: Sequence[Update] = (), choose: Choose | None = None) -> Turnout:
        """Returns what happens until the server's next step, a function of (seed, round, clock, under_way).

        Args:
            round: how many steps the server has taken.
            clock: when it took the last one.
            under_way: the updates that had begun by then.
            choose: None: clients begin one by one, each drawn uniformly.

        Raises:
            ConfigError: too few updates arrive, however long the server waits.
        """
        at_work = {update.client: update for update in under_way}
        arrived: dict[int, int] = {}
        lost: dict[int, list[str]] = {}
        now = clock
        while True:
            for update in sorted(update for update in at_work.values() if update.ends_us == now.now_us):
                del at_work[update.client]
                if update.lost:
                    lost.setdefault(update.client, []).append(update.lost)
                    continue
                arrived[update.client] = update.began
                if len(arrived) == self._size:
                    return _turnout(round, clock, now, arrived, lost, at_work)
            self._check_progress(round, now.events - clock.events, len(arrived), lost)
            now = self._occupied(round, now, at_work, arrived)
            if at_work:
                now = replace(now, now_us=min(update.ends_us for update in at_work.values()))
            else:
                now = replace(now, now_us=self._opening_us(now.now_us, arrived))

    def _occupied(self, round: int, now: Clock, at_work: dict[int, Update], arrived: dict[int, int]) -> Clock:
        """Gives free slots to clients, which it adds to those at work; returns the clock with the events counted."""
        slots = self._config.concurrency or self._size
        free = [k for k in range(len(self._devices)) if k not in at_work and k not in arrived and self._open(k, now)]
        while len(at_work) < slots and free:
            generator = self._streams.generator("event", now.events)
            now = replace(now, events=now.events + 1)
            there = free
            if any(device.availability < 1 for device in self._devices):
                draws = generator.random(len(self._devices))
                there = [client for client in free if draws[client] < self._devices[client].availability]
            if not there:
                break
            client = there[int(generator.integers(len(there)))]
            free.remove(client)
            at_work[client] = self._begun(client, round, now, generator)
        return now

    def _begun(self, client: int, round: int, now: Clock, generator: np.random.Generator) -> Update:
        time_us = self.time_us(client, now)
        ends_us = now.now_us + time_us
        dropout, deadline_us, hours = self._config.dropout, self._config.deadline_us, self._devices[client].hours
        losses = [(ends_us, DROPPED_OUT)] if dropout and generator.random() < dropout else []
        until_us = None if hours is None else hours.ends_us(now.now_us)
        if until_us is not None and until_us < ends_us:
            losses.append((until_us, UNAVAILABLE))
        if deadline_us is not None and time_us > deadline_us:
            losses.append((now.now_us + deadline_us, TOO_LATE))
        return Update(client, round, *min(losses, default=(ends_us, "")))

    def _open(self, client: int, now: Clock) -> bool:
        """Returns whether a client is available, as far as that is a matter of hours."""
        hours = self._devices[client].hours
        return hours is None or hours.ends_us(now.now_us) is not None

    def _opening_us(self, now_us: int, arrived: dict[int, int]) -> int:
        """Returns when the next client may begin, while nobody is at work."""
        idle = [device.hours for client, device in enumerate(self._devices) if client not in arrived]
        # one that is there, but was not available when it was looked for, is looked for again
        return min(
            now_us if hours is None or hours.ends_us(now_us) is not None else hours.begins_us(now_us) for hours in idle
        )

    def _check_progress(self, round: int, events: int, arrived: int, lost: dict[int, list[str]]) -> None:
        if events <= (_EVENTS + _EVENTS_PER_CLIENT * len(self._devices)) / (1 - self._config.dropout):
            return
        raise ConfigError(
            f"system: in round {round} the server waits for the updates of {self._size} clients "
            f"(train.clients_per_round), but those of only {arrived} have arrived after {events} attempts. Lost were: "
            f"{_told([reason for some in lost.values() for reason in some]) or 'none, as nobody was available'}. Lower "
            "train.clients_per_round, or make more updates arrive (system.deadline_s, availability, dropout)"
        )


def _turnout(
    round: int,
    clock: Clock,
    now: Clock,
    arrived: dict[int, int],
    lost: dict[int, list[str]],
    at_work: dict[int, Update],
) -> Turnout:
    return Turnout(
        tuple(sorted(arrived)),
        now.now_us - clock.now_us,
        {client: _told(reasons) for client, reasons in sorted(lost.items())},
        {client: began for client, began in sorted(arrived.items()) if began < round},
        tuple(sorted(at_work.values())),
        now.events - clock.events,
    )


def _told(reasons: Sequence[str]) -> str:
    """Reasons with how often there was each."""
    counts = Counter(reasons).most_common()
    return ", ".join(reason if count == 1 else f"{reason} ({count} times)" for reason, count in counts)
