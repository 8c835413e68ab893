"""FedRS: a local softmax in which the logits of classes that a client lacks count less."""

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


class FedRS(FineTuned):
    """FedRS (restricted softmax): federated averaging whose clients hold back the weights of classes that they lack.

    With z the logits, client k minimises the cross-entropy of its restricted softmax

        CE(alpha_k z, y) = -log( e^{alpha_ky z_y} / sum_c e^{alpha_kc z_c} )
        alpha_kc = 1 for the classes that the client has,  alpha for those that it lacks

    In the softmax of federated averaging a class that the client lacks is pushed down by every sample and pulled up by
    none. Here the push on its weights is alpha times as strong; with alpha = 0 there is none, and the class stays in
    the softmax with the logit 0. Predictions are those of z.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. With ``finetune_epochs`` each client fine-tunes the
    final model on the cross-entropy of z.

    z is scaled whole, with the bias of the last layer if it has one. The paper's last layer has none.

    References:
        Li, Zhan: FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data, KDD 2021, its
        restricted softmax (eq. 8 according to public code).
    """

    name: Literal["fedrs"] = "fedrs"
    citation: ClassVar[str] = "Li and Zhan, KDD 2021"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "it scales logits by which classes a client has"}

    alpha: float = setting(
        0.5, "alpha", "factor of the logits of classes that a client lacks; 1 is federated averaging", ge=0, le=1
    )
    scaling: Literal["missing", "counts"] = setting(
        "missing",
        "",
        "what is scaled: the classes that the client lacks (paper), or each class by its count, with alpha_kc = alpha "
        "+ (1 - alpha) n_c / max n (official code)",
        unless={"alpha": (1,)},
    )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        if self.alpha == 1:
            return await super().local_update(client, model)
        network = client.task.network
        counts = class_counts(client.examples().y, network.head_shape[0])
        factors = self.factors(counts).to(model[network.parameter_names[0]])
        trained = await client.train(model, self.objective, frozen={"factors": factors})
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def factors(self, counts: Tensor) -> Tensor:
        """Returns alpha_kc, shape (C,).

        Args:
            counts: n_c, shape (C,), float64, not all 0.
        """
        shares = counts / counts.max() if self.scaling == "counts" else (counts > 0).to(counts)
        return torch.lerp(torch.full_like(counts, self.alpha), torch.ones_like(counts), shares)

    @property
    def objective(self) -> Sum:
        """CE(alpha_k z, y)."""
        return loss() if self.alpha == 1 else function(self._restricted)

    def _restricted(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        return task.loss_of(frozen["factors"] * task.logits(model, batch), batch)
