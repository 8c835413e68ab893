"""Local steps along the line between two fully connected models, without a graph: SuPerFed's second phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayfl.closed_form import gradients_into, pulling
from rayfl.cosine import products
from rayfl.engine.fused import fused_step
from rayfl.engine.moved import Moved
from rayfl.objectives import Mixture, Pull
from rayfl.params import Layout, Tree, leaves
from rayfl.tape import squared_cosine_factors
from rayfl.tasks import Batch, Classification

_PIECE = 1 << 16
"""Elements worked on at a time: what several operations read and write stays in the processor's cache."""


def can_mix(mixture: Mixture, task: Classification, model: Tree, moved: Moved) -> bool:
    """Whether the steps of this module are possible: two fully connected models and nothing else, on a CPU."""
    names = list(task.network.parameter_names)
    return (
        moved.flat.device.type == "cpu"
        and list(moved.paths) == [f"{entry}/{name}" for entry in (mixture.start, mixture.end) for name in names]
        and list(moved.layout.paths) == list(moved.paths)
        and task.chain(model[mixture.start]) is not None
    )


@dataclass(frozen=True)
class _Line:
    """What both kinds of steps need.

    Attributes:
        mixture: the two models, and the penalty between them.
        moved: both as buffers, and the rule.
        half: the layout of one of them.
        mixed: room for the mixed model, flat.
        gradient: the same for the gradient of its loss.
        differentiate: writes that gradient.
        groups: names of the parameters that share a mixing coefficient.
        anchor: what the start is pulled towards, by name; empty without a pull.
        towards: the factor of the pull.
    """

    mixture: Mixture
    moved: Moved
    half: Layout
    mixed: Tensor
    gradient: Tensor
    differentiate: Callable[[Tensor, Tensor], None]
    groups: Sequence[Sequence[str]]
    anchor: Tree
    towards: float


def mixed_step(
    mixture: Mixture, pull: Pull | None, task: Classification, model: Tree, moved: Moved, frozen: Any, exact: bool
) -> Callable[[Batch, Any], None]:
    """How a step is taken; :func:`can_mix` must hold.

    Args:
        mixture: the two models, and the penalty between them.
        pull: of the start.
        task: knows the network.
        model: views of the parameters, by entry.
        moved: the same as buffers, and the rule.
        frozen: what the objective is given as such.
        exact: whether it has the bits of autograd. It also has where gradients are clipped, or rules differ.
    """
    half = Layout.of(model[mixture.start])
    mixed, gradient = (moved.workspace.buffer(use, half, moved.flat.device) for use in ("mixed", "mixed gradient"))
    layers, into = (task.chain(half.views(flat)) for flat in (mixed, gradient))
    assert layers is not None
    assert into is not None
    groups = [list(half.paths)] if mixture.groups is None else mixture.groups(task)
    found = {} if pull is None else dict(leaves(frozen[pull.anchor]))
    anchor = {name: found[name] for name in half.paths} if pull is not None else {}
    towards = 0.0 if pull is None else pull.factor
    differentiate = partial(gradients_into, layers, into)
    line = _Line(mixture, moved, half, mixed, gradient, differentiate, groups, anchor, towards)
    alike = moved.sgd.max_norm is None and [rule.bounds for rule in moved.sgd.members] == [None]
    return _piecewise(line) if alike and not exact else _exact(line)


def _exact(line: _Line) -> Callable[[Batch, Any], None]:
    """The operations of autograd in its order."""
    moved, mixture, names = line.moved, line.mixture, line.half.paths
    step, room = moved.rule()
    gradients = [torch.zeros_like(value) for value in moved.values] if room is None else room()
    count = len(names)
    starts, ends = moved.values[:count], moved.values[count:]
    mixed, found = ([dict(line.half.views(flat))[name] for name in names] for flat in (line.mixed, line.gradient))
    group_of = {name: group for group, members in enumerate(line.groups) for name in members}
    add_pull = pulling(starts, list(line.anchor.values()), line.towards, gradients[:count]) if line.anchor else None
    weight = torch.tensor(mixture.orthogonality, dtype=line.half.dtype)

    @torch.no_grad()
    def take(batch: Batch, draw: Any) -> None:
        drawn = draw[mixture.coefficient].to(line.half.dtype)
        shares = [drawn[group_of[name]] if drawn.dim() else drawn for name in names]
        for start, end, share, target in zip(starts, ends, shares, mixed, strict=True):
            torch.lerp(start, end, share, out=target)
        line.differentiate(batch.x, batch.y)
        # Autograd adds up the gradients of a tensor from its last use to its first one.
        if mixture.orthogonality:
            cross, own_start, own_end = squared_cosine_factors(weight, *products(starts, ends))
            for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
                torch.addcmul(end * cross, start, own_start, out=gradients[i])
                torch.addcmul(start * cross, end, own_end, out=gradients[count + i])
        else:
            torch._foreach_zero_(gradients)
        if add_pull is not None:
            add_pull()
        for i, (slope, share) in enumerate(zip(found, shares, strict=True)):
            gradients[i].add_(slope * (1 - share))
            gradients[count + i].add_(slope * share)
        step(gradients)

    return take


