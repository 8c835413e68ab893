"""DeComFL: all clients step along the same directions, and send the slopes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from torch import Tensor

from algorithms.base import setting
from algorithms.parts.common_steps import CommonSteps
from algorithms.parts.settings import limits_without_effect
from rayfl.engine.round_context import RoundContext

_SEED_BYTES = 8
"""Of the seed of a step, from which all its directions are made."""


class DeComFL(CommonSteps):
    """DeComFL: what travels are slopes along directions that all clients have in common, however large the model is.

    A round has K steps and P directions z_kp of standard normal entries for each, made of seeds that the server draws.
    Every client i of the cohort S begins with the model w and takes the K steps. f_i is the mean loss over the
    mini-batch of a step:

        g_ikp = ( f_i(w_i + mu z_kp) - f_i(w_i) ) / mu
        w_i <- w_i - eta / P sum_p g_ikp z_kp

    It sends its slopes, goes back to w, and the server finds

        w <- w - eta / P sum_{k, p} ( sum_{i in S} q_i g_ikp ) z_kp

    A client makes w from the model that it knew last, by the seeds and the mean slopes of all rounds since then. Losses
    are those of models in evaluation mode: dropout is off, and running statistics stay as the model began.

    Server: model w, and each client's last round. Client: nothing. Down: seeds, and mean slopes of missed rounds. Up:
    g_ikp.

    References:
        Li, Ying, Liu, Dong, Yang: Achieving Dimension-Free Communication in Federated Learning via Zeroth-Order
        Optimization, ICLR 2025 (arXiv:2405.15861).
    """

    name: Literal["decomfl"] = "decomfl"
    citation: ClassVar[str] = "Li et al., ICLR 2025"

    local_steps: int = setting(1, "K", "local steps of a round, the same for all clients", ge=1)
    directions: int = setting(5, "P", "directions of a local step", ge=1)

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return limits_without_effect("local_steps", self.local_steps, context.train)

    @property
    def shape(self) -> tuple[int, int]:
        return self.local_steps, self.directions

    def down_bytes(self, missed: int, like: Tensor) -> int:
        seeds = (missed + 1) * self.local_steps * _SEED_BYTES
        return seeds + missed * self.local_steps * self.directions * like.itemsize
