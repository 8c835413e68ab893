"""FedSAM: local steps of sharpness-aware minimization."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from algorithms.parts.uphill import loss_uphill, of_length
from rayfl.engine.tasks import Batch, Task
from rayfl.engine.terms import Sum, function, loss
from rayfl.params import Tree


class FedSAM(FineTuned):
    """FedSAM: federated averaging whose local steps take the gradient where the loss nearby is high.

    A local step on a mini-batch, whose mean loss is f, follows the gradient at a point at distance rho uphill:

        g = grad f(w),    e = rho g / ||g||,    w <- w - eta grad f(w + e)

    The norm is that of all parameters as one vector, and e is a constant: no second derivative is taken. Both passes
    have the same samples, with the same augmentation and the same masks of dropout. With ``adaptive`` it is FedASAM, in
    which the distance is measured in units of the weights:

        e = rho T^2 g / ||T g||,    T = |w| + eta_T for weights,  1 for biases

    Momentum, weight decay, clipping and the other optimizers are applied to the second gradient as they are to the only
    one of federated averaging; none of them enters e. A step costs two passes. Running statistics are recorded by the
    first pass alone, at w. Where g is 0, e is 0.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. With ``finetune_epochs`` each client fine-tunes the
    final model by plain steps.

    References:
        Qu, Li, Duan, Liu, Tang, Lu: Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022, FedSAM.
        Caldarola, Caputo, Ciccone: Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022,
        FedSAM and FedASAM.
    """

    name: Literal["fedsam"] = "fedsam"
    citation: ClassVar[str] = "Qu et al., ICML 2022"

    radius: float = setting(0.05, "rho", "length of e; 0 is federated averaging", ge=0)
    adaptive: bool = setting(
        False, "", "FedASAM: measure e in units of the weights, with a larger rho", unless={"radius": (0,)}
    )
    weight_floor: float = setting(
        0.01,
        "eta_T",
        "what T has in addition to |w|, so that weights of 0 move too",
        ge=0,
        only={"adaptive": (True,)},
        unless={"radius": (0,)},
    )

    @property
    def objective(self) -> Sum:
        """f(w + e), whose gradient is that of f at w + e since e is a constant."""
        return loss() if self.radius == 0 else function(self._uphill)

    def _uphill(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        return loss_uphill(model, batch, task, self.perturbation).value

    def perturbation(self, weights: Tree, gradient: Tree) -> Tree:
        """Returns e, of the shapes of the gradient.

        Args:
            weights: w, read by ``adaptive`` alone.
            gradient: g.
        """
        scale: Tree = dict.fromkeys(gradient, 1.0)
        if self.adaptive:
            scale |= {name: weights[name].abs() + self.weight_floor for name in gradient if not _is_bias(name)}
        scaled = {name: scale[name] * leaf for name, leaf in gradient.items()}
        length = of_length(self.radius, scaled)
        return {name: length * scale[name] * leaf for name, leaf in scaled.items()}


def _is_bias(name: str) -> bool:
    """Whether a parameter is a bias by its name, as PyTorch's layers call theirs."""
    return "bias" in name.rpartition(".")[2]
