"""FAT: federated averaging whose clients train on samples that their model is made to get wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from algorithms.parts.adversarial import Adversarial
from algorithms.parts.masks import kept_counts
from algorithms.parts.slopes import buffers
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.objectives import Sum, function, loss
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch, Predictor, Task


class FAT(Adversarial, FineTuned):
    """FAT (federated adversarial training): a model for inputs that somebody has changed to mislead it.

    Of each mini-batch of n samples a client attacks the first k = kappa n, rounded down, by steps uphill (PGD)

        x_{i+1} = P( x_i + alpha sign( grad_x CE(w(x_i), y) ) ),    x_0 = x

    where P cuts each number off at a distance of eps from x, and at the least and the largest value that the client's
    training samples have in its place. Then it goes down the mean of the cross-entropy over all n samples and these k,

        ( sum_{j <= n} CE(w(x_j), y_j) + sum_{j <= k} CE(w(x_j'), y_j) ) / (n + k),    x' = x_J

    with x' constant. kappa = 0 is federated averaging.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. Evaluated: w (``global``), and w on test samples that
    are attacked (``attacked``). With ``finetune_epochs`` each client fine-tunes the final model on samples as they are.

    References:
        Zizzo, Rawat, Sinn, Buesser: FAT: Federated Adversarial Training, arXiv 2012.01791 (SpicyFL at NeurIPS 2020).
        Madry, Makelov, Schmidt, Tsipras, Vladu: Towards Deep Learning Models Resistant to Adversarial Attacks, ICLR
        2018, for the attack.
    """

    name: Literal["fat"] = "fat"
    citation: ClassVar[str] = "Zizzo et al., SpicyFL 2020"

    attacked_share: float = setting(
        1.0,
        "kappa",
        "share of a mini-batch's samples that are attacked; 0 is federated averaging",
        ge=0,
        le=1,
        unless={"radius": (0,)},
    )
    keep_clean: bool = setting(
        True,
        "",
        "learn these samples as they are, too; false: attacked alone, in one pass with the others",
        unless={"radius": (0,), "attacked_share": (0,)},
    )

    def idle_settings(self) -> list[str]:
        found = super().idle_settings()
        if not self.radius or self.attacked_share:
            return found
        idle = ["start"] if self.score_attacked else ["radius", "unit", "step", "steps", "start"]
        why = "algorithm.attacked_share is 0" + ("" if self.score_attacked else " & algorithm.score_attacked is false")
        fields = type(self).model_fields
        changed = [name for name in idle if getattr(self, name) != fields[name].default]
        return [*found, *(f"algorithm.{name} has no effect: {why}" for name in changed)]

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        if not self.radius or not self.attacked_share:
            return await super().local_update(client, model)
        trained = await client.train(model, self.objective, frozen=self.limits(client), draw=self.starts(client))
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    @property
    def objective(self) -> Sum:
        """The cross-entropy of samples and of attacked ones."""
        return function(self._adversarial) if self.radius and self.attacked_share else loss()

    def _adversarial(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        places = torch.arange(len(batch.x), device=batch.x.device)
        size = torch.as_tensor(batch.size, device=batch.x.device)
        count = kept_counts(self.attacked_share, size)
        moved = self.attacked(model, batch, task, frozen, draw)
        if not self.keep_clean:
            chosen = (places < count).view(-1, *[1] * (moved.ndim - 1))
            return task.loss(model, replace(batch, x=torch.where(chosen, moved, batch.x)))
        # one sample at least, of the weight 0 if it need be: a mean over none is no number
        mask = (places < count.clamp(min=1)).to(moved)
        clean = task.loss(model, batch)
        # running statistics are those of samples as they are
        others = task.loss({**model, **copy(buffers(model, task))}, Batch(moved, batch.y, mask))
        return (batch.size * clean + count * others) / (batch.size + count)
