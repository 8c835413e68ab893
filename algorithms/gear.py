"""GEAR: adversarial training in which samples of a client's rare classes need larger margins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from algorithms.parts.adversarial import Adversarial
from algorithms.parts.prototypes import class_counts, memberships
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.objectives import Sum, function, loss
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task


class GEAR(Adversarial, FineTuned):
    """GEAR (margin-based federated adversarial training): rare classes have larger margins on attacked samples.

    A client attacks each mini-batch by steps uphill (PGD)

        x_{i+1} = P( x_i + alpha sign( grad_x CE(w(x_i), y) ) ),    x_0 = x

    where P cuts each number off at a distance of eps from x, and at the least and the largest value that the client's
    training samples have in its place. On the attacked samples alone, x' = x_J, it goes down the cross-entropy of
    logits z of which the true class's is made smaller by a margin,

        CE( z(x') - m_y e_y, y ),    m_y = delta min_c n_c^{1/4} / n_y^{1/4}

    with n_c the client's training samples of class c, the least over classes that it has, and e_y the y-th unit
    vector: the rarest class has the margin delta. eps = 0 leaves margins on samples as they are, and with
    delta = 0, too, it is federated averaging.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. Evaluated: w (``global``), and w on test samples that
    are attacked (``attacked``). With ``finetune_epochs`` each client fine-tunes the final model on samples as they are.

    References:
        Chen, Zhang, Lyu: GEAR: A Margin-based Federated Adversarial Training Approach, FL-AAAI 2022.
        Cao, Wei, Gaidon, Arechiga, Ma: Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss, NeurIPS
        2019, for margins of this form.
    """

    name: Literal["gear"] = "gear"
    citation: ClassVar[str] = "Chen et al., FL-AAAI 2022"

    margin: float = setting(0.8, "delta", "margin of the client's rarest class; 0: none", ge=0)

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        if not self.radius and not self.margin:
            return await super().local_update(client, model)
        network = client.task.network
        counts = class_counts(client.examples().y, network.head_shape[0])
        margins = self.margins(counts).to(model[network.parameter_names[0]])
        frozen = {**self.limits(client), "margins": margins}
        trained = await client.train(model, self.objective, frozen=frozen, draw=self.starts(client))
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def margins(self, counts: Tensor) -> Tensor:
        """m_c, shape (C,); of a class that the client lacks 0, which nothing reads.

        Args:
            counts: n_c, shape (C,), float64.
        """
        assumed = torch.where(counts > 0, counts, torch.inf)
        return torch.where(counts > 0, self.margin * (assumed.amin() / assumed).pow(0.25), 0.0)

    @property
    def objective(self) -> Sum:
        """CE(z(x') - m_y e_y, y)."""
        return function(self._margined) if self.radius or self.margin else loss()

    def _margined(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        moved = replace(batch, x=self.attacked(model, batch, task, frozen, draw))
        margins = frozen["margins"]
        return task.loss_of(task.logits(model, moved) - memberships(batch, margins) * margins, moved)
