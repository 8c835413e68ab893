"""One local step: where the loss is taken, its gradient there, the other terms, the optimizer's rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayfl.engine.buffers import Buffers
from rayfl.engine.factors import Factors
from rayfl.engine.gradients import LossGradient
from rayfl.engine.optimizers import clipped
from rayfl.engine.plan import MOVED, LossPlan, Place, Plan, plan_of, structure
from rayfl.engine.requests import TrainRequest
from rayfl.engine.terms import Scope, Sum
from rayfl.engine.vectors import PIECE, Row, Source, Target, blocks, combine, merged, pieces
from rayfl.params import Tree, leaves, map_leaves
from rayfl.tasks import Batch, Task

Step = Callable[[Batch, int], None]
"""Takes a mini-batch and the number of the step, and moves the parameters."""


def step_of(request: TrainRequest, task: Task, buffers: Buffers) -> Step:
    """How the steps of a local update are taken.

    Terms with known gradients are taken on flat buffers. All else is autograd's: functions, and sums whose gradients
    are clipped or whose values are bounded.

    Args:
        request: the local update.
        task: what the objective is given.
        buffers: the parameters, and what the optimizer keeps.
    """
    objective = request.objective
    plain = request.max_grad_norm is not None or any(rule.bounds for rule in buffers.rules.values())
    if isinstance(objective, Sum) and objective.readable and not plain:
        return _OnTerms(objective, request, task, buffers).take
    return _by_autograd(request, task, buffers)


def draw_of_step(draws: Tree, number: int) -> Tree:
    """The draws of one local step."""
    return map_leaves(lambda leaf: leaf[number], draws)


def _by_autograd(request: TrainRequest, task: Task, buffers: Buffers) -> Step:
    """A step along the gradient of the whole objective."""
    model = buffers.tree()
    found = dict(leaves(model))
    variables = [found[path].requires_grad_() for path in buffers.layout.moved]
    move, draws = buffers.mover(), request.draws
    if draws is not None:
        as_tensor = partial(torch.as_tensor, dtype=buffers.layout.dtype, device=buffers.flat.device)
        draws = map_leaves(as_tensor, draws)

    def take(batch: Batch, number: int) -> None:
        draw = None if draws is None else draw_of_step(draws, number)
        value = request.objective(model, batch, task, request.frozen, draw)
        # zeros for what the objective does not read, as under vmap
        gradients = list(torch.autograd.grad(value, variables, materialize_grads=True))
        with torch.no_grad():
            if request.max_grad_norm is not None:
                gradients = clipped(gradients, request.max_grad_norm)
            buffers.advance()
            move([gradient.contiguous() for gradient in gradients])

    return take


class _OnTerms:
    """Steps on a sum whose terms all have known gradients."""

    def __init__(self, objective: Sum, request: TrainRequest, task: Task, buffers: Buffers) -> None:
        plan = plan_of(objective, buffers.layout, structure(request.frozen), task)
        scope, device = Scope(buffers.tree(), task, request.frozen), buffers.flat.device
        self._buffers, self._factors = buffers, Factors(request.draws, request.frozen)
        self._flats = {home: layout.zeros(device) for home, layout in plan.layouts.items()} | {MOVED: buffers.flat}
        for home, name in plan.frozen.items():
            found = scope.parameters(name)
            for path, view in plan.layouts[home].leaves(self._flats[home]).items():
                view.copy_(found[path])
        self._losses = [self._gradient(loss, plan, scope) for loss in plan.losses]
        rows = blocks(plan, buffers, self._factors.place)
        # A gradient that is all there is to a step is not copied from where autograd has put it.
        direct = not any(loss.written for loss in self._losses) and len(self._losses) == 1
        self._move = buffers.mover() if direct and all(self._is_bare(row) for row in rows) else None
        self._before = [action for _, action in sorted(self._preparations(plan), key=lambda pair: pair[0])]
        self._measures = plan.measures
        self._updates = [] if self._move else [update for row in merged(rows) for update in self._of_row(row)]

    @torch.no_grad()
    def take(self, batch: Batch, number: int) -> None:
        """Moves the parameters along the gradient of one mini-batch."""
        self._buffers.advance()
        if self._move is not None:
            self._move(self._losses[0].made(batch))
            return
        values = self._factors.values(number)
        products: dict[str, list[Tensor]] = {measure.name: [] for measure in self._measures}
        for prepare in self._before:
            prepare(values, products)
        for name, slopes_of, _ in self._measures:
            slopes = slopes_of(*torch.stack(products[name]).view(-1, 3).sum(0).unbind())
            found = torch.stack(list(slopes)).tolist()
            self._factors.measure(
                values, number, {f"{name}.{key}": one for key, one in zip(slopes._fields, found, strict=True)}
            )
        for loss in self._losses:
            loss.write(batch)
        for update in self._updates:
            update(values)

    def _gradient(self, loss: LossPlan, plan: Plan, scope: Scope) -> LossGradient:
        """The gradient of a loss, from where its model lies to where it has room."""
        shapes = dict(zip(plan.layouts[loss.room].paths, plan.layouts[loss.room].shapes, strict=True))

        def view(place: Place, name: str) -> Tensor:
            return self._flats[place.home][place.start : place.start + shapes[name].numel()].view(shapes[name])

        model = {**loss.term.at.rest(scope), **{name: view(place, name) for name, place in loss.model.items()}}
        room = plan.layouts[loss.room].leaves(self._flats[loss.room])
        return LossGradient(scope.task, model, {name: room[name] for name in loss.wanted})

    def _is_bare(self, row: Row) -> bool:
        target, *others = row.signature
        return not others and target.bare and self._factors.is_one(target.sources[0].factor)

    def _preparations(self, plan: Plan) -> Iterator[tuple[int, Callable[..., None]]]:
        """What is done before the losses: models are mixed, and pairs measured while they are in the cache."""
        mixes = [
            Row(
                tuple(Source(i, self._factors.place(part)) for i, part in enumerate(parts, 1)),
                (place, *(p.place for p in parts)),
            )
            for place, parts in plan.mixes
        ]
        for row in merged(mixes):
            for begin, views in pieces(row, self._flats):
                yield row.places[-1].start + begin, partial(_mix, views, row.signature)
        for name, _, places in plan.measures:
            for row in merged(Row((name,), pair) for pair in places):
                for begin, views in pieces(row, self._flats):
                    yield row.places[-1].start + begin, partial(_measure, views, name)

    def _of_row(self, row: Row) -> Iterator[Callable[[Sequence[float]], None]]:
        """The update of a row of blocks, piece by piece."""
        targets: Sequence[Target] = row.signature
        size = row.places[0].size if all(target.bare for target in targets) else PIECE
        scratch = [
            None if target.room else self._buffers.layout.zeros(self._buffers.flat.device, size) for target in targets
        ]
        for begin, views in pieces(row, self._flats, size):
            moves = []
            for target, spare in zip(targets, scratch, strict=True):
                moved = views[target.vector]
                start = row.places[target.vector].start + begin
                slots = [[self._buffers.slots[name][start : start + len(moved)]] for name in target.rule.slots]
                room = views[target.sources[0].vector] if spare is None else spare[: len(moved)]
                moves.append(_Move(target, moved, room, slots, self._buffers.counts[target.key]))
            yield partial(_update, moves, views)


class _Move(NamedTuple):
    """A piece of a target: its parameters, room for their gradient, and what the optimizer keeps of them."""

    target: Target
    moved: Tensor
    room: Tensor
    slots: list[list[Tensor]]
    steps: Tensor


def _update(moves: Sequence[_Move], views: Sequence[Tensor], values: Sequence[float]) -> None:
    """Moves corresponding pieces, all of them along gradients at where they were before."""
    taken = []
    for move in moves:
        target = move.target
        own = sum(values[place] for place in target.own)
        if target.rule.still and not own and not any(values[factor] for _, factor in target.sources):
            continue
        combine(move.room, views, target.sources, values)
        taken.append((move, own))
    for move, own in taken:
        move.target.rule.step([move.moved], [move.room], move.slots, move.steps, own)


def _mix(views: Sequence[Tensor], sources: Sequence[Source], values: Sequence[float], products: Any) -> None:
    combine(views[0], views, sources, values)


def _measure(views: Sequence[Tensor], name: str, values: Sequence[float], products: dict[str, list[Tensor]]) -> None:
    first, second = views
    products[name] += [torch.dot(first, second), torch.dot(first, first), torch.dot(second, second)]
