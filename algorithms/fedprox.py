"""FedProx: local training held near the received model by a proximal term."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from algorithms.proximity import declared_form, penalty
from rayfl.aggregation import Weighted
from rayfl.engine.client import Client
from rayfl.objectives import Declared, declared_by
from rayfl.params import Tree
from rayfl.tasks import Batch, Model, Predictor, Task


class FedProx(FineTuned):
    """FedProx: federated averaging with a proximal term that holds local models near the received one.

    Clients minimise

        CE + mu/2 ||theta - w||^2

    with w the model they received. The term is part of the gradient, so momentum sees it; buffers (running
    statistics) are no part of theta. With ``finetune_epochs`` it is FedProx-LU: the final model is fine-tuned on
    the cross-entropy alone, or with ``finetune_proximal`` on the same loss, w being the final model.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k.

    Public code calls three other penalties by this name; ``proximal_form`` offers them for comparison: without
    the 1/2 (the SuPerFed papers), the sum of unsquared norms of the weight tensors (the official SuPerFed code,
    whose pull does not depend on the distance), the mean smooth L1 distance (the official FedPHP code, whose pull
    is divided by the number of elements). The default is the original.

    References:
        Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020,
        Algorithm 2 and its objective h_k(w; w^t).
    """

    name: Literal["fedprox"] = "fedprox"
    citation: ClassVar[str] = "Li et al., MLSys 2020"

    proximal_weight: float = setting(0.01, "mu", "weight of the proximal term; 0 is federated averaging", ge=0)
    proximal_form: Literal["half_squared", "squared", "norm_per_layer", "smooth_l1_mean"] = setting(
        "half_squared",
        "",
        "1/2 ||.||^2 (original), ||.||^2 (SuPerFed papers), sum of unsquared norms per weight tensor (official "
        "SuPerFed code), or mean smooth L1 (official FedPHP code)",
    )
    finetune_proximal: bool = setting(False, "", "keep the proximal term in fine-tuning, towards the final model")

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        trained = await client.train(model, self.objective, frozen={"received": model})
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def _form(self) -> Declared | None:
        plain = type(self)._proximity is FedProx._proximity
        return declared_form(self.proximal_form, self.proximal_weight) if plain else None

    @declared_by(_form)
    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        loss: Tensor = task.loss(model, batch)
        return loss + self._proximity(model, frozen["received"], task)

    def finetune_objective(self, moving: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        loss = super().finetune_objective(moving, batch, task, frozen, draw)
        return loss + self._proximity(moving, frozen["received"], task) if self.finetune_proximal else loss

    def _proximity(self, model: Model, received: Model, task: Task) -> Tensor | float:
        """mu times the penalty of those parameters that ``model`` has."""
        if not self.proximal_weight:
            return 0.0
        names = [name for name in task.network.parameter_names if name in model]
        moved, anchor = ({name: tree[name] for name in names} for tree in (model, received))
        return self.proximal_weight * penalty(self.proximal_form, moved, anchor)
