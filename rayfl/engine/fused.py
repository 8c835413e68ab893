"""SGD in one pass over memory: the bits of :mod:`rayfl.engine.sgd`, at a third of its time on large models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import is_

import torch
from torch import Tensor

from rayfl.engine.requests import ParameterGroup
from rayfl.engine.sgd import SGD, clipped, step_in_place
from rayfl.engine.workspace import Workspace
from rayfl.params import Layout, leaves


class FusedSGD:
    """The update rule of one request on one flat buffer of parameters and one of momentum.

    PyTorch's fused kernel rounds as the separate operations do except in the last elements of a tensor, those that
    fill no whole vector of the processor. Here every tensor is followed by the padding of its layout, and so has no
    such elements.

    Args:
        sgd: the rule.
        layout: where the tensors lie in the buffers.
        moved: the paths of the layout that are moved, in the order in which ``sgd`` knows them.
        parameters: flat, changed in place by every step; zeros in the padding.
        velocity: flat momentum buffers, changed in place; None where no group has momentum.
        workspace: memory for gradients.
    """

    def __init__(
        self,
        sgd: SGD,
        layout: Layout,
        moved: Sequence[str],
        parameters: Tensor,
        velocity: Tensor | None,
        workspace: Workspace,
    ) -> None:
        self._workspace = workspace
        self._max_norm = sgd.max_norm
        self._layout, self._moved, self._parameters = layout, moved, parameters
        self._room: list[Tensor] | None = None
        self._parts = [
            _Part(rule, members, layout, [moved[i] for i in members], parameters, velocity)
            for rule, members in sgd.members.items()
        ]

    @property
    def room(self) -> list[Tensor]:
        """Where the next step's gradients may be written, in the order of ``moved``: it then moves nothing else."""
        if self._room is None:
            self._room = self._settled_room()
        return self._room

    def _settled_room(self) -> list[Tensor]:
        # Nothing but gradients is ever written to it, so that the padding stays zero.
        flat = self._workspace.buffer("gradients", self._layout, self._parameters.device)
        for part in self._parts:
            part.settle(flat)
        views = dict(leaves(self._layout.views(flat)))
        return [views[path] for path in self._moved]

    def step(self, gradients: list[Tensor]) -> None:
        """One step; the gradients come in the order of ``moved`` and are left as they are."""
        if self._max_norm is not None:
            gradients = clipped(gradients, self._max_norm)
        elif self._room is not None and all(map(is_, gradients, self._room)):
            for part in self._parts:
                part.step_settled()
            return
        for part in self._parts:
            part.step(gradients)


class _Part:
    """The tensors under one rule: first those that need no padding, then copies of the gradients of the others."""

    def __init__(
        self,
        rule: ParameterGroup,
        members: Sequence[int],
        layout: Layout,
        paths: Sequence[str],
        parameters: Tensor,
        velocity: Tensor | None,
    ) -> None:
        shapes = dict(zip(layout.paths, layout.shapes, strict=True))
        padded = layout.padded(parameters)
        places = list(zip(members, paths, strict=True))
        whole = [(i, path) for i, path in places if padded[path].numel() == shapes[path].numel()]
        ragged = [(i, path) for i, path in places if padded[path].numel() != shapes[path].numel()]

        def views(flat: Tensor) -> list[Tensor]:
            own = layout.padded(flat)
            return [own[path].view(shapes[path]) for _, path in whole] + [own[path] for _, path in ragged]

        self._rule = rule
        self._flat = list(paths) == list(layout.paths)
        self._settled: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        self._layout, self._paths, self._buffers = layout, paths, (parameters, velocity)
        self._whole = [i for i, _ in whole]
        self._ragged = [i for i, _ in ragged]
        self._parameters = views(parameters)
        self._velocity = views(velocity) if rule.momentum and velocity is not None else []
        self._copies = [torch.zeros_like(padded[path]) for _, path in ragged]
        self._places = [
            copy[: shapes[path].numel()].view(shapes[path])
            for copy, (_, path) in zip(self._copies, ragged, strict=True)
        ]

    def settle(self, gradients: Tensor) -> None:
        """Prepares for gradients that lie in a flat buffer as the parameters do, zeros in the padding."""
        parameters, velocity = self._buffers
        velocity = velocity if self._rule.momentum else None

        def split(flat: Tensor) -> list[Tensor]:
            padded = self._layout.padded(flat)
            return [flat] if self._flat else [padded[path] for path in self._paths]

        self._settled = split(parameters), split(gradients), [] if velocity is None else split(velocity)

    def step_settled(self) -> None:
        """One step along what lies in the buffer."""
        fused_step(self._rule, *self._settled)
        self._keep_bounds()

    def step(self, gradients: Sequence[Tensor]) -> None:
        """One step on this part of all gradients."""
        if self._ragged:
            torch._foreach_copy_(self._places, [gradients[i] for i in self._ragged])
        ready = [gradients[i].contiguous() for i in self._whole] + self._copies
        fused_step(self._rule, self._parameters, ready, self._velocity)
        self._keep_bounds()

    def _keep_bounds(self) -> None:
        if self._rule.bounds is not None:
            for parameter in self._parameters:
                parameter.clamp_(*self._rule.bounds)


def fused_step(
    rule: ParameterGroup,
    parameters: list[Tensor],
    gradients: list[Tensor],
    velocity: list[Tensor],
    further_decay: float = 0.0,
) -> None:
    """PyTorch's fused SGD step on contiguous tensors (which it does not check); bounds are left to the caller.

    Args:
        rule: learning rate, momentum and weight decay.
        parameters: changed in place.
        gradients: of the same sizes.
        velocity: changed in place; not read without momentum.
        further_decay: added to the rule's weight decay.
    """
    assert rule.lr is not None
    torch._fused_sgd_(
        parameters,
        gradients,
        velocity if rule.momentum else [],
        lr=rule.lr,
        momentum=rule.momentum or 0.0,
        weight_decay=(rule.weight_decay or 0.0) + further_decay,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


@lru_cache
def is_exact(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the fused step gives the bits of the separate operations here, found by trying.

    It does on processors whose PyTorch kernels multiply and add in one rounding in both; on GPUs nothing is tried.
    """
    if device.type != "cpu" or dtype not in (torch.float32, torch.float64):
        return False
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 4096, generator=generator, dtype=dtype)
    for momentum, weight_decay in ((0.0, 0.0), (0.0, 0.01), (0.9, 0.0), (0.9, 0.01)):
        rule = ParameterGroup(0.1, momentum, weight_decay)
        one, other = drawn.clone(), drawn.clone()
        step_in_place(rule, [one[0]], [one[1]], [one[2]])
        fused_step(rule, [other[0]], [other[1]], [other[2]])
        if not torch.equal(one, other):
            return False
    return True
