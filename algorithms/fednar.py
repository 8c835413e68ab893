"""FedNAR: the gradient and the weight decay of a local step are clipped together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import TRAINED, frozen, loss, squared_distance
from rayfl.params import Tree, zeros_like
from rayfl.tasks.base import Predictor


class FedNAR(FineTuned):
    """FedNAR (normalized annealing regularization): federated averaging whose weight decay is clipped with gradients.

    A local step in round t on a mini-batch, whose mean loss is f, is

        v = grad f(w) + u_t w,    u_t = u_0 gamma^t
        w <- w - eta v min(1, A / ||v||)

    with the norm of all parameters as one vector. So no step is longer than eta A, however large u_0 was chosen, and
    where the gradient is long the weights decay less. Usual weight decay (``train.weight_decay``) is added after
    clipping (``train.max_grad_norm``); the options of this method stand in place of both. v, shortened, is what
    momentum, or another optimizer, is given.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. With u_0 = 0 it is federated averaging with clipped
    gradients. With ``finetune_epochs`` each client fine-tunes the final model by plain steps, as the section ``train``
    has them.

    References:
        Li, Li, Tian, Ho, Xing, Wang: FedNAR: Federated Optimization with Normalized Annealing Regularization,
        NeurIPS 2023 (arXiv 2310.03163); formulas of the authors' code.
    """

    name: Literal["fednar"] = "fednar"
    citation: ClassVar[str] = "Li et al., NeurIPS 2023"

    weight_decay: float = setting(0.01, "u_0", "weight decay in round 0, in place of train.weight_decay", ge=0)
    annealing: float = setting(
        1.0, "gamma", "factor on the weight decay per round", gt=0, le=1, unless={"weight_decay": (0,)}
    )
    max_norm: float = setting(
        10.0, "A", "largest norm of gradient and weight decay together, in place of train.max_grad_norm", gt=0
    )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        train = context.train
        asked = {"weight_decay": train.weight_decay or None, "max_grad_norm": train.max_grad_norm}
        own = {"weight_decay": "weight_decay", "max_grad_norm": "max_norm"}
        return [
            f"train.{name} holds for fine-tuning alone: local training has algorithm.{own[name]}"
            for name, value in asked.items()
            if value is not None
        ]

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        context = client.context
        known = {"origin": zeros_like(model), "decay": self.weight_decay * self.annealing**context.round}
        trained = await client.train(
            model,
            self.objective,
            frozen=known if self.weight_decay else None,
            settings=context.train.model_copy(update={"weight_decay": 0.0, "max_grad_norm": self.max_norm}),
        )
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    @property
    def objective(self) -> Any:
        """f + u_t/2 ||w||^2, whose gradient is v."""
        return loss() + frozen("decay") * squared_distance(TRAINED, "origin") / 2 if self.weight_decay else loss()
