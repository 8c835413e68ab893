"""FedDecorr: features whose dimensions are not correlated within a mini-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from rayfl.objectives import Sum, function, loss
from rayfl.tasks.base import Batch, Task, Trait

EPSILON = 1e-8
"""Added to variances: a feature that is constant in a mini-batch has no correlation, and a gradient of 0."""


class FedDecorr(FineTuned):
    """FedDecorr: federated averaging with a penalty on correlated features, against dimensional collapse.

    With Z the features of a mini-batch, each of the d columns standardised to mean 0 and variance 1 over the n samples,
    clients minimise

        CE + beta/d^2 ||K||_F^2,    K = Z^T Z / n

    K is the matrix of correlations. Its diagonal is 1 whatever the model, so that the penalty's gradient is that of the
    squared correlations between different features. Features are the input of the last linear layer.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. With ``finetune_epochs`` each client fine-tunes the
    final model on the cross-entropy alone.

    A mini-batch of one sample has no correlations: its penalty is 0. Of two samples all are 1 or -1, so that the
    penalty has hardly a gradient. A feature that is constant over the mini-batch, such as an inactive ReLU, has a
    correlation of 0 with every feature.

    References:
        Shi, Liang, Zhang, Tan, Bai: Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous
        Federated Learning, ICLR 2023, L_FedDecorr and the objective with it.
    """

    name: Literal["feddecorr"] = "feddecorr"
    citation: ClassVar[str] = "Shi et al., ICLR 2023"
    needs: ClassVar[Mapping[Trait, str]] = {"features": "it penalizes correlations between the features of samples"}

    decorrelation_weight: float = setting(0.1, "beta", "weight of the penalty; 0 is federated averaging", ge=0)
    form: Literal["paper", "code"] = setting(
        "paper",
        "",
        "1/d^2 ||K||_F^2, or the authors' code: the mean square of K off its diagonal, times (n - 1)^2 / n",
        unless={"decorrelation_weight": (0,)},
    )

    @property
    def objective(self) -> Sum:
        """CE + beta/d^2 ||K||_F^2, from one forward pass."""
        return loss() if self.decorrelation_weight == 0 else function(self._decorrelated)

    def _decorrelated(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, logits = task.head_inputs_and_logits(model, batch)
        return task.loss_of(logits, batch) + self.decorrelation_weight * self.penalty(features, batch)

    def penalty(self, features: Tensor, batch: Batch) -> Tensor:
        """Returns the penalty without its weight, a scalar.

        Args:
            features: shape (b, d).
            batch: tells samples from padding.
        """
        width, dimensions = features.shape
        shares = features.new_full((width,), 1 / width) if batch.mask is None else batch.mask / batch.mask.sum()
        shares = shares.to(features)[:, None]
        centred = features - (shares * features).sum(0)
        variances = (shares * centred.square()).sum(0)
        # each row has the root of its share of K, and padding has none
        rows = shares.sqrt() * centred / (variances + EPSILON).sqrt()
        # of Z^T Z and Z Z^T, which have the same norm, the smaller one
        correlations = rows.T @ rows if dimensions <= width else rows @ rows.T
        squares = correlations.square().sum()
        if self.form == "paper":
            return squares / dimensions**2
        apart = squares - rows.square().sum(0).square().sum()
        number = batch.size
        return (number - 1) ** 2 / number * apart / max(dimensions * (dimensions - 1), 1)
