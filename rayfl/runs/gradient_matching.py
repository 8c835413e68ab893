"""Finds samples whose gradient is that of a client's message: gradient inversion.

Source: Zhu, Liu, Han: Deep Leakage from Gradients, NeurIPS 2019 (squared distance, L-BFGS); Geiping, Bauermeister,
Dröge, Moeller: Inverting Gradients, NeurIPS 2020 (cosine, total variation, signed steps of Adam). Written from memory:
the papers' texts were not at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from rayfl.tasks.base import Batch, Model, Task

Objective = Literal["cosine", "l2"]
"""In what two gradients are to agree: their direction, or everything."""
Labels = Literal["known", "inferred"]
"""Whether the attacker has the labels, or infers them from the gradient of the head's bias."""

_RATE, _DECAY, _MILESTONES = 0.1, 0.1, (3 / 8, 5 / 8, 7 / 8)
"""Adam's first learning rate, the factor on it, and after which shares of the iterations."""
_HISTORY = 100
"""Steps that L-BFGS remembers."""
_LEAST = 1e-12


@dataclass(frozen=True)
class Leak:
    """What an attacker knows.

    Attributes:
        task: of classification, with the network.
        model: that the client received, on the device; its buffers are not changed.
        gradient: what the message says of the mean gradient, by name of a parameter.
        labels: of the samples, int64 of shape (n,); their order means nothing.
    """

    task: Task
    model: Model
    gradient: Mapping[str, Tensor]
    labels: Tensor

    def gradient_of(self, x: Tensor, graph: bool = False) -> list[Tensor]:
        """Returns the mean gradient on inputs with the known labels, in the order of :attr:`gradient`.

        Args:
            x: shape (n, *input shape).
            graph: whether it can be differentiated.
        """
        moved = {name: self.model[name].detach().requires_grad_() for name in self.gradient}
        others = {name: leaf.clone() for name, leaf in self.model.items() if name not in moved}
        with torch.enable_grad():
            loss = self.task.loss({**moved, **others}, Batch(x, self.labels))
            made = torch.autograd.grad(loss, list(moved.values()), create_graph=graph, materialize_grads=True)
        return list(made)


@dataclass(frozen=True)
class Attack:
    """How samples are looked for.

    Attributes:
        objective: ``cosine``, which does not see how long the message is, or ``l2``.
        iterations: of Adam (cosine) or L-BFGS (l2), at least 1.
        restarts: how often to begin from other noise; the one with the smallest objective counts.
        seed: of the noise.
        smoothness: weight of the total variation of images beside the cosine.
        report: called after each iteration; L-BFGS may end before the last.
    """

    objective: Objective = "cosine"
    iterations: int = 1000
    restarts: int = 1
    seed: int = 0
    smoothness: float = 1e-3
    report: Callable[[], None] = field(default=lambda: None, compare=False)

    def found(self, leak: Leak, low: Tensor, high: Tensor, bounded: bool) -> tuple[Tensor, float]:
        """Returns the reconstructed inputs, shape (n, *input shape), and their objective; not finite if all diverged.

        Args:
            leak: what is known.
            low: what the model sees of the smallest numbers, the shape of one input; the search is in units of
                ``high - low``.
            high: of the largest ones, of the same shape.
            bounded: whether inputs are images, which are within both; else ``low`` is their middle, and ``high`` a
                deviation above it.
        """
        generator = torch.Generator().manual_seed(self.seed)
        shape = (len(leak.labels), *low.shape)
        best, least = low.expand(shape), float("inf")
        for _ in range(self.restarts):
            start = torch.rand(shape, generator=generator) if bounded else torch.randn(shape, generator=generator)
            unit, value = self._descended(leak, start.to(low.device), low, high, bounded)
            if value < least:
                best, least = low + unit * (high - low), value
        return best, least

    def _descended(self, leak: Leak, unit: Tensor, low: Tensor, high: Tensor, bounded: bool) -> tuple[Tensor, float]:
        """Returns what one start leads to, in units of the range, and its objective."""
        target, unit = list(leak.gradient.values()), unit.requires_grad_()
        weight = self.smoothness if self.objective == "cosine" and bounded and unit.dim() > 2 else 0.0

        def value() -> Tensor:
            made = leak.gradient_of(low + unit * (high - low), graph=True)
            if self.objective == "l2":
                return squared(made, target)
            distance = 1 - cosine(made, target)
            return distance + weight * total_variation(unit) if weight else distance

        if self.objective == "l2":
            self._by_lbfgs(unit, value)
        else:
            self._by_adam(unit, value, bounded)
        with torch.no_grad():
            unit.clamp_(0, 1) if bounded else unit.nan_to_num_()
        return unit.detach(), float(value().detach())

    def _by_adam(self, unit: Tensor, value: Callable[[], Tensor], bounded: bool) -> None:
        """Steps by the signs of gradients; images stay in [0, 1]."""
        optimizer = torch.optim.Adam([unit], lr=_RATE)
        milestones = [int(share * self.iterations) for share in _MILESTONES]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, _DECAY)
        for _ in range(self.iterations):
            (slope,) = torch.autograd.grad(value(), unit)
            unit.grad = slope.sign()
            optimizer.step()
            schedule.step()
            if bounded:
                with torch.no_grad():
                    unit.clamp_(0, 1)
            self.report()

    def _by_lbfgs(self, unit: Tensor, value: Callable[[], Tensor]) -> None:
        """Searches along lines; where a line leads nowhere, forgets the steps before, and ends where that is no use."""

        def closure() -> float:
            found = value()
            (unit.grad,) = torch.autograd.grad(found, unit)
            return float(found.detach())

        optimizer, fresh = _lbfgs(unit), True
        for _ in range(self.iterations):
            before = unit.detach().clone()
            optimizer.step(closure)
            self.report()
            if not torch.equal(before, unit):
                fresh = False
            elif fresh:
                return
            else:
                optimizer, fresh = _lbfgs(unit), True


