"""Operations on corresponding vectors, a piece that fits the processor's cache at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayfl.engine.optimizers import Rule

PIECE = 1 << 16
"""Elements worked on at a time: what several operations read and write stays in the processor's cache."""


SCRATCH = "scratch"
"""Begins the names of buffers that are as long as a piece and hold nothing between operations."""


class Vector(NamedTuple):
    """Neighbouring elements of a flat buffer, by its name."""

    home: str
    start: int
    size: int


class Row(NamedTuple):
    """Corresponding vectors, and what is done with them."""

    operation: Any
    vectors: tuple[Vector, ...]


def merged(rows: Iterable[Row]) -> list[Row]:
    """Joins neighbours on which the same is done; vectors are as long as the shortest of their row."""
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


def pieces(row: Row, flats: Mapping[str, Tensor]) -> Iterator[tuple[int, Callable[[Sequence[float]], None]]]:
    """Where a piece begins in its last buffer, and the operation on it."""
    size = row.vectors[0].size
    like = flats[row.vectors[0].home]
    scratch = {home: like.new_empty(min(PIECE, size)) for home, *_ in row.vectors if home.startswith(SCRATCH)}
    for begin in range(0, size, PIECE):
        stop = min(begin + PIECE, size)
        views = [
            scratch[home][: stop - begin] if home in scratch else flats[home][start + begin : start + stop]
            for home, start, _ in row.vectors
        ]
        yield row.vectors[-1].start + begin, partial(row.operation, views)


class Source(NamedTuple):
    """A summand: which of a row's vectors it is, and where its factor's value is."""

    vector: int
    factor: int


class Combination(NamedTuple):
    """Writes a sum of vectors times the values of their factors; the first summand may be the vector itself."""

    to: int
    sources: tuple[Source, ...]

    def __call__(self, views: Sequence[Tensor], values: Sequence[float]) -> None:
        if not self.sources:
            views[self.to].zero_()
            return
        (first, factor), *others = self.sources
        if first != self.to:
            torch.mul(views[first], values[factor], out=views[self.to])
        elif values[factor] != 1:
            views[self.to].mul_(values[factor])
        for vector, factor in others:
            if values[factor]:
                views[self.to].add_(views[vector], alpha=values[factor])


@dataclass(eq=False)
class Products:
    """Finds <f, l>, |f|^2 and |l|^2 of two vectors, piece by piece."""

    found: list[Tensor] = field(default_factory=list)

    def __call__(self, views: Sequence[Tensor], values: Sequence[float]) -> None:
        first, second = views
        self.found.extend((torch.dot(first, second), torch.dot(first, first), torch.dot(second, second)))

    def sums(self) -> tuple[Tensor, ...]:
        """The three of all pieces; the next ones begin at zero."""
        total = torch.stack(self.found).view(-1, 3).sum(0)
        self.found.clear()
        return total.unbind()


class Target(NamedTuple):
    """What is moved in a row: its vector, followed by what the optimizer keeps of it.

    Attributes:
        vector: which of the row's vectors it is.
        rule: how it is moved.
        key: under which the number of its steps is.
        gradient: how that is made, of all but the vector itself.
        own: where the values of its own factors are.
    """

    vector: int
    rule: Rule
    key: str
    gradient: Combination
    own: tuple[int, ...]


class Update(NamedTuple):
    """Moves a row's targets, along gradients at where all of them were before."""

    targets: tuple[Target, ...]
    steps: Mapping[str, Tensor]

    def __call__(self, views: Sequence[Tensor], values: Sequence[float]) -> None:
        taken = []
        for target in self.targets:
            own = sum(values[place] for place in target.own)
            if target.rule.still and not own and not any(values[factor] for _, factor in target.gradient.sources):
                continue
            target.gradient(views, values)
            taken.append((target, own))
        for (vector, rule, key, gradient, _), own in taken:
            moved, *slots = views[vector : vector + 1 + len(rule.slots)]
            rule.step([moved], [views[gradient.to]], [[slot] for slot in slots], self.steps[key], own)
