"""FedSOL: local steps take gradients where the model knows less of what the received one says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from algorithms.parts.transfer import distillation
from algorithms.parts.uphill import loss_uphill, of_length
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import Sum, function, loss
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait

_STILL = {"radius": (0,)}


class FedSOL(FineTuned):
    """FedSOL (stabilized orthogonal learning): local steps that proximal perturbations hardly change.

    A local step on a mini-batch, whose mean loss is f, follows the gradient at a point that lies uphill of a proximal
    loss, the divergence from what the received model w_g says:

        L = mean KL(softmax(z_g / tau) || softmax(z / tau)),    e = rho Lambda g / ||g||,    g = grad L(w)
        w <- w - eta grad f(w + e)

    e is a constant, and the norm is that of all parameters as one vector. Lambda scales each parameter by how far it
    has moved, in units of its column:

        Lambda = |w - w_g| / ||w - w_g||_2

    with the norm over a tensor's first dimension, the outputs of a layer; Lambda = 1 with ``adaptive: false``. Where g
    is 0, e is 0, and as long as w is w_g, as in a client's first step. With rho = 0 it is federated averaging.

    Momentum, weight decay, clipping and the other optimizers are applied to the gradient at w + e. A step costs two
    passes of the model, with the same augmentation and the same masks of dropout, and one of w_g, in evaluation mode.
    Running statistics are recorded by the first pass alone, at w. With ``finetune_epochs`` each client fine-tunes the
    final model by plain steps.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. Evaluated: w (``global``).

    References:
        Lee, Jeong, Kim, Oh, Yun: FedSOL: Stabilized Orthogonal Learning with Proximal Restrictions in Federated
        Learning, CVPR 2024 (arXiv 2308.12532); formulas of the authors' code.
    """

    name: Literal["fedsol"] = "fedsol"
    citation: ClassVar[str] = "Lee et al., CVPR 2024"
    needs: ClassVar[Mapping[Trait, str]] = {"distribution": "its proximal loss compares probabilities of classes"}

    radius: float = setting(1.0, "rho", "how far uphill; 0 is federated averaging", ge=0)
    adaptive: bool = setting(
        True,
        "Lambda",
        "scale the way uphill by how far each parameter has moved; false: it has the length rho",
        unless=_STILL,
    )
    perturbed: Literal["all", "head", "body"] = setting(
        "all", "", "parameters that e moves: all, those of the last linear layer, or all others", unless=_STILL
    )
    temperature: float = setting(3.0, "tau", "temperature of the divergence", gt=0, unless=_STILL)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.radius > 0 and not self._moved(task):
            raise ConfigError(
                f"algorithm.perturbed is {self.perturbed}, of which this model trains nothing: set "
                "algorithm.perturbed=all"
            )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        trained = await client.train(model, self.objective, frozen={"received": model} if self.radius > 0 else None)
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    @property
    def objective(self) -> Sum:
        """f(w + e), whose gradient is that of f at w + e since e is a constant."""
        return loss() if self.radius == 0 else function(self._uphill)

    def _uphill(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        received, moved = frozen["received"], self._moved(task)
        teacher = task.logits(received, batch, training=False)

        def proximal(at: Any, samples: Batch) -> Tensor:
            return distillation(task.logits(at, samples), teacher, samples, self.temperature)

        def perturbation(weights: Tree, gradient: Tree) -> Tree:
            part = {name: gradient[name] for name in moved}
            factor = of_length(self.radius, part)
            apart = {name: factor * leaf for name, leaf in part.items()}
            changes = {name: weights[name] - received[name] for name in weights}
            if self.adaptive:
                apart = {name: movement(changes[name]) * leaf for name, leaf in apart.items()}
            else:
                # At the received model all that g may be is rounding, of which a length would make a direction.
                away = torch.stack([change.abs().max() for change in changes.values()]).max() > 0
                apart = {name: away * leaf for name, leaf in apart.items()}
            return {name: apart.get(name, 0 * leaf) for name, leaf in gradient.items()}

        return loss_uphill(model, batch, task, perturbation, proximal).value

    def _moved(self, task: Task) -> tuple[str, ...]:
        """Names of the parameters that e moves."""
        head, names = set(task.network.head_names), task.network.parameter_names
        if self.perturbed == "all":
            return tuple(names)
        return tuple(name for name in names if (name in head) == (self.perturbed == "head"))


def movement(change: Tensor) -> Tensor:
    """Lambda of a tensor: the sizes of its elements over their norm along the first dimension.

    Args:
        change: w - w_g; where a column has not moved Lambda is 0.
    """
    sizes = change.abs()
    return F.normalize(sizes, dim=0) if sizes.dim() else sizes.sign()
