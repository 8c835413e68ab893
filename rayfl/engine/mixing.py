"""Local steps along the line between two models: SuPerFed's second phase.

What such a step does beside the mixed model's gradient is bound by memory: mixing, the angle between the two, two
gradients from one, two moves. Here these follow each other on a piece of all parameters before the next piece is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayfl.cosine import products, squared_cosine_factors, squared_cosine_of
from rayfl.engine import line as lines
from rayfl.engine.fused import fused_step, is_exact
from rayfl.engine.line import Line, Span
from rayfl.engine.moved import Moved
from rayfl.engine.requests import ParameterGroup
from rayfl.engine.sgd import step_in_place
from rayfl.objectives import Mixture, Pull
from rayfl.params import Layout, Tree, leaves
from rayfl.tasks import Batch, Classification


def can_mix(mixture: Mixture, model: Tree, moved: Moved) -> bool:
    """Whether the steps of this module are possible: two models of one network and nothing else, on a CPU."""
    entries = (mixture.start, mixture.end)
    start, end = (Layout.of(model[entry]) for entry in entries)
    whole = [f"{entry}/{name}" for entry in entries for name in start.paths]
    return start == end and list(moved.layout.paths) == whole and moved.flat.device.type == "cpu"


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
    names = [path.removeprefix(f"{mixture.start}/") for path in moved.paths[: len(moved.paths) // 2]]
    groups = [names] if mixture.groups is None else mixture.groups(task)
    anchor, towards = ({}, 0.0) if pull is None else (frozen[pull.anchor], pull.factor)
    line = Line(mixture, moved, half, names, groups, anchor, towards)
    alike = moved.sgd.max_norm is None and [rule.bounds for rule in moved.sgd.members] == [None]
    return (_rounded if alike and not exact else _exact)(line, task, model[mixture.start])


@dataclass(frozen=True)
class _Piece:
    """Neighbouring elements of everything, as one-dimensional views.

    Attributes:
        span: where they are.
        ends: parameters of start and end.
        anchor: what the start is pulled towards; None without a pull.
        sums: room for the gradients of start and end.
        moves: steps along these.
    """

    span: Span
    ends: Sequence[Tensor]
    anchor: Tensor | None
    sums: Sequence[Tensor]
    moves: Sequence[Callable[..., object]]


def _exact(line: Line, task: Classification, start: Tree) -> Callable[[Batch, Any], None]:
    """The operations of autograd in its order."""
    moved, mixture, dtype, count = line.moved, line.mixture, line.half.dtype, len(line.names)
    mixed, into = line.buffer("mixed"), line.buffer("mixed gradient")
    write, differentiate = line.by_chain(task, mixed, into), line.by_autograd(task, mixed, start)
    values = [value.view(-1) for value in moved.values]
    starts, ends = values[:count], values[count:]
    targets, vectors = ([view.view(-1) for view in line.views(flat)] for flat in (mixed, into))
    group_of = {name: group for group, names in enumerate(line.groups) for name in names}
    step: Callable[[list[Tensor]], None] | None = None
    gradients: list[Tensor] = []
    if moved.sgd.max_norm is not None:
        step, room = moved.rule()
        gradients = [torch.zeros_like(value) for value in moved.values] if room is None else room()
    pieces = list(_exact_pieces(line, gradients))
    # As tensors of their type numbers need no conversion at each use.
    weight, towards = (torch.tensor(number, dtype=dtype) for number in (mixture.orthogonality, line.towards))
    spare = torch.empty(lines.PIECE, dtype=dtype)

    @torch.no_grad()
    def take(batch: Batch, draw: Any) -> None:
        drawn = draw[mixture.coefficient].to(dtype).expand(len(line.groups))
        shares, rests = drawn.unbind(), (1 - drawn).unbind()
        for name, one, other, target in zip(line.names, starts, ends, targets, strict=True):
            torch.lerp(one, other, shares[group_of[name]], out=target)
        if write is not None:
            write(batch)
        slopes = differentiate(batch) if write is None else vectors
        if mixture.orthogonality:
            cross, own_start, own_end = squared_cosine_factors(weight, *products(starts, ends))
        for piece in pieces:
            span, (one, other), (first, second) = piece.span, piece.ends, piece.sums
            slope, part = slopes[span.source][span.within], spare[: len(one)]
            # Autograd adds up the gradients of a tensor from its last use to its first one.
            if mixture.orthogonality:
                torch.mul(other, cross, out=first).addcmul_(one, own_start)
                torch.mul(one, cross, out=second).addcmul_(other, own_end)
            else:
                first.zero_()
                second.zero_()
            if piece.anchor is not None:
                first.add_(torch.sub(one, piece.anchor, out=part).mul_(towards))
            first.add_(torch.mul(slope, rests[span.group], out=part))
            second.add_(torch.mul(slope, shares[span.group], out=part))
            for move in piece.moves:
                move()
        if step is not None:
            step(gradients)

    return take


def _exact_pieces(line: Line, gradients: Sequence[Tensor]) -> Iterator[_Piece]:
    """Pieces of one tensor each: an operation may round the last few elements otherwise than the others.

    Args:
        line: what they are pieces of.
        gradients: where those of all tensors are gathered for one step; empty if every piece is moved at once.
    """
    moved, half = line.moved, line.half
    rules = {place: rule for rule, members in moved.sgd.members.items() for place in members}
    fused = is_exact(half.dtype, moved.flat.device)
    flats, velocities = line.halves(moved.flat), line.halves(moved.velocity)
    anchors = _anchors(line)
    scratch = torch.zeros(2, lines.PIECE, dtype=half.dtype)
    for span in line.spans():
        size = span.here.stop - span.here.start
        sums: list[Tensor] = []
        moves: list[Callable[[], object]] = []
        # The fused step, too, has last elements of its own: those of the padding.
        reach = span.widened(half) if fused else span.here
        for end, place in enumerate((span.source, span.source + len(line.names))):
            if gradients:
                sums.append(gradients[place].view(-1)[span.within])
                continue
            total = scratch[end, : reach.stop - reach.start]
            sums.append(total[:size])
            if len(total) > size:
                moves.append(total[size:].zero_)
            velocity = [velocities[end][reach]] if velocities else []
            step = _fused_within_bounds if fused else step_in_place
            moves.append(partial(step, rules[place], [flats[end][reach]], [total], velocity))
        anchor = anchors[span.source][span.within] if anchors else None
        yield _Piece(span, [flat[span.here] for flat in flats], anchor, sums, moves)


def _fused_within_bounds(
    rule: ParameterGroup, parameters: list[Tensor], gradients: list[Tensor], velocity: list[Tensor]
) -> None:
    fused_step(rule, parameters, gradients, velocity)
    if rule.bounds is not None:
        for parameter in parameters:
            parameter.clamp_(*rule.bounds)


def _anchors(line: Line) -> list[Tensor]:
    """What the start is pulled towards, one vector a parameter; nothing without a pull."""
    found = dict(leaves(line.anchor))
    return [found[name].detach().to(line.half.dtype).reshape(-1) for name in line.names] if found else []


def _rounded(line: Line, task: Classification, start: Tree) -> Callable[[Batch, Any], None]:
    """The same up to rounding, in fewer operations; all tensors are under one rule, without clipping and bounds."""
    moved, mixture, (rule,) = line.moved, line.mixture, line.moved.sgd.members
    mixed, into = line.buffer("mixed"), line.buffer("mixed gradient")
    write, differentiate = line.by_chain(task, mixed, into), line.by_autograd(task, mixed, start)
    flats, velocities = line.halves(moved.flat), line.halves(moved.velocity)
    anchor = line.half.pack(line.anchor, moved.flat.device) if line.anchor else None
    scratch = torch.empty(2, lines.PIECE, dtype=line.half.dtype)
    pieces = []
    for span in line.spans() if write is None else line.flat_spans():
        ends, sums = [flat[span.here] for flat in flats], [row[: span.here.stop - span.here.start] for row in scratch]
        momenta = [[flat[span.here]] for flat in velocities] or [[], []]
        moves = [partial(fused_step, rule, [end], [sums[i]], momenta[i]) for i, end in enumerate(ends)]
        pieces.append(_Piece(span, ends, None if anchor is None else anchor[span.here], sums, moves))
    weight = torch.tensor(mixture.orthogonality, dtype=line.half.dtype)

    @torch.no_grad()
    def take(batch: Batch, draw: Any) -> None:
        drawn = draw[mixture.coefficient]
        shares = drawn.tolist() if drawn.dim() else [drawn.item()]
        found = []
        for piece in pieces:
            one, other = piece.ends
            torch.lerp(one, other, shares[piece.span.group], out=mixed[piece.span.here])
            if mixture.orthogonality:
                found += [torch.dot(one, other), torch.dot(one, one), torch.dot(other, other)]
        cross = own_start = own_end = 0.0
        if mixture.orthogonality:
            inner = torch.stack(found).view(-1, 3).sum(0).unbind()
            factors = squared_cosine_factors(weight, squared_cosine_of(*inner), *inner)
            cross, own_start, own_end = (factor.item() for factor in factors)
        if write is not None:
            write(batch)
        slopes = differentiate(batch) if write is None else [into]
        for piece in pieces:
            span, (one, other), (first, second) = piece.span, piece.ends, piece.sums
            share, slope = shares[span.group], slopes[span.source][span.within]
            torch.mul(slope, 1 - share, out=first)
            torch.mul(slope, share, out=second)
            if piece.anchor is not None:
                first.add_(piece.anchor, alpha=-line.towards)
            if cross:
                first.add_(other, alpha=cross)
                second.add_(one, alpha=cross)
            move_start, move_end = piece.moves
            move_start(line.towards + own_start)
            move_end(own_end)

    return take
