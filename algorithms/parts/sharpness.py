"""Local steps of sharpness-aware minimization (SAM), for methods of any exchange."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from algorithms.base import Algorithm, setting
from algorithms.parts.uphill import loss_uphill, of_length
from rayfl.objectives import Sum, function, loss
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Task


class Sharpness(Algorithm):
    """A method whose local steps follow the gradient at w + e, where e goes the distance rho uphill (FedSAM)."""

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
