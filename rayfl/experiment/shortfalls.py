"""Looks, before a run starts, whether its simulated devices leave enough clients for its aggregation."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from rayfl.engine.shortfall import fewest, fixes, shortfall
from rayfl.errors import ConfigError
from rayfl.selection.strategies import Uniform

if TYPE_CHECKING:
    from rayfl.experiment.parts import Parts

_log = logging.getLogger("rayfl")
_ROUNDS, _DRAWS = 100, 100_000
"""Rounds, and clients times rounds, that are planned to see in how many of them clients are missing."""


def check_shortfalls(parts: Parts) -> None:
    """Refuses runs all of whose rounds would be given up for lack of clients, and warns of those where some would.

    Rounds are planned as the run plans them, with messages as long as the server's tree, and uniformly drawn clients
    where the section ``selection`` says otherwise.

    Args:
        parts: of the experiment.

    Raises:
        ConfigError: with the number of clients, or of rounds, and the fix.
    """
    context, schedule, rounds = parts.context, parts.schedule, parts.config.train.rounds
    if schedule is None or parts.buffered or (needed := fewest(context)) < 2:
        return
    rule = f"aggregator={context.aggregator.name}" if context.secure_sum is None else "compression=secure_aggregation"
    if (able := schedule.able()) < needed:
        raise ConfigError(
            f"{rule} needs {needed} clients in a round, and {able} of the {context.num_clients} simulated devices can "
            f"ever be done in time: raise system.deadline_s, or {fixes(context)}"
        )
    clock, lost, planned = parts.first_clock(parts.initial_server()), 0, min(rounds, _ROUNDS)
    planned = max(min(planned, _DRAWS // context.num_clients), 1)
    for round in range(planned):
        turnout = schedule.plan(round, clock)
        clock = clock.after(turnout.duration_us, ())
        asked = tuple(sorted({*turnout.cohort, *turnout.left_out}))
        known = replace(context, round=round, asked=asked)
        lost += not turnout.cohort or bool(shortfall(known, turnout.cohort))
    instead = f"{fixes(context)} or system.over_sampling, or let fewer clients be lost (system)"
    if lost == rounds and isinstance(parts.config.selection, Uniform):
        raise ConfigError(f"{rule}: in no round enough clients answer on these devices: {instead}")
    if lost:
        _log.warning(
            "%s: in about %d of %d rounds too few clients answer on these devices; such a round is given up, and "
            "nothing is trained in it: %s",
            rule, lost, planned, instead,
        )  # fmt: skip
