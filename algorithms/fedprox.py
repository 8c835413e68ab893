"""FedProx: local training held near the received model by a proximal term."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from algorithms.parts.proximity import proximity
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.objectives import TRAINED, Sum, loss
from rayfl.params import Tree
from rayfl.tasks.base import Predictor


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
    no_example_privacy: ClassVar[str] = ""
    no_gradient: ClassVar[str] = ""

    proximal_weight: float = setting(0.01, "mu", "weight of the proximal term; 0 is federated averaging", ge=0)
    proximal_form: Literal["half_squared", "squared", "norm_per_layer", "smooth_l1_mean"] = setting(
        "half_squared",
        "",
        "1/2 ||.||^2 (original), ||.||^2 (SuPerFed papers), sum of unsquared norms per weight tensor (official "
        "SuPerFed code), or mean smooth L1 (official FedPHP code)",
        unless={"proximal_weight": (0,)},
    )
    finetune_proximal: bool = setting(
        False, "", "keep the proximal term in fine-tuning, towards the final model", unless={"proximal_weight": (0,)}
    )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        trained = await client.train(model, self.objective, frozen={"received": model})
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    @property
    def objective(self) -> Any:
        """CE + mu/2 ||theta - w||^2."""
        return loss() + self._proximal_term

    @property
    def finetune_objective(self) -> Any:
        """Cross-entropy, with ``finetune_proximal`` also the proximal term."""
        return (
            super().finetune_objective + self._proximal_term if self.finetune_proximal else super().finetune_objective
        )

    @property
    def _proximal_term(self) -> Sum:
        return self.proximal_weight * proximity(self.proximal_form, TRAINED, "received")
