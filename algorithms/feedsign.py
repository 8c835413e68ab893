"""FeedSign: all clients look along the same direction, and vote on which way to go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from torch import Tensor

from algorithms.base import setting
from algorithms.parts.common_steps import CommonSteps
from algorithms.parts.settings import limits_without_effect
from algorithms.parts.zeroth_order import Difference
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.round_context import RoundContext


class FeedSign(CommonSteps):
    """FeedSign: a round is a vote on which way to go along a direction, and messages have one bit.

    Round t has one direction z of standard normal entries, which everybody makes from the number of the round. Client k
    finds the slope of the mean loss f over a mini-batch, and votes with its sign:

        g_k = ( f(w + mu z) - f(w - mu z) ) / (2 mu)
        w <- w - eta sign( sum_{k in S} sign(g_k) ) z

    Where votes are equal the model stays as it is. A step is as long however small the slope is, so that eta is the
    length of steps. A client makes w from the model that it knew last, by the votes of all rounds since then. Losses
    are those of models in evaluation mode: dropout is off, and running statistics stay as the model began.

    Server: model w, and each client's last round. Client: nothing. Down: results of missed votes. Up: sign(g_k).

    References:
        Cai, Chen, Zhu: FeedSign: Robust Full-parameter Federated Fine-tuning of Large Models with Extremely Low
        Communication Overhead of One Bit, arXiv:2501.17610.
    """

    name: Literal["feedsign"] = "feedsign"
    citation: ClassVar[str] = "Cai et al., 2025"

    difference: Difference = setting(
        "central", "", "slopes from w - mu z and w + mu z (central, paper), or from w and w + mu z (forward)"
    )
    aggregation: Literal["samples", "uniform"] = setting(
        "uniform", "q_k", "weights of the votes: uniform, one each (paper); samples, n_k"
    )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        found = limits_without_effect("name", 1, context.train)
        return tuple(f"{one.partition(':')[0]}: a round of FeedSign has one local step" for one in found)

    @property
    def shape(self) -> tuple[int, int]:
        return 1, 1

    def down_bytes(self, missed: int, like: Tensor) -> int:
        return -(-missed // 8)

    def message(self, found: Weighted) -> Weighted:
        return Weighted({"table": found.tree["table"].sign()}, found.weight, size=1)

    def decided(self, mean: Tensor) -> Tensor:
        return mean.sign()