@dataclass(frozen=True)
class _Piece:
    """One-dimensional views of a few elements of everything.

    Attributes:
        group: which mixing coefficient is theirs.
        ends: of start and end.
        velocity: of their momentum buffers, each as a list of one, or of none.
        gradient: of that of the mixed model.
        anchor: of what the start is pulled towards; None without a pull.
        sums: room for the gradients of start and end.
    """

    group: int
    ends: tuple[Tensor, Tensor]
    velocity: tuple[list[Tensor], list[Tensor]]
    gradient: Tensor
    anchor: Tensor | None
    sums: tuple[Tensor, Tensor]


def _piecewise(line: _Line) -> Callable[[Batch, Any], None]:
    """The same up to rounding, with sums made where they are used; all tensors are under one rule, without clipping."""
    moved, mixture, half, (rule,) = line.moved, line.mixture, line.half, line.moved.sgd.members
    start, end = torch.split(moved.flat, half.size)
    anchor = half.pack(line.anchor, moved.flat.device) if line.anchor else None
    segments = [(group, here) for group, names in enumerate(line.groups) for here in _runs(half, names)]
    velocity = [[flat] for flat in torch.split(moved.velocity, half.size)] if moved.velocity is not None else [[], []]
    sums = torch.empty(2, _PIECE, dtype=half.dtype)
    pieces = [
        _Piece(
            group,
            (start[here], end[here]),
            ([flat[here] for flat in velocity[0]], [flat[here] for flat in velocity[1]]),
            line.gradient[here],
            None if anchor is None else anchor[here],
            (sums[0, : here.stop - here.start], sums[1, : here.stop - here.start]),
        )
        for group, segment in segments
        for here in _pieces(segment)
    ]
    weight = torch.tensor(mixture.orthogonality, dtype=half.dtype)

    @torch.no_grad()
    def take(batch: Batch, draw: Any) -> None:
        drawn = draw[mixture.coefficient]
        shares = drawn.tolist() if drawn.dim() else [drawn.item()]
        for group, here in segments:
            torch.lerp(start[here], end[here], shares[group], out=line.mixed[here])
        cross = own_start = own_end = 0.0
        if mixture.orthogonality:
            found = squared_cosine_factors(weight, *products([start], [end]))
            cross, own_start, own_end = (factor.item() for factor in found)
        line.differentiate(batch.x, batch.y)
        for piece in pieces:
            share, (one, other), (first, second) = shares[piece.group], piece.ends, piece.sums
            torch.mul(piece.gradient, 1 - share, out=first)
            torch.mul(piece.gradient, share, out=second)
            if piece.anchor is not None:
                first.add_(piece.anchor, alpha=-line.towards)
            if cross:
                first.add_(other, alpha=cross)
                second.add_(one, alpha=cross)
            fused_step(rule, [one], [first], piece.velocity[0], line.towards + own_start)
            fused_step(rule, [other], [second], piece.velocity[1], own_end)

    return take


def _runs(layout: Layout, names: Sequence[str]) -> Iterator[slice]:
    """Where tensors lie with their padding, neighbours together."""
    ends = dict(zip(layout.paths, zip(layout.offsets, (*layout.offsets[1:], layout.size), strict=True), strict=True))
    runs: list[list[int]] = []
    for begin, stop in sorted(ends[name] for name in names):
        if runs and runs[-1][1] == begin:
            runs[-1][1] = stop
        else:
            runs.append([begin, stop])
    yield from (slice(*run) for run in runs)


def _pieces(segment: slice) -> Iterator[slice]:
    for begin in range(segment.start, segment.stop, _PIECE):
        yield slice(begin, min(begin + _PIECE, segment.stop))