def _lbfgs(unit: Tensor) -> Any:
    options: dict[str, Any] = {"line_search_fn": "strong_wolfe", "tolerance_grad": 0, "tolerance_change": 0}
    return torch.optim.LBFGS([unit], max_iter=1, history_size=_HISTORY, **options)


def squared(made: list[Tensor], target: list[Tensor]) -> Tensor:
    """Returns the squared distance of two gradients, as a share of the second's squared length; a scalar."""
    apart = torch.stack([(one - other).square().sum() for one, other in zip(made, target, strict=True)]).sum()
    return apart / torch.stack([one.square().sum() for one in target]).sum().clamp(min=_LEAST)


def cosine(made: list[Tensor], target: list[Tensor]) -> Tensor:
    """Returns the cosine of the angle between two gradients, each taken as one vector; a scalar."""
    product = torch.stack([(one * other).sum() for one, other in zip(made, target, strict=True)]).sum()
    lengths = [torch.stack([one.square().sum() for one in side]).sum().sqrt() for side in (made, target)]
    return product / (lengths[0] * lengths[1]).clamp(min=_LEAST)


def total_variation(x: Tensor) -> Tensor:
    """Returns the mean absolute difference of neighbouring pixels, summed over the axes; a scalar.

    Args:
        x: images of shape (n, channels, ...).
    """
    parts = [x.diff(dim=axis).abs().mean() for axis in range(2, x.dim()) if x.shape[axis] > 1]
    return torch.stack(parts).sum() if parts else x.sum() * 0


def inferred_labels(slope: Tensor, probability: Tensor, count: int) -> Tensor:
    """Returns what the gradient of the head's bias says of the labels, int64 of shape (count,), ascending.

    Of a mean cross-entropy it is the mean probability of each class minus its share of the samples. So a class with a
    negative number is there (Zhao, Mopuri, Bilen: iDLG, 2020), and how often follows from the mean probability, for
    which that of inputs of noise stands. Of a single sample this is exact.

    Args:
        slope: the gradient, shape (C,).
        probability: of each class on average, shape (C,).
        count: how many samples there are.
    """
    counts = torch.zeros(len(slope), dtype=torch.int64)
    seen = [int(place) for place in slope.argsort() if slope[place] < 0][:count]
    counts[seen] = 1
    expected = count * (probability - slope).cpu()
    for _ in range(count - len(seen)):
        counts[int((expected - counts).argmax())] += 1
    return torch.repeat_interleave(torch.arange(len(slope)), counts)
