"""MOON: features near those of the received model and away from those of the client's previous one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.objectives import Sum, function, loss
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch, Predictor, Task, Trait


class MOON(FineTuned):
    """MOON (model-contrastive federated learning): federated averaging with a contrastive term on features.

    With z(x) the features of the model in training, z_g(x) those of the received model and z_p(x) those of the model
    that the client trained when it was last sampled, both constants in evaluation mode, clients minimise

        CE + mu mean l,    l = -log( e^{cos(z, z_g)/tau} / (e^{cos(z, z_g)/tau} + e^{cos(z, z_p)/tau}) )

    In a client's first participation there is no such term. Features are the input of the last linear layer.

    Server: model w. Client: u_k, the model it last trained; never sent by itself. Down: w. Up: w_k and n_k. Evaluated:
    w (``global``). With ``finetune_epochs`` the final model is fine-tuned on the cross-entropy alone.

    References:
        Li, He, Song: Model-Contrastive Federated Learning, CVPR 2021, eq. 3 (l) and Algorithm 1.
    """

    name: Literal["moon"] = "moon"
    citation: ClassVar[str] = "Li et al., CVPR 2021"
    needs: ClassVar[Mapping[Trait, str]] = {"features": "it contrasts the features of samples"}
    client_keeps: ClassVar[str] = "u_k"

    contrast_weight: float = setting(1.0, "mu", "weight of the contrastive term; 0 is federated averaging", ge=0)
    temperature: float = setting(
        0.5, "tau", "temperature of the contrastive term", gt=0, unless={"contrast_weight": (0,)}
    )
    first_previous: Literal["none", "initial"] = setting(
        "none",
        "",
        "a client's previous model in its first participation: none, and no such term, or the initial model",
        unless={"contrast_weight": (0,)},
    )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        previous: Tree | None = client.state.get("previous")
        if previous is None and self.first_previous == "initial":
            previous = client.initial_model()
        if self.contrast_weight == 0 or previous is None:
            trained = await client.train(model, loss())
        else:
            trained = await client.train(model, self.objective, frozen={"received": model, "previous": previous})
        client.state["previous"] = copy(trained)
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    @property
    def objective(self) -> Sum:
        """CE + mu mean l, from one forward pass of each model."""
        return function(self._contrasted)

    def _contrasted(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, logits = task.head_inputs_and_logits(model, batch)
        received, previous = (
            task.head_inputs_and_logits(frozen[name], batch, training=False)[0] for name in ("received", "previous")
        )
        contrast = batch.mean(contrastive(features, received, previous, self.temperature))
        return task.loss_of(logits, batch) + self.contrast_weight * contrast


def contrastive(features: Tensor, positive: Tensor, negative: Tensor, temperature: float) -> Tensor:
    """l of eq. 3, as softplus((cos(z, z_p) - cos(z, z_g)) / tau), which does not overflow; shape (b,).

    Args:
        features: z, shape (b, f).
        positive: z_g, shape (b, f).
        negative: z_p, shape (b, f).
        temperature: tau.
    """
    near, far = (F.cosine_similarity(features, other, dim=-1, eps=1e-8) for other in (positive, negative))
    return F.softplus((far - near) / temperature)
