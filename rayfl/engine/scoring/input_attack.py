"""Changes inputs by little so that a model gets them wrong: projected gradient ascent of its loss.

Sources: Madry, Makelov, Schmidt, Tsipras, Vladu: Towards Deep Learning Models Resistant to Adversarial Attacks, ICLR
2018; Carlini, Wagner: Towards Evaluating the Robustness of Neural Networks, S&P 2017, for the margin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class InputAttack:
    """Steps uphill on each sample's loss, within a ball around it: x_0 = x, x_{i+1} = P(x_i + alpha d_i).

    With the maximum norm d is the sign of the slope, with the Euclidean one the slope divided by its length. P brings a
    point back into the ball, then between the bounds, beyond which nothing is moved that is not there already.

    Attributes:
        radius: of the ball, in units.
        step: alpha, in units.
        steps: how many.
        norm: of the ball: the maximum norm, or the Euclidean one.
        loss: what goes up: -log p_y, whose slope is 0 where a model is as good as certain; or the margin
            max_{j != y} log p_j - log p_y, whose slope is not.
        unit: what a distance of 1 is, in the shape of an input or one that fits; 0 where inputs stay as they are.
        low: least values, in such a shape; None: no bounds.
        high: largest values.
    """

    radius: float
    step: float
    steps: int
    norm: Literal["linf", "l2"]
    loss: Literal["cross_entropy", "margin"]
    unit: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None

    def moved(self, x: Tensor, labels: Tensor, predictions: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Returns x after all steps; None where predictions have no slope in it.

        Args:
            x: inputs, the last dimensions those of one input, before them as many as there are.
            labels: int64 of shape (n,).
            predictions: log-probabilities of shape (n, C) of inputs of this shape, each of one input alone.
        """
        unit = self._like(self.unit, x)
        low, high = x.new_full((), -torch.inf), x.new_full((), torch.inf)
        if self.low is not None and self.high is not None:
            low, high = torch.minimum(x, self._like(self.low, x)), torch.maximum(x, self._like(self.high, x))
        found = x
        for _ in range(self.steps):
            slope = _slope(found, lambda at: self._losses(predictions(at), labels).sum())
            if slope is None:
                return None
            found = self._nearer(x, found + self.step * unit * self._direction(slope, unit), unit)
            found = torch.minimum(torch.maximum(found, low), high)
        return found

    def _losses(self, predictions: Tensor, labels: Tensor) -> Tensor:
        own = predictions.gather(1, labels[:, None])[:, 0]
        if self.loss == "cross_entropy":
            return -own
        return predictions.scatter(1, labels[:, None], -torch.inf).amax(1) - own

    @staticmethod
    def _like(values: np.ndarray, x: Tensor) -> Tensor:
        return torch.from_numpy(values).to(x)

    def _direction(self, slope: Tensor, unit: Tensor) -> Tensor:
        if self.norm == "linf":
            return slope.sign()
        slope = slope * unit  # of distances in units
        return slope / self._lengths(slope).clamp(min=torch.finfo(slope.dtype).tiny)

    def _nearer(self, x: Tensor, moved: Tensor, unit: Tensor) -> Tensor:
        """Returns the nearest points of the balls around x, by the units' measure."""
        if self.norm == "linf":
            return torch.minimum(torch.maximum(moved, x - self.radius * unit), x + self.radius * unit)
        away = torch.where(unit > 0, (moved - x) / torch.where(unit > 0, unit, 1), 0)
        return x + unit * away * (self.radius / self._lengths(away).clamp(min=self.radius))

    def _lengths(self, x: Tensor) -> Tensor:
        return x.square().sum(tuple(range(-self.unit.ndim, 0)), keepdim=True).sqrt()


def _slope(x: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor | None:
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        value = loss(at)
        if not value.requires_grad:
            return None
        (slope,) = torch.autograd.grad(value, at, allow_unused=True)
    return slope
