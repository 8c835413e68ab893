"""Update rules of optimizers, in place, by PyTorch's fused kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from rayfl.errors import MethodError
from rayfl.optimization.elementwise import Chosen, ElementwiseOptimizer, Options, made
from rayfl.params import Tree, from_leaves, leaves

OptimizerName = Literal["sgd", "adam", "adamw", "adagrad", "lion", "rmsprop"]
SLOTS: Mapping[str, tuple[str, ...]] = {"sgd": ("momentum",), "adam": ("m", "v"), "adamw": ("m", "v")}
"""Names of the tensors that an optimizer of PyTorch's fused kernels keeps for every parameter."""


@dataclass(frozen=True)
class Rule:
    """An optimizer's update rule, as PyTorch defines it.

    Attributes:
        lr: learning rate.
        optimizer: ``sgd``, ``adam`` or ``adamw`` (Adam with decoupled weight decay), or one of
            :mod:`rayfl.optimization.elementwise`.
        momentum: of SGD.
        dampening: of SGD's momentum.
        nesterov: whether SGD looks ahead.
        weight_decay: L2 penalty, added to the gradient; where it is :attr:`decoupled`, the step shrinks the parameters
            by ``lr`` times it.
        betas: decay rates of Adam's two moments.
        eps: added to the root of Adam's second moment.
        bounds: interval to which parameters are clipped after every step.
        options: of an elementwise optimizer.
    """

    lr: float
    optimizer: str = "sgd"
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    bounds: tuple[float, float] | None = None
    options: Options = ()

    @property
    def elementwise(self) -> ElementwiseOptimizer | None:
        """Returns the optimizer, unless it is one of PyTorch's fused kernels."""
        return None if self.optimizer in SLOTS else made(Chosen(self.optimizer, self.options))

    @property
    def slots(self) -> tuple[str, ...]:
        """Returns the names of the optimizer's state tensors per parameter."""
        if (other := self.elementwise) is not None:
            return other.slots
        return () if self.optimizer == "sgd" and not self.momentum else SLOTS[self.optimizer]

    @property
    def counts(self) -> bool:
        """Returns whether the update depends on the number of steps taken."""
        if (other := self.elementwise) is not None:
            return other.counts
        return self.optimizer != "sgd" or self.dampening > 0

    @property
    def decoupled(self) -> bool:
        """Returns whether weight decay is no part of the gradient."""
        return self.optimizer == "adamw" or ((other := self.elementwise) is not None and other.decoupled)

    @property
    def still(self) -> bool:
        """Returns whether a zero gradient changes neither parameters nor state."""
        return self.optimizer == "sgd" and not self.momentum and not self.weight_decay and self.bounds is None

    def step(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        slots: Sequence[list[Tensor]],
        steps: Tensor,
        own: float = 0.0,
    ) -> None:
        """Takes one step. Tensors must be contiguous and of equal sizes, which PyTorch's kernels do not check.

        Args:
            parameters: changed in place.
            gradients: overwritten.
            slots: the state, changed in place; one list for each name in :attr:`slots`.
            steps: number of steps of these parameters, including this one; a float32 scalar.
            own: multiple of the parameters to add to the gradients, for SGD.
        """
        if self.optimizer == "sgd":
            torch._fused_sgd_(
                parameters,
                gradients,
                slots[0] if slots else [],
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay + own,
                dampening=self.dampening,
                nesterov=self.nesterov,
                maximize=False,
                is_first_step=bool(self.dampening and steps == 1),
            )
        elif (other := self.elementwise) is not None:
            assert not own
            if self.weight_decay and other.decoupled:
                torch._foreach_mul_(parameters, 1 - self.lr * self.weight_decay)
            # Where a network adds two parameters, such as an LSTM's biases, both have one gradient in one memory.
            if self.weight_decay and not other.decoupled:
                gradients = list(torch._foreach_add(gradients, parameters, alpha=self.weight_decay))
            elif len({gradient.data_ptr() for gradient in gradients}) < len(gradients):
                gradients = [gradient.clone() for gradient in gradients]
            other.step(parameters, gradients, slots, steps if other.counts else None, self.lr)
        else:
            assert not own  # adding it would leave round-off, which Adam would scale up to a part of its learning rate
            first, second = slots
            (torch._fused_adamw_ if self.optimizer == "adamw" else torch._fused_adam_)(
                parameters,
                gradients,
                first,
                second,
                [],
                [steps] * len(parameters),
                lr=self.lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=self.weight_decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )
        if self.bounds is not None:
            for parameter in parameters:
                parameter.clamp_(*self.bounds)


