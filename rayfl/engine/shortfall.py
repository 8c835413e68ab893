"""Rounds of which the server could make no model, since too few of the clients have answered."""

from __future__ import annotations

from collections.abc import Collection

from rayfl.aggregation.secure_sum import shares_needed, without_enough
from rayfl.engine.round_context import RoundContext


def shortfall(context: RoundContext, answered: Collection[int]) -> str:
    """Returns why a round is given up in which these clients answer; empty if it is not.

    A robust rule needs a number of messages. A secure sum can be unmasked if enough of those answer that have shares of
    each client's secrets; a client that does not answer is supposed to have given its shares. Protocols abort a round
    that lacks clients, and begin the next one from the same model (Bonawitz et al.: Towards Federated Learning at
    Scale, MLSys 2019).

    Args:
        context: of the round.
        answered: clients; at least one.
    """
    robust, rule = context.aggregator, context.secure_sum
    if len(answered) < robust.least:
        return f"{len(answered)} clients answer, and aggregator={robust.name} needs {robust.least}"
    if rule is None or not context.asked:
        return ""
    if context.privacy.distributed and len(answered) < len(context.asked):
        return (
            f"{len(answered)} of {len(context.asked)} clients answer, and with "
            f"privacy.mechanism={context.privacy.mechanism} their noise is less than what epsilon counts on"
        )
    order = context.streams.generator("secure_sum", context.round).permutation(len(context.asked))
    ring = [context.asked[place] for place in order]
    short = without_enough(ring, answered, rule.neighbours, rule.threshold)
    if not short:
        return ""
    return (
        f"{len(answered)} of {len(ring)} clients answer, too few to unmask the sum: of those with shares of the "
        f"secrets of client {min(short)} a part of compression.threshold={rule.threshold:g} is needed"
    )


def fewest(context: RoundContext) -> int:
    """Returns with fewer clients than how many every round would be given up."""
    rule, least = context.secure_sum, context.aggregator.least
    return least if rule is None else max(least, shares_needed(rule.holders(context.cohort_size), rule.threshold))


def fixes(context: RoundContext) -> str:
    """Returns what to change so that fewer rounds are given up."""
    if context.secure_sum is not None:
        return "lower compression.threshold, raise compression.neighbours or train.clients_per_round"
    lower = "lower aggregator.malicious, " if getattr(context.aggregator, "malicious", 0) else ""
    return f"{lower}raise train.clients_per_round"
