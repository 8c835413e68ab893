"""SGD in one pass over memory: the bits of :mod:`rayfl.engine.sgd`, at a third of its time on large models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
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
    """The tensors under one rule."""

    def __init__(
        self,
        rule: ParameterGroup,
        members: Sequence[int],
        layout: Layout,
        paths: Sequence[str],
        parameters: Tensor,
        velocity: Tensor | None,
    ) -> None:
        self._rule, self._members, self._layout, self._paths = rule, members, layout, paths
        self._parameters, self._velocity = parameters, velocity if rule.momentum else None
        self._settled: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])

    def settle(self, gradients: Tensor) -> None:
        """Prepares for gradients that lie in a flat buffer as the parameters do, zeros in the padding."""
        whole = list(self._paths) == list(self._layout.paths)

        def split(flat: Tensor) -> list[Tensor]:
            padded = {} if whole else self._layout.padded(flat)
            return [flat] if whole else [padded[path] for path in self._paths]

        velocity = [] if self._velocity is None else split(self._velocity)
        self._settled = split(self._parameters), split(gradients), velocity

    def step_settled(self) -> None:
        """One step along what lies in the buffer."""
        fused_step(self._rule, *self._settled)
        self._keep_bounds(self._settled[0])

    @cached_property
    def _unsettled(self) -> _Unsettled:
        return _Unsettled.of(self._layout, self._members, self._paths, self._parameters, self._velocity)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """One step on this part of all gradients."""
        lists = self._unsettled
        fused_step(self._rule, lists.parameters, lists.ready(gradients), lists.velocity)
        self._keep_bounds(lists.parameters)

    def _keep_bounds(self, parameters: Sequence[Tensor]) -> None:
        if self._rule.bounds is not None:
            for parameter in parameters:
                parameter.clamp_(*self._rule.bounds)


@dataclass(frozen=True)
class _Unsettled:
    """What steps along gradients that lie anywhere need: first tensors without padding, then the others with it.

    Attributes:
        parameters: views of the buffer.
        velocity: the same of that of momentum.
        whole: places of the tensors without padding.
        ragged: those of the others.
        copies: room for their gradients, zeros in the padding.
        places: views of it with the gradients' shapes.
    """

    parameters: list[Tensor]
    velocity: list[Tensor]
    whole: list[int]
    ragged: list[int]
    copies: list[Tensor]
    places: list[Tensor]

    @staticmethod
    def of(
        layout: Layout, members: Sequence[int], paths: Sequence[str], parameters: Tensor, velocity: Tensor | None
    ) -> _Unsettled:
        """For the tensors of a buffer at ``paths``, which ``members`` counts."""
        shapes = dict(zip(layout.paths, layout.shapes, strict=True))
        padded = layout.padded(parameters)
        places = list(zip(members, paths, strict=True))
        whole = [(i, path) for i, path in places if padded[path].numel() == shapes[path].numel()]
        ragged = [(i, path) for i, path in places if padded[path].numel() != shapes[path].numel()]

        def views(flat: Tensor) -> list[Tensor]:
            own = layout.padded(flat)
            return [own[path].view(shapes[path]) for _, path in whole] + [own[path] for _, path in ragged]

        copies = [torch.zeros_like(padded[path]) for _, path in ragged]
        return _Unsettled(
            views(parameters),
            [] if velocity is None else views(velocity),
            [i for i, _ in whole],
            [i for i, _ in ragged],
            copies,
            [copy[: shapes[path].numel()].view(shapes[path]) for copy, (_, path) in zip(copies, ragged, strict=True)],
        )

    def ready(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradients as the fused step takes them."""
        if self.ragged:
            torch._foreach_copy_(self.places, [gradients[i] for i in self.ragged])
        return [gradients[i].contiguous() for i in self.whole] + self.copies


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
