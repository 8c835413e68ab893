"""Whether the server of a deployment could read the sum of a call by secure aggregation."""

from __future__ import annotations

import logging
import math

from algorithms.clients import Call, Replies
from rayfl.aggregation.discrete_sums import padded
from rayfl.engine.round_context import RoundContext
from rayfl.engine.shortfall import fixes, shortfall
from rayfl.errors import ClientError, MethodError

_log = logging.getLogger("rayfl")


def check_sum(context: RoundContext, call: Call, replies: Replies, numbers: int = 0) -> None:
    """Refuses a sum that could not be unmasked or would wrap, and says how many messages were clipped.

    A client that answers is supposed to stay until the sum is unmasked, and one that does not to have given its shares.

    Args:
        context: of the round.
        call: what was asked.
        replies: what came back.
        numbers: how many numbers a message may have, where epsilon depends on it; 0: any.

    Raises:
        ClientError: naming the numbers and the fix.
        MethodError: messages are longer than epsilon is for.
    """
    rule = context.secure_sum
    if rule is None or call.kind == "map":
        return
    where = f"the clients, round {context.round + 1}, {call.procedure}: compression=secure_aggregation"
    summed = sum(total.weight for total in replies.totals.values())
    weight = summed + sum(one["weight"] for one in replies.values.values())
    if weight > rule.most_weight:
        raise ClientError(
            f"{where}: the weights are {float(weight):.0f} in all, and sums of compression.bits={rule.bits} modulo "
            f"2^{rule.modulus_bits} may wrap from {rule.most_weight + 1} on: raise compression.modulus_bits, or lower "
            "compression.bits"
        )
    if why := shortfall(context, call.clients):  # of a method's own pass over a part of the cohort
        raise ClientError(f"{where}: {why}: {fixes(context)}, or let fewer clients drop out")
    sizes = (sum(math.prod(form[0]) for form in total.template.values() if form) for total in replies.totals.values())
    if numbers and (most := max(sizes, default=0)) > padded(numbers):
        raise MethodError(
            f"{where}: messages have {most} numbers, and epsilon is for {padded(numbers)} at most: the method's "
            "function summed(server) must return all that clients' messages are changes of"
        )
    count = sum(total.count for total in replies.totals.values()) + len(replies.values)
    if clipped := count - replies.within:
        _log.warning(
            "compression.clip=%g: in round %d %d of %d messages had entries that were clipped",
            rule.clip, context.round + 1, clipped, count,
        )  # fmt: skip
