"""Flash: a server that steps faster where changes grow, and clients that stop when they learn no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import setting
from algorithms.fedopt import Adaptive
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree, interpolate, map_leaves, subtract
from rayfl.tasks.base import Predictor


def drift_of(drift: Tensor, squares: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """The new d of a parameter: beta_3 d + (1 - beta_3) (Delta^2 - v), each element with a beta_3 of its own.

    Args:
        drift: d of the round before.
        squares: Delta^2.
        old: u, v of the round before.
        new: v of this round.
    """
    excess = squares - new
    total = excess.abs() + old
    kept = torch.where(total > 0, old / total, 1)
    return kept * drift + (1 - kept) * excess


class Flash(Adaptive):
    """Flash: FedAdam whose steps are longer where squared changes exceed their average, and clients that stop early.

    With Delta = sum_k q_k (x_k - w), the mean change of the cohort's models, for every parameter

        m <- beta_1 m + (1 - beta_1) Delta
        v <- beta_2 v + (1 - beta_2) Delta^2
        d <- beta_3 d + (1 - beta_3) (Delta^2 - v),    beta_3 = u / (|Delta^2 - v| + u)
        w <- w + eta_g m / (sqrt(v) - min(d, c sqrt(v)) + tau)

    where u is v of the round before. A change that is suddenly large, as after a drift, makes d large and the step
    long; where changes shrink, d is negative and the step short. d is 0 at first. Of a change so large that d is as
    large as sqrt(v), c (``most_drift``) keeps the step from turning round.

    A client that has validation samples scores its model on them after each local epoch e, and stops as soon as its
    loss l_e has fallen by too little, or has risen:

        l_{e-1} - l_e < gamma / e,    e >= 2

    It sends the model that it has then. A client without validation samples makes all local epochs, and so do all with
    ``least_progress: null``. Buffers (running statistics) are averaged. With ``finetune_epochs`` each client fine-tunes
    the final model, for all of these.

    Server: model w, m, v and d. Client: nothing. Down: w. Up: x_k and n_k. Evaluated: w (``global``).

    References:
        Panchal, Choudhary, Mitra, Mukherjee, Sarkhel, Mitra, Guan: Flash: Concept Drift Adaptation in Federated
        Learning, ICML 2023.
    """

    name: Literal["flash"] = "flash"
    citation: ClassVar[str] = "Panchal et al., ICML 2023"
    no_example_privacy: ClassVar[str] = "a client stops by its losses on validation samples, which no noise covers"
    no_gradient: ClassVar[str] = "how many epochs of steps they have made is not known"
    server_keeps: ClassVar[str] = "w, m, v, d"

    server_lr: float = setting(0.01, "eta_g", "learning rate of the server", gt=0)
    second_decay: float = setting(0.99, "beta_2", "decay of v", ge=0, lt=1)
    initial_accumulator: float = setting(1e-6, "v_0", "v before the first round", ge=0, kept=True)
    most_drift: float | None = setting(
        0.9,
        "c",
        "d counts as at most this part of sqrt(v), so that no step turns round; null: d as it is, as in public codes",
        ge=0,
        lt=1,
    )
    least_progress: float | None = setting(
        0.004,
        "gamma",
        "a client stops after the local epoch e, from the second on, if its validation loss has fallen by less than "
        "gamma / e since the one before; null: it never does",
        ge=0,
    )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if self.least_progress is None or context.train.local_epochs > 1:
            return ()
        return ("algorithm.least_progress has no effect: with train.local_epochs=1 there is no second epoch",)

    def moments(self, zeros: Tree) -> Tree:
        return {**super().moments(zeros), "drift": zeros}

    def second(self, v: Tensor, squares: Tensor) -> Tensor:
        return self.second_decay * v + (1 - self.second_decay) * squares

    def stepped(self, model: Tree, mean: Tree, moments: Tree) -> tuple[Tree, Tree]:
        change, old = subtract(mean, model), moments["second"]
        squares = map_leaves(torch.square, change)
        first = interpolate(change, moments["first"], self.first_decay)
        second = map_leaves(self.second, old, squares)
        drift = map_leaves(drift_of, moments["drift"], squares, old, second)

        def moved(w: Tensor, m: Tensor, v: Tensor, d: Tensor) -> Tensor:
            root = v.sqrt()
            bounded = d if self.most_drift is None else torch.minimum(d, self.most_drift * root)
            return w + self.server_lr * m / (root - bounded + self.adaptivity)

        kept = {"first": first, "second": second, "drift": drift, "steps": int(moments["steps"]) + 1}
        return map_leaves(moved, model, first, second, drift), kept

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received model as long as that makes it better."""
        losses: list[float] = []

        async def stops(trained: Tree) -> bool:
            losses.append((await client.score(Predictor.of(trained), "validation")).loss)
            return len(losses) > 1 and losses[-2] - losses[-1] < (self.least_progress or 0) / len(losses)

        watched = self.least_progress is not None and len(client.examples("validation")) > 0
        trained = await client.train(model, self.objective, each_epoch=stops if watched else None)
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)
