"""Local steps along the line between two fully connected models, without a graph: SuPerFed's second phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayfl.closed_form import gradients_into, pulling
from rayfl.cosine import factors, products
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


def has_one_rule(moved: Moved) -> bool:
    """Whether the gradients of all tensors are used alike, and one element after the other."""
    return moved.sgd.max_norm is None and [rule.bounds for rule in moved.sgd.members] == [None]


def exact_mixed_step(
    mixture: Mixture, pull: Pull | None, task: Classification, model: Tree, moved: Moved, frozen: Any
) -> Callable[[Batch, Any], None]:
    """How a step is taken with the bits of autograd: its operations in its order; :func:`can_mix` must hold.

    Args:
        mixture: the two models, and the penalty between them.
        pull: of the start.
        task: knows the network.
        model: views of the parameters, by entry.
        moved: the same as buffers, and the rule.
        frozen: what the objective is given as such.
    """
    step, room = moved.rule()
    gradients = [torch.zeros_like(value) for value in moved.values] if room is None else room()
    half = Layout.of(model[mixture.start])
    count = len(half.paths)
    starts, ends = moved.values[:count], moved.values[count:]
    own = [half.views(moved.workspace.buffer(name, half, moved.flat.device)) for name in ("mixed", "mixed gradient")]
    mixed, loss_gradients = ([tree[name] for name in half.paths] for tree in own)
    layers, into = (task.chain(tree) for tree in own)
    assert layers is not None
    assert into is not None
    groups = [list(half.paths)] if mixture.groups is None else mixture.groups(task)
    group_of = {name: group for group, names in enumerate(groups) for name in names}
    add_pull = None
    if pull is not None:
        anchors = dict(leaves(frozen[pull.anchor]))
        add_pull = pulling(starts, [anchors[name] for name in half.paths], pull.factor, gradients[:count])
    weight = torch.tensor(mixture.orthogonality, dtype=half.dtype)

    @torch.no_grad()
    def take(batch: Batch, draw: Any) -> None:
        drawn = draw[mixture.coefficient].to(half.dtype)
        shares = [drawn[group_of[name]] if drawn.dim() else drawn for name in half.paths]
        for start, end, share, target in zip(starts, ends, shares, mixed, strict=True):
            torch.lerp(start, end, share, out=target)
        gradients_into(layers, into, batch.x, batch.y)
        # Autograd adds up the gradients of a tensor from its last use to its first one.
        if mixture.orthogonality:
            cross, own_start, own_end = factors(weight, *products(starts, ends))
            for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
                torch.addcmul(end * cross, start, own_start, out=gradients[i])
                torch.addcmul(start * cross, end, own_end, out=gradients[count + i])
        else:
            torch._foreach_zero_(gradients)
        if add_pull is not None:
            add_pull()
        for i, (found, share) in enumerate(zip(loss_gradients, shares, strict=True)):
            gradients[i].add_(found * (1 - share))
            gradients[count + i].add_(found * share)
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


def mixed_step(
    mixture: Mixture, pull: Pull | None, task: Classification, model: Tree, moved: Moved, frozen: Any
) -> Callable[[Batch, Any], None]:
    """How a step is taken, up to rounding; :func:`can_mix` and :func:`has_one_rule` must hold.

    Args:
        mixture: the two models, and the penalty between them.
        pull: of the start.
        task: knows the network.
        model: views of the parameters, by entry.
        moved: the same as buffers, and the rule.
        frozen: what the objective is given as such.
    """
    half, (rule,) = Layout.of(model[mixture.start]), moved.sgd.members
    start, end = torch.split(moved.flat, half.size)
    room = {name: moved.workspace.buffer(name, half, moved.flat.device) for name in ("mixed", "mixed gradient")}
    mixed, gradient = room.values()
    layers, into = (task.chain(half.views(flat)) for flat in (mixed, gradient))
    assert layers is not None
    assert into is not None
    anchor = None
    if pull is not None:
        found = dict(leaves(frozen[pull.anchor]))
        anchor = half.pack({name: found[name] for name in half.paths}, moved.flat.device)
    groups = [list(half.paths)] if mixture.groups is None else mixture.groups(task)
    segments = [(group, here) for group, names in enumerate(groups) for here in _runs(half, names)]
    velocity = [[flat] for flat in torch.split(moved.velocity, half.size)] if moved.velocity is not None else [[], []]
    sums = torch.empty(2, _PIECE, dtype=half.dtype)
    pieces = [
        _Piece(
            group,
            (start[here], end[here]),
            ([flat[here] for flat in velocity[0]], [flat[here] for flat in velocity[1]]),
            gradient[here],
            None if anchor is None else anchor[here],
            (sums[0, : here.stop - here.start], sums[1, : here.stop - here.start]),
        )
        for group, segment in segments
        for here in _pieces(segment)
    ]
    towards = 0.0 if pull is None else pull.factor

    @torch.no_grad()
    def take(batch: Batch, draw: Any) -> None:
        drawn = draw[mixture.coefficient]
        shares = drawn.tolist() if drawn.dim() else [drawn.item()]
        for group, here in segments:
            torch.lerp(start[here], end[here], shares[group], out=mixed[here])
        cross = own_start = own_end = 0.0
        if mixture.orthogonality:
            products = (torch.dot(*pair).item() for pair in ((start, end), (start, start), (end, end)))
            cross, own_start, own_end = (mixture.orthogonality * f for f in squared_cosine_factors(*products))
        gradients_into(layers, into, batch.x, batch.y)
        for piece in pieces:
            share, (one, other), (first, second) = shares[piece.group], piece.ends, piece.sums
            torch.mul(piece.gradient, 1 - share, out=first)
            torch.mul(piece.gradient, share, out=second)
            if piece.anchor is not None:
                first.add_(piece.anchor, alpha=-towards)
            if cross:
                first.add_(other, alpha=cross)
                second.add_(one, alpha=cross)
            fused_step(rule, [one], [first], piece.velocity[0], towards + own_start)
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
