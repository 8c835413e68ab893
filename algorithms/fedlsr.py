"""FedLSR: clients learn labels by two views of an image mixed and sharpened, and the views are to say the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor, logaddexp
from torch.nn.functional import nll_loss

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from rayfl.aggregation.exact_sum import Weighted
from rayfl.data.images.augment import AugmentConfig
from rayfl.engine.client import Client
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait

_LEAST = 1e-6
"""Smallest probability of q, so that no gradient explodes."""
_ONE_VIEW = {"rotate and flip and jitter": ((0, False, 0),)}


class FedLSR(FineTuned):
    """FedLSR (local self-regularization): federated averaging whose clients hold on to what two views of an image say.

    With z and z' the logits of an image and of the image mildly changed, and l drawn evenly from 0 to 1 for each step,
    clients mix what the model says and sharpen it,

        p = l softmax(z) + (1 - l) softmax(z'),    s_c = p_c^2 / sum_j p_j^2

    and with q = softmax(z / T), likewise q' from z', and C classes, they go down the mean over samples of

        CE(s, y) + gamma_t / C JS(q, q') + lambda_e / 2 [H(softmax(q)) + H(softmax(q'))]
        CE(s, y) = log sum_c e^(s_c) - s_y,    gamma_t = gamma min(1, t / t_w)

    where JS is the divergence of Jensen and Shannon, and H the entropy. So s and q count as logits, as in the authors'
    code: no sample has a loss above log(C - 1 + e), however wrong its label is. With ``bounded: false`` it is -log s_y,
    and H(q).

    Images are changed by the section ``augment``, and for z' by the method's options on top. Without any of these
    (``rotate=0``) there is one view, z' = z, of any kind of input.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. Evaluated: w (``global``), and with
    ``finetune_epochs`` w fine-tuned by each client on the plain cross-entropy.

    References:
        Jiang, Sun, Wang, Liu: Towards Federated Learning against Noisy Labels via Local Self-Regularization, CIKM 2022
        (arXiv 2208.12807); formulas of the authors' code.
    """

    name: Literal["fedlsr"] = "fedlsr"
    citation: ClassVar[str] = "Jiang et al., CIKM 2022"
    needs: ClassVar[Mapping[Trait, str]] = {
        "classes": "it learns one class a sample",
        "distribution": "it mixes and sharpens probabilities of classes",
    }

    consistency_weight: float = setting(
        0.4, "gamma", "last weight of the divergence of the views; 0: none", ge=0, unless=_ONE_VIEW
    )
    ramp_rounds: int = setting(
        20,
        "t_w",
        "rounds in which gamma_t rises to gamma; 0: none",
        ge=0,
        unless={"consistency_weight": (0,), **_ONE_VIEW},
    )
    temperature: float = setting(
        1 / 3,
        "T",
        "temperature of q; below 1 it is sharper",
        gt=0,
        unless={
            "consistency_weight and entropy_weight": ((0, 0),),
            "rotate and flip and jitter and entropy_weight": ((0, False, 0, 0),),
        },
    )
    entropy_weight: float = setting(0.0, "lambda_e", "weight of the entropy; 0: none (official code: 0.6)", ge=0)
    bounded: bool = setting(True, "", "whether probabilities count as logits in the cross-entropy and the entropy")
    rotate: float = setting(30.0, "", "largest angle of the second view's random rotation, in degrees", ge=0, le=180)
    flip: bool = setting(False, "", "mirror left and right in the second view with probability 1/2")
    jitter: float = setting(0.0, "", "strength of random colours in the second view (augment.jitter)", ge=0, le=1)

    def views(self, weak: AugmentConfig) -> Sequence[AugmentConfig]:
        changes = {"rotate": self.rotate, "flip": self.flip, "jitter": self.jitter}
        if not any(changes.values()):
            return ()
        return weak, weak.model_copy(update={name: value for name, value in changes.items() if value})

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        several, risen = client.context.views is not None, 1.0
        if self.ramp_rounds:
            risen = min(1.0, client.round / self.ramp_rounds)
        trained = await client.train(
            model,
            self.objective if several else self.of_one_view,
            frozen={"weight": self.consistency_weight * risen} if several else None,
            draw=shares if several else None,
            views=client.context.views,
        )
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    @property
    def objective(self) -> Sum:
        """The losses of two views."""
        return function(self._compared)

    @property
    def of_one_view(self) -> Sum:
        """The same where both views are one."""
        return function(self._alone)

    def _compared(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        one, other = (task.logits(model, replace(batch, x=batch.x[:, view])) for view in (0, 1))
        share = draw["share"].to(one)
        mixed = logaddexp(one.log_softmax(-1) + share.log(), other.log_softmax(-1) + (1 - share).log())
        losses = self.labelled(mixed, batch.y)
        first, second = (self.sharpened(logits) for logits in (one, other))
        mean = ((first + second) / 2).log()
        apart = (first * (first.log() - mean) + second * (second.log() - mean)).mean(-1) / 2
        losses = losses + frozen["weight"] * apart
        return batch.mean(losses + self.entropy_weight / 2 * (self.entropy(first) + self.entropy(second)))

    def _alone(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        logits = task.logits(model, batch)
        losses = self.labelled(logits.log_softmax(-1), batch.y)
        return batch.mean(losses + self.entropy_weight * self.entropy(self.sharpened(logits)))

    def labelled(self, mixed: Tensor, y: Tensor) -> Tensor:
        """CE(s, y) by sample, shape (b,).

        Args:
            mixed: log p, shape (b, C).
            y: labels, shape (b,).
        """
        sharp = (2 * mixed).log_softmax(-1)
        return nll_loss(sharp.exp().log_softmax(-1) if self.bounded else sharp, y, reduction="none")

    def sharpened(self, logits: Tensor) -> Tensor:
        """q, shape (b, C)."""
        return (logits / self.temperature).softmax(-1).clamp(min=_LEAST)

    def entropy(self, probabilities: Tensor) -> Tensor:
        """H by sample, shape (b,)."""
        logs = probabilities.log_softmax(-1) if self.bounded else probabilities.log()
        return -(logs.exp() * logs).sum(-1)


def shares(generator: np.random.Generator, steps: int) -> Tree:
    """l by step, above 0."""
    return {"share": 1 - generator.random(steps)}
