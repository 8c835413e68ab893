"""PyTorch's SGD (dampening 0, no Nesterov) in place on lists of tensors, with parameter groups and clipping."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from rayfl.engine.requests import ParameterGroup, TrainRequest


class SGD:
    """The update rule of one request, or of a stack of requests with equal rules.

    Args:
        request: gives learning rate, momentum, weight decay, groups and the limit of the gradient's norm.
        paths: paths of the tensors that are moved, in the order in which all methods take them.

    Attributes:
        max_norm: largest norm of the gradient; None for no limit.
        members: the tensors under each rule, by their places in ``paths``.
        has_momentum: whether any rule has momentum.
    """

    def __init__(self, request: TrainRequest, paths: Sequence[str]) -> None:
        self.max_norm = request.max_grad_norm
        members: dict[ParameterGroup, list[int]] = {}
        for i, path in enumerate(paths):
            members.setdefault(_rule(request, path), []).append(i)
        self.members = members
        self.has_momentum = any(rule.momentum for rule in members)

    def of(self, places: Sequence[int]) -> SGD:
        """The rule of some of the tensors alone, and of their gradient's norm alone.

        Args:
            places: which of ``paths``; from now on they count from 0.
        """
        part = copy(self)
        new = {place: i for i, place in enumerate(places)}
        found = {rule: [new[i] for i in members if i in new] for rule, members in self.members.items()}
        part.members = {rule: members for rule, members in found.items() if members}
        part.has_momentum = any(rule.momentum for rule in part.members)
        return part

    def step(
        self, parameters: list[Tensor], gradients: list[Tensor], velocity: list[Tensor], stacked: bool = False
    ) -> None:
        """One step.

        Args:
            parameters: moved in place.
            gradients: of the same shapes.
            velocity: momentum buffers, changed in place; empty where no group has momentum.
            stacked: whether dimension 0 counts clients, each with a gradient norm of its own.
        """
        if self.max_norm is not None:
            gradients = clipped(gradients, self.max_norm, stacked)
        if len(self.members) == 1:
            step_in_place(next(iter(self.members)), parameters, gradients, velocity)
            return
        for rule, members in self.members.items():
            own = [velocity[i] for i in members] if velocity else []
            step_in_place(rule, [parameters[i] for i in members], [gradients[i] for i in members], own)


def _rule(request: TrainRequest, path: str) -> ParameterGroup:
    """The rule of one tensor, without any None but that of the bounds."""
    group = next((g for key, g in request.groups if path == key or path.startswith(f"{key}/")), ParameterGroup())
    return ParameterGroup(
        request.lr if group.lr is None else group.lr,
        request.momentum if group.momentum is None else group.momentum,
        request.weight_decay if group.weight_decay is None else group.weight_decay,
        group.bounds,
    )


def step_in_place(
    rule: ParameterGroup, parameters: list[Tensor], gradients: list[Tensor], velocity: list[Tensor]
) -> None:
    """One step of tensors under one rule, operation by operation; ``velocity`` is empty without momentum."""
    if rule.weight_decay:
        gradients = list(torch._foreach_add(gradients, parameters, alpha=rule.weight_decay))
    if rule.momentum:
        torch._foreach_mul_(velocity, rule.momentum)
        torch._foreach_add_(velocity, gradients)
        gradients = velocity
    assert rule.lr is not None
    torch._foreach_add_(parameters, gradients, alpha=-rule.lr)
    if rule.bounds is not None:
        for parameter in parameters:
            parameter.clamp_(*rule.bounds)


def clipped(gradients: list[Tensor], max_norm: float, stacked: bool = False) -> list[Tensor]:
    """The gradients times min(1, max_norm / (norm + 1e-6)), as ``torch.nn.utils.clip_grad_norm_`` has it."""
    if not stacked:
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        return list(torch._foreach_mul(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0)))
    norms = torch.stack([g.flatten(1).norm(dim=1) if g.dim() > 1 else g.abs() for g in gradients]).norm(dim=0)
    scale = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    return [g * scale.view(-1, *[1] * (g.dim() - 1)) for g in gradients]
