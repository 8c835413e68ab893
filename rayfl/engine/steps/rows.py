"""Blocked operations on corresponding vectors: each block fits into the CPU's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayfl.optimization.optimizers import Rule

PIECE = 1 << 16
"""Elements worked on at a time on a CPU: what several operations read and write stays in the processor's cache."""


SCRATCH = "scratch"
"""Begins the names of buffers that are as long as a piece and hold nothing between operations."""


Operation = Callable[[Sequence[float]], object]
"""What is done to a piece in a step, given the values of all factors.

Operations and steps are no closures: when memory runs out, an error's traceback would hold what these refer to.
"""


class Vector(NamedTuple):
    """A contiguous part of a named flat buffer."""

    home: str
    start: int
    size: int


class Row(NamedTuple):
    """Corresponding vectors and an operation factory: given views of a block, it returns the operation of a step."""

    operation: Any
    vectors: tuple[Vector, ...]


def merged(rows: Iterable[Row]) -> list[Row]:
    """Merges adjacent rows with equal operations; trims vectors to the shortest of their row."""
    found: list[Row] = []
    for operation, vectors in rows:
        size = min(vector.size for vector in vectors)
        cut = tuple(vector._replace(size=size) for vector in vectors)
        if found and found[-1].operation == operation and all(map(_before, found[-1].vectors, cut)):
            cut = tuple(vector._replace(size=vector.size + size) for vector in found.pop().vectors)
        found.append(Row(operation, cut))
    return found


def _before(one: Vector, other: Vector) -> bool:
    return one.home == other.home and one.start + one.size == other.start


def pieces(row: Row, flats: Mapping[str, Tensor], left: Mapping[str, Tensor]) -> Iterator[tuple[int, Operation]]:
    """Yields each block's offset in the row's last buffer, and its operation.

    Args:
        row: the vectors and what is done with them.
        flats: the buffers by name.
        left: by name, vectors that are other tensors in each step; their padding may be missing. What is in neither is
            scratch, or in ``left`` once a step runs.
    """
    size = row.vectors[0].size
    like = flats[row.vectors[0].home]
    elsewhere = [home for home, *_ in row.vectors if home not in flats]
    whole = like.device.type != "cpu" or (not elsewhere and _reads_once(row.operation))
    most = max(size, 1) if whole else PIECE
    scratch = {home: like.new_empty(min(most, size)) for home in elsewhere}
    for begin in range(0, size, most):
        stop = min(begin + most, size)
        views = [
            scratch[home][: stop - begin] if home in scratch else flats[home][start + begin : start + stop]
            for home, start, _ in row.vectors
        ]
        run = row.operation(views)
        for (home, start, _), view in zip(row.vectors, views, strict=True):
            if home in scratch and not home.startswith(SCRATCH):
                run = partial(_fetched, left, home, start + begin, view, run)
        yield row.vectors[-1].start + begin, run


def _fetched(
    left: Mapping[str, Tensor], home: str, start: int, view: Tensor, run: Operation, values: Sequence[float]
) -> None:
    """Runs an operation on a copy of a part of a vector, which stays in the cache; its padding is zeros."""
    part = left[home][start : start + len(view)]
    if len(part) < len(view):
        view.zero_()
    view[: len(part)].copy_(part)
    run(values)


class Source(NamedTuple):
    """A summand: the index of a row's vector, and the index of its factor's value."""

    vector: int
    factor: int


class Combination(NamedTuple):
    """Writes a linear combination of vectors; the first summand may be the output vector itself."""

    to: int
    sources: tuple[Source, ...]

    def __call__(self, views: Sequence[Tensor]) -> Operation:
        return partial(_combine, views[self.to], [(views[vector], factor) for vector, factor in self.sources])


def _combine(out: Tensor, sources: Sequence[tuple[Tensor, int]], values: Sequence[float]) -> None:
    if not sources:
        out.zero_()
        return
    (first, scale), *others = sources
    if first is not out:
        torch.mul(first, values[scale], out=out)
    elif values[scale] != 1:
        out.mul_(values[scale])
    for vector, factor in others:
        if values[factor]:
            out.add_(vector, alpha=values[factor])


@dataclass(eq=False)
class Products:
    """Accumulates <f, l>, |f|^2 and |l|^2 of two vectors, block by block."""

    found: list[Tensor] = field(default_factory=list)

    def __call__(self, views: Sequence[Tensor]) -> Operation:
        first, second = views
        return partial(self._add, ((first, second), (first, first), (second, second)))

    def _add(self, pairs: Sequence[tuple[Tensor, Tensor]], values: Sequence[float]) -> None:
        self.found += [torch.dot(*pair) for pair in pairs]

    def sums(self) -> list[float]:
        """Returns the three sums over all blocks, and resets them."""
        total: list[float] = torch.stack(self.found).view(-1, 3).sum(0).cpu().tolist()
        self.found.clear()
        return total


class Target(NamedTuple):
    """A vector that is updated, followed in its row by its optimizer state.

    Attributes:
        vector: its index among the row's vectors.
        rule: its update rule.
        key: key of its step count.
        gradient: how its gradient is combined, without multiples of the vector itself.
        own: indices of the factors of the vector itself.
    """

    vector: int
    rule: Rule
    key: str
    gradient: Combination
    own: tuple[int, ...]


class Update(NamedTuple):
    """Updates a row's targets, with gradients taken before any of them changes."""

    targets: tuple[Target, ...]
    steps: Mapping[str, Tensor]

    def __call__(self, views: Sequence[Tensor]) -> Operation:
        return partial(_move, [(target, target.gradient(views), self._mover(target, views)) for target in self.targets])

    def _mover(self, target: Target, views: Sequence[Tensor]) -> Callable[[float], None]:
        vector, rule, key, gradient, _ = target
        moved, *slots = ([view] for view in views[vector : vector + 1 + len(rule.slots)])
        return partial(rule.step, moved, [views[gradient.to]], slots, self.steps[key])


def _reads_once(operation: Any) -> bool:
    """Returns whether an operation is one call that reads every vector once: pieces would only be more calls."""
    if not isinstance(operation, Update):
        return False
    (_, rule, _, gradient, _), *others = operation.targets
    return not others and rule.bounds is None and [source.vector for source in gradient.sources] == [gradient.to]


def _move(targets: Sequence[tuple[Target, Operation, Callable[[float], None]]], values: Sequence[float]) -> None:
    moves = []
    for target, write_gradient, move in targets:
        own = sum([values[place] for place in target.own], 0.0)
        if own or any(values[factor] for _, factor in target.gradient.sources) or not target.rule.still:
            write_gradient(values)
            moves.append((move, own))
    for move, own in moves:
        move(own)
