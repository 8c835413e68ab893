"""What the server makes of the sum of a mean: its private estimate, and the norm of the next round (``privacy``)."""

from __future__ import annotations

import torch

from rayfl.aggregation import privacy as private
from rayfl.aggregation.banded_noise import banded_noise
from rayfl.aggregation.discrete_sums import from_tree
from rayfl.aggregation.exact_sum import ExactSum
from rayfl.aggregation.tree_noise import Draw, tree_noise
from rayfl.engine.noised_sum import NoisedSum
from rayfl.engine.round_context import RoundContext
from rayfl.errors import RunError
from rayfl.params import Tree, from_leaves


def released(context: RoundContext, total: ExactSum, broadcast: Tree) -> Tree:
    """Returns the mean of the contributions; where the server adds noise (``privacy``), its private estimate.

    Of integers with noise (``privacy.mechanism``) it is what their sum stands for, over their number.

    Args:
        context: of the round.
        total: sum of the contributions.
        broadcast: what all clients received.
    """
    bound, mean = context.clip_norm, total.mean()
    if bound is None or context.privacy.local:
        return mean
    if (noised := NoisedSum.of(context, context.round)) is not None:
        return _out_of_the_sum(noised, mean, total.count, broadcast)
    deviation = context.privacy.sum_noise_of(context.cohort_size) * bound
    received = private.reference_of(mean, broadcast)
    return private.released(mean, received, total.count, context.cohort_size, deviation, _noise(context))


def _out_of_the_sum(noised: NoisedSum, mean: Tree, count: int, broadcast: Tree) -> Tree:
    integers, parts = from_tree(mean)
    received = private.reference_of(from_leaves(parts), broadcast)
    sizes = [part.numel() for part in parts.values()]
    change = noised.decoded((integers * count).round(), count, sum(sizes))
    split = zip(parts, torch.split(change, sizes), strict=True)
    made = {path: (received[path] + one.view_as(received[path])).to(received[path].dtype) for path, one in split}
    return from_leaves(made)


def _noise(context: RoundContext) -> Draw:
    privacy, streams, round = context.privacy, context.streams, context.round
    if privacy.noise == "banded":
        return banded_noise(streams, round, privacy.bands_of(context.num_clients, context.cohort_size))
    if privacy.noise != "independent":
        return tree_noise(streams, round, privacy.tree_rounds, every_node=privacy.noise == "honaker")
    generator = streams.generator("privacy", round)
    return lambda path, shape: generator.standard_normal(shape)


def next_norm(context: RoundContext, within: int, count: int) -> float | None:
    """Returns C of the next round; None where it does not move (``privacy.target_quantile``).

    Args:
        context: of the round.
        within: how many messages had a change no longer than C.
        count: messages.

    Raises:
        RunError: C leaves the range of numbers.
    """
    privacy, bound, expected = context.privacy, context.clip_norm, context.cohort_size
    if bound is None or privacy.target_quantile is None:
        return None
    try:
        return private.following(
            bound,
            within,
            count,
            expected,
            quantile=privacy.target_quantile,
            rate=privacy.clip_lr,
            deviation=privacy.count_noise_of(expected),
            generator=context.streams.generator("privacy.count", context.round),
        )
    except OverflowError as error:
        raise RunError(
            f"privacy.clip_lr={privacy.clip_lr:g}: the clipping norm of round {context.round + 1}, {bound:g}, would "
            "become too large or too small for a number: lower it"
        ) from error
