"""Stragglers: clients that do a part of a round's local work, as in the experiments of FedProx and FedNova."""

from __future__ import annotations

from fractions import Fraction

from rayfl.engine.updates.settings import TrainConfig
from rayfl.randomness import RandomStreams

WHOLE = Fraction(1)


def work_of(train: TrainConfig, streams: RandomStreams, round: int, client: int) -> Fraction:
    """Returns the share of its local work that a client does: x / E with x drawn from m to E, or all of it.

    E are the local epochs, m the least number for stragglers. The share is a function of seed, round and client.

    Args:
        train: the training section of the configuration.
        streams: all random streams.
        round: t, 0-indexed, in which the client began.
        client: its id.
    """
    if not train.stragglers:
        return WHOLE
    generator = streams.generator("stragglers", round, client)
    if generator.random() >= train.stragglers:
        return WHOLE
    return Fraction(int(generator.integers(train.straggler_epochs, train.local_epochs + 1)), train.local_epochs)


def steps_within(steps: int, work: Fraction) -> int:
    """Returns how many of a pass's local steps make up a share of the work, rounded up."""
    return -(-steps * work.numerator // work.denominator)
