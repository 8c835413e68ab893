"""The rules of optimizers, in place, fused by PyTorch into one pass over memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from rayfl.errors import MethodError
from rayfl.params import Tree, from_leaves, leaves

OptimizerName = Literal["sgd", "adam", "adamw"]
SLOTS: Mapping[str, tuple[str, ...]] = {"sgd": ("momentum",), "adam": ("m", "v"), "adamw": ("m", "v")}
"""Names of the tensors that an optimizer keeps for every parameter, in addition to the number of its steps."""


@dataclass(frozen=True)
class Rule:
    """How a step moves parameters along a gradient; PyTorch's definitions.

    Attributes:
        lr: learning rate.
        optimizer: ``sgd``, ``adam`` or ``adamw`` (Adam with decoupled weight decay).
        momentum: of SGD.
        dampening: of SGD's momentum.
        nesterov: whether SGD looks ahead.
        weight_decay: added to the gradient as a multiple of the parameters; for AdamW it shrinks them by itself.
        betas: decay of Adam's two moments.
        eps: added to the root of Adam's second moment.
        bounds: interval to which values are clipped after every step.
    """

    lr: float
    optimizer: OptimizerName = "sgd"
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    bounds: tuple[float, float] | None = None

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of what is kept for every parameter."""
        return () if self.optimizer == "sgd" and not self.momentum else SLOTS[self.optimizer]

    @property
    def counts(self) -> bool:
        """Returns whether it matters how many steps were made."""
        return self.optimizer != "sgd" or self.dampening > 0

    @property
    def still(self) -> bool:
        """Returns whether a gradient of zero moves nothing and changes nothing that is kept."""
        return not self.slots and not self.weight_decay and self.bounds is None

    def step(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        slots: Sequence[list[Tensor]],
        steps: Tensor,
        own: float = 0.0,
    ) -> None:
        """Takes one step of contiguous tensors of equal sizes, which PyTorch's kernels do not check.

        Args:
            parameters: changed in place.
            gradients: left in no defined state.
            slots: what is kept, changed in place; as many lists as :attr:`slots` has names.
            steps: how many steps these parameters have made, this one included; a scalar of type float32.
            own: added to the gradients as a multiple of the parameters, for SGD.
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
        else:
            assert not own  # it is added with round-off, along which Adam would go a part of its learning rate
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
    """How some of the trained tensors are treated; None stands for what holds for the others.

    Attributes:
        lr: learning rate.
        momentum: momentum of SGD.
        weight_decay: see :class:`Rule`.
        bounds: interval to which the values are clipped after every step.
        optimizer: another optimizer; its other options (dampening, betas, ...) are those of the training section.
    """

    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    bounds: tuple[float, float] | None = None
    optimizer: OptimizerName | None = None

    def applied(self, rule: Rule) -> Rule:
        """The rule of the group's tensors.

        Raises:
            MethodError: when momentum is given and the optimizer is not SGD, which alone has it.
        """
        made = _changed(rule, self)
        if self.momentum and made.optimizer != "sgd":
            raise MethodError(
                f"momentum={self.momentum} is given for what {made.optimizer} trains, which has betas in its place: "
                "drop it, or train that with ParameterGroup(optimizer='sgd', ...)"
            )
        return made


@lru_cache
def _changed(rule: Rule, group: ParameterGroup) -> Rule:
    """Returns the rule with what a group has of its own; one object for all clients that ask for the same."""
    return replace(rule, **{name: value for name, value in vars(group).items() if value is not None})


Groups = tuple[tuple[str, ParameterGroup], ...]
"""First keys (or paths) of the trained tree, and how what lies under them is treated."""


def key_of(path: str) -> str:
    """The first key of a path in the trained tree; empty for a tree without entries."""
    key, mark, _ = path.partition("/")
    return key if mark else ""


def rule_of(path: str, rule: Rule, groups: Groups) -> Rule:
    """The rule of one tensor."""
    found = (group for key, group in groups if path == key or path.startswith(f"{key}/"))
    return next(found, ParameterGroup()).applied(rule)


def clipped(gradients: Sequence[Tensor], max_norm: float, stacked: bool = False) -> list[Tensor]:
    """The gradients times min(1, max_norm / (norm + 1e-6)), as ``torch.nn.utils.clip_grad_norm_`` has it.

    Args:
        gradients: all of them.
        max_norm: largest Euclidean norm of all together.
        stacked: whether dimension 0 steps clients, each with a norm of its own.
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
    """What an optimizer keeps of a client from one pass to the next.

    Attributes:
        slots: by name of the slot and path, tensors.
        steps: by first key of the trained tree, how many steps were made.
    """

    slots: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: Mapping[str, Any], slots: Collection[str]) -> OptimizerState:
        """Returns what a client's state holds of an optimizer.

        Args:
            stored: what :meth:`stored` has made.
            slots: the names of all that the optimizers of the pass keep.
        """
        if set(slots) <= _OF_SGD:
            buffers = dict(leaves(stored))
            # Only whether there was a step before matters to SGD.
            return cls({"momentum": buffers} if buffers else {}, dict.fromkeys(map(key_of, buffers), 1))
        found = {name: dict(leaves(stored[name])) for name in slots if name in stored}
        return cls(found, {key: int(count) for key, count in stored.get("count", {}).items()})

    def stored(self, keys: Collection[str] | None = None) -> Tree:
        """For a client's state: the tree of SGD's momentum buffers, or a tree for each slot and the numbers of steps.

        Args:
            keys: first keys of the trained tree of which something is kept; None for all.
        """

        def wanted(path: str) -> bool:
            return keys is None or path.partition("/")[0] in keys

        trees = {name: from_leaves({p: t for p, t in kept.items() if wanted(p)}) for name, kept in self.slots.items()}
        if set(trees) <= _OF_SGD:
            return trees.get("momentum", {})
        counts = {key: count for key, count in self.steps.items() if wanted(key)}
        return {**trees, "count": counts} if counts else {}
