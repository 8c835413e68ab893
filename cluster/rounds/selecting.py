"""Chooses the clients of rounds by what is known of each (the section ``selection``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from actors.federation.federation import Federation
from actors.hosting.failures import Failure
from algorithms.on_demand import trees_of
from cluster.rounds.progress import Progress
from rayfl.experiment.parts import Parts
from rayfl.params import Tree, num_bytes
from rayfl.selection.known import Known
from rayfl.selection.strategies import Uniform
from rayfl.system.schedule import Turnout

_NUMBER = 8
"""Bytes of a number that a client tells."""


@dataclass
class Chosen:
    """What the choice of a round's clients has found and cost.

    Attributes:
        turnout: the clients.
        known: what was known of all, with the losses of this round; None where clients are drawn uniformly.
        losses: those of this round, by client.
        sent: bytes of what clients received for them, by client.
        bytes_down: of these, what was sent to candidates that were not chosen.
        bytes_up: what clients have told of their losses.
        unscored: clients whose losses could not be found, and that were left out of the choice.
        repeats: how often clients count in the means of the round, of those that count more than once.
    """

    turnout: Turnout
    known: Known | None = None
    losses: dict[int, float] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    unscored: dict[int, Failure] = field(default_factory=dict)
    repeats: dict[int, int] = field(default_factory=dict)


class Selector:
    """Chooses the clients of rounds.

    Args:
        parts: data set, task and context.
        federation: the clients.
    """

    def __init__(self, parts: Parts, federation: Federation) -> None:
        self._parts, self._federation = parts, federation
        self._strategy = parts.config.selection

    def choose(self, round: int, progress: Progress, unscorable: Mapping[int, Failure] | None) -> Chosen:
        """Returns the clients of a round: a function of the seed, the round, and of what is committed.

        Args:
            round: t, 0-indexed.
            progress: of the rounds before.
            unscorable: clients that failed when they were scored in an earlier attempt at this round.
        """
        parts, strategy = self._parts, self._strategy
        if isinstance(strategy, Uniform):
            if parts.schedule is None:
                return Chosen(Turnout(tuple(parts.cohort(round))))
            return Chosen(parts.schedule.plan(round, progress.clock, progress.unfinished.updates))
        if strategy.asked != "nobody":
            self._federation.begin_round(round, unscorable=unscorable)
        chosen = Chosen(Turnout(()))
        known = self._known(round, progress)

        def choice(able: Sequence[int], size: int) -> Sequence[int]:
            nonlocal known
            known = replace(known, able=np.array(able), size=size)
            if strategy.asked == "candidates":
                asked = strategy.candidates_of(known)
                known = self._told(known, sorted(map(int, asked)), progress, chosen)
                found = [client for client in known.able.tolist() if client in chosen.losses]
                known = replace(known, able=np.array(found, np.int64), size=min(size, len(found)))
            counts = Counter(map(int, strategy.choose(known) if known.size else ()))
            chosen.repeats = {client: count for client, count in sorted(counts.items()) if count > 1}
            return sorted(counts)

        if parts.schedule is None:
            able = parts.able(round)
            chosen.turnout = Turnout(tuple(choice(able, min(parts.context.cohort_size, len(able)))))
        else:
            chosen.turnout = parts.schedule.plan(round, progress.clock, choose=choice)
        cohort = chosen.turnout.cohort
        if strategy.asked == "cohort" and cohort:
            known = self._told(known, list(cohort), progress, chosen)
        chosen.bytes_down = sum(size for client, size in chosen.sent.items() if client not in cohort)
        chosen.known = known
        return chosen

    def remembered(self, chosen: Chosen, present: Sequence[int], changes: Mapping[int, Tensor]) -> Tree:
        """Returns what is kept of a round for the choices of later ones.

        Args:
            chosen: for the round.
            present: the clients that have taken part.
            changes: how each of them has changed the parameters, where the strategy needs that.
        """
        if chosen.known is None or isinstance(self._strategy, Uniform):
            return {}
        asked = {*chosen.turnout.cohort, *chosen.turnout.left_out} if present else set[int]()
        known = replace(chosen.known, unanswered=tuple(sorted(asked - set(present))))
        own = self._strategy.own_after(known, present, changes)
        return replace(chosen.known.after(present), own=own).memory(self._strategy.name)

    def _samples(self, round: int) -> np.ndarray:
        parts = self._parts
        found = parts.sizes[:, 0] if parts.samples_in is None else parts.samples_in(round)
        return found[: parts.num_clients]

    def _known(self, round: int, progress: Progress) -> Known:
        parts = self._parts
        known = Known.remembered(progress.remembered, self._strategy.name, self._samples(round))
        generator = parts.context.streams.generator("selection", round)
        if parts.schedule is None:
            return replace(known, round=round, generator=generator)
        seconds = [parts.schedule.time_us(client, progress.clock) / 1e6 for client in range(parts.num_clients)]
        return replace(known, round=round, generator=generator, seconds=np.array(seconds))

    def _told(self, known: Known, clients: list[int], progress: Progress, chosen: Chosen) -> Known:
        """Finds the losses of clients at the model that they would receive."""
        common, served = self._parts.config.algorithm.served(progress.server, self._parts.context)
        own = trees_of(served, clients)
        scores = self._federation.evaluate(common, (), False, own, clients, losses=True)
        chosen.unscored |= self._federation.unscored
        found = {}
        for client, splits in scores.items():
            (statistics,) = splits["train"].values()
            if statistics.n:
                values = statistics.metrics()
                found[client] = values["loss"], values["square"]
        everybody = num_bytes(common)
        chosen.sent = {client: everybody + num_bytes(own.get(client, {})) for client in clients}
        chosen.losses = {client: loss for client, (loss, _) in found.items()}
        assert not isinstance(self._strategy, Uniform)
        chosen.bytes_up += _NUMBER * self._strategy.numbers * len(found)
        return known.told(found)