@dataclass(frozen=True)
class ParameterGroup:
    """A parameter group: options for some of the trained tensors; None stands for the default.

    Attributes:
        lr: learning rate.
        momentum: momentum of SGD.
        weight_decay: see :class:`Rule`.
        bounds: interval to which the values are clipped after every step.
        optimizer: another optimizer; its other options (dampening, betas, ...) come from the training section, those of
            ``optimizer_options`` only for the same one.
    """

    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    bounds: tuple[float, float] | None = None
    optimizer: OptimizerName | None = None

    def applied(self, rule: Rule) -> Rule:
        """Returns the update rule of the group's tensors.

        Raises:
            MethodError: when momentum is given for an optimizer other than SGD.
        """
        applied = _changed(rule, self)
        if self.momentum and applied.optimizer != "sgd":
            raise MethodError(
                f"momentum={self.momentum} is given for what {applied.optimizer} trains, which has options of its own "
                "in its place: drop it, or train that with ParameterGroup(optimizer='sgd', ...)"
            )
        return applied


@lru_cache
def _changed(rule: Rule, group: ParameterGroup) -> Rule:
    """Returns the rule with a group's options; cached, so that clients share it."""
    changed = {name: value for name, value in vars(group).items() if value is not None}
    if group.optimizer not in (None, rule.optimizer):
        changed["options"] = ()
    return replace(rule, **changed)


Groups = tuple[tuple[str, ParameterGroup], ...]
"""First keys (or paths) of the trained tree, and how what lies under them is treated."""


def key_of(path: str) -> str:
    """Returns the first key of a path in the trained tree; empty for a bare tensor."""
    key, mark, _ = path.partition("/")
    return key if mark else ""


def rule_of(path: str, rule: Rule, groups: Groups) -> Rule:
    """Returns the update rule of one tensor: that of the group with the longest path that it lies under."""
    found = {key: group for key, group in groups if path == key or path.startswith(f"{key}/")}
    return found.get(max(found, key=len, default=""), ParameterGroup()).applied(rule)


def clipped(gradients: Sequence[Tensor], max_norm: float, stacked: bool = False) -> list[Tensor]:
    """Returns the gradients times min(1, max_norm / (norm + 1e-6)), like ``torch.nn.utils.clip_grad_norm_``.

    Args:
        gradients: all of them.
        max_norm: largest global Euclidean norm.
        stacked: whether dimension 0 runs over clients, each with its own norm.
    """
    if not stacked:
        norm = torch.stack(torch._foreach_norm(list(gradients))).norm()
        return list(torch._foreach_mul(list(gradients), (max_norm / (norm + 1e-6)).clamp(max=1.0)))
    norms = torch.stack([g.flatten(1).norm(dim=1) if g.dim() > 1 else g.abs() for g in gradients]).norm(dim=0)
    scale = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    return [g * scale.view(-1, *[1] * (g.dim() - 1)) for g in gradients]


_OF_SGD = frozenset(SLOTS["sgd"])


@dataclass
class OptimizerState:
    """The state of a client's optimizer between two passes.

    Attributes:
        slots: state tensors by slot (such as ``momentum``) and path.
        steps: number of steps taken, by first key of the trained tree.
    """

    slots: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: Mapping[str, Any], slots: Collection[str]) -> OptimizerState:
        """Restores an optimizer's state from a client's state.

        Args:
            stored: the tree that :meth:`stored` has returned.
            slots: names of all slots of the pass's optimizers.
        """
        if set(slots) <= _OF_SGD:
            buffers = dict(leaves(stored))
            # SGD only needs to know whether there was a step before.
            return cls({"momentum": buffers} if buffers else {}, dict.fromkeys(map(key_of, buffers), 1))
        found = {name: dict(leaves(stored[name])) for name in slots if name in stored}
        return cls(found, {key: int(count) for key, count in stored.get("count", {}).items()})

    def stored(self, keys: Collection[str] | None = None) -> Tree:
        """Returns a tree for a client's state: SGD's momentum buffers, or one tree per slot and the numbers of steps.

        Args:
            keys: first keys of the trained tree whose state to store; None for all.

        Raises:
            MethodError: when tensors are to go on and to begin afresh of which Adam keeps one number of steps.
        """

        def wanted(path: str) -> bool:
            return keys is None or path.partition("/")[0] in keys

        trees = {name: from_leaves({p: t for p, t in kept.items() if wanted(p)}) for name, kept in self.slots.items()}
        if set(trees) <= _OF_SGD:
            return trees.get("momentum", {})
        # Tensors without a first key have one number of steps, under no name.
        found = {(key_of(path), wanted(path)) for kept in self.slots.values() for path in kept}
        if {("", True), ("", False)} <= found:
            raise MethodError(
                f"keep_optimizer={sorted(keys or ())} names some of the tensors that are no trees themselves, and Adam "
                "counts one number of steps for all of those: keep all of them, or put what is kept under a key"
            )
        counts = {key: count for key, count in self.steps.items() if wanted(key) or (key, True) in found}
        return {**trees, "count": counts} if counts else {}
