"""FedLC: a local cross-entropy whose logits are calibrated by the client's own class counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from algorithms.parts.prototypes import class_counts
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.objectives import Sum, function, loss
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait

EXCLUDED = 1e4
"""In place of an infinite calibration: a softmax has the same bits, and logits stay finite."""


class FedLC(FineTuned):
    """FedLC (logits calibration): federated averaging whose local losses give rare classes larger margins.

    With z the logits and n_c the client's training samples of class c, a client minimises

        CE(z - tau n^{-1/4}, y) = log(1 + sum_{c != y} e^{z_c - z_y + Delta_yc})
        Delta_yc = tau (n_y^{-1/4} - n_c^{-1/4})

    The rarer the class of a sample, the further its logit has to be above those of frequent classes. A class of which
    the client has no sample has the limit of the formula: its calibration is infinite, so it is left out of the
    softmax, and the client does not push its logit down. Predictions are those of z.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. With ``finetune_epochs`` each client fine-tunes the
    final model on the cross-entropy without calibration.

    A client whose samples are all of one class has a loss of 0: but for weight decay it sends back what it received. It
    counts in the mean like the others.

    References:
        Zhang, Li, Li, Xu, Wu, Ding, Wu: Federated Learning with Label Distribution Skew via Logits Calibration, ICML
        2022, its calibrated cross-entropy (eq. 7 according to Flower's baseline).
    """

    name: Literal["fedlc"] = "fedlc"
    citation: ClassVar[str] = "Zhang et al., ICML 2022"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "it calibrates logits by the numbers of samples by class"}

    calibration_weight: float = setting(
        1.0, "tau", "weight of the calibration; 0 is federated averaging, with all classes in the softmax", ge=0
    )
    absent_count: float = setting(
        0.0,
        "",
        "n_c of a class that the client lacks; 0 leaves it out of the softmax (the limit of the formula)",
        ge=0,
        le=1,
        unless={"calibration_weight": (0,)},
    )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        if self.calibration_weight == 0:
            return await super().local_update(client, model)
        network = client.task.network
        counts = class_counts(client.examples().y, network.head_shape[0])
        calibration = self.calibration(counts).to(model[network.parameter_names[0]])
        trained = await client.train(model, self.objective, frozen={"calibration": calibration})
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def calibration(self, counts: Tensor) -> Tensor:
        """Returns tau n_c^{-1/4}, shape (C,).

        Args:
            counts: n_c, shape (C,), float64.
        """
        assumed = torch.where(counts > 0, counts, self.absent_count)
        # a class that is left out has a base of 1 only so that nothing divides by 0
        found = self.calibration_weight * torch.where(assumed > 0, assumed, 1).pow(-0.25)
        return torch.where(assumed > 0, found, EXCLUDED)

    @property
    def objective(self) -> Sum:
        """CE(z - tau n^{-1/4}, y)."""
        return loss() if self.calibration_weight == 0 else function(self._calibrated)

    def _calibrated(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        return task.loss_of(task.logits(model, batch) - frozen["calibration"], batch)
