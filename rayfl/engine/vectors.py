"""Combinations of flat vectors, a piece that fits the processor's cache at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayfl.engine.buffers import Buffers, key_of
from rayfl.engine.optimizers import Rule
from rayfl.engine.plan import MOVED, Part, Place, Plan

PIECE = 1 << 16
"""Elements worked on at a time: what several operations read and write stays in the processor's cache."""


class Row(NamedTuple):
    """Corresponding vectors.

    Attributes:
        signature: says what is done with them; neighbours with one signature can be one row.
        places: the vectors.
    """

    signature: tuple[Any, ...]
    places: tuple[Place, ...]


def merged(rows: Iterable[Row]) -> list[Row]:
    """Neighbours with one signature as one row; vectors are as long as the shortest of their row."""
    found: list[Row] = []
    for signature, places in rows:
        size = min(place.size for place in places)
        places = tuple(place._replace(size=size) for place in places)
        if found and found[-1].signature == signature and all(map(_adjoin, found[-1].places, places)):
            places = tuple(one._replace(size=one.size + size) for one in found.pop().places)
        found.append(Row(signature, places))
    return found


def pieces(row: Row, flats: Mapping[str, Tensor], most: int = PIECE) -> Iterator[tuple[int, list[Tensor]]]:
    """Where a piece begins in its row, and views of the piece of each vector."""
    size = row.places[0].size
    for begin in range(0, size, most):
        length = min(most, size - begin)
        yield begin, [flats[home][start + begin : start + begin + length] for home, start, _ in row.places]


class Source(NamedTuple):
    """A summand: which of a row's vectors it is, and where its factor's value is."""

    vector: int
    factor: int


def combine(out: Tensor, views: Sequence[Tensor], sources: Sequence[Source], values: Sequence[float]) -> None:
    """Writes the sum of vectors times the values of their factors; ``out`` may be the first of them."""
    if not sources:
        out.zero_()
        return
    (first, factor), *others = sources
    if views[first] is not out:
        torch.mul(views[first], values[factor], out=out)
    elif values[factor] != 1:
        out.mul_(values[factor])
    for vector, factor in others:
        if values[factor]:
            out.add_(views[vector], alpha=values[factor])


class Target(NamedTuple):
    """A trained vector in a row.

    Attributes:
        vector: which of the row's vectors it is.
        rule: how it is moved.
        key: the first key of the trained tree under which it lies.
        sources: the summands of its gradient but itself; what a loss gives comes first.
        own: where the values of its own factors are.
        room: whether the first summand is read by nothing else, and may be changed in place.
    """

    vector: int
    rule: Rule
    key: str
    sources: tuple[Source, ...]
    own: tuple[int, ...]
    room: bool

    @property
    def bare(self) -> bool:
        """Whether its gradient is a vector as it is, if its factor is 1."""
        return self.room and len(self.sources) == 1 and not self.own


def blocks(plan: Plan, buffers: Buffers, place_of: Callable[[Part], int]) -> list[Row]:
    """Trained vectors with all that their gradients are made of; those that read each other are in one row.

    A row's signature is a tuple of targets.

    Args:
        plan: says what is read.
        buffers: the parameters; those that nothing has a gradient for are moved along zeros.
        place_of: where the value of a part's factor will be.
    """
    gradients = dict(plan.gradients)
    paths: dict[Place, str] = {}
    for path in buffers.layout.moved:
        where = buffers.layout.places[path]
        own = [place for place in gradients if place.home == MOVED and where.start <= place.start < where.stop]
        if not own:
            own = [Place(MOVED, where.start, where.stop - where.start)]
            gradients[own[0]] = []
        paths |= dict.fromkeys(own, path)
    readers = Counter(part.place for parts in gradients.values() for part in parts)
    leader = {place: place for place in gradients}

    def root(place: Place) -> Place:
        while leader[place] != place:
            place = leader[place]
        return place

    for place, parts in gradients.items():
        for part in parts:
            if part.place in leader:
                first, second = sorted((root(place), root(part.place)))
                leader[second] = first
    members: dict[Place, list[Place]] = {}
    for place in sorted(gradients):
        members.setdefault(root(place), []).append(place)
    rows = []
    for targets in members.values():
        vectors = list(dict.fromkeys([*targets, *(part.place for place in targets for part in gradients[place])]))
        found = []
        for place in targets:
            parts = sorted(gradients[place], key=lambda part: not part.place.home.startswith("gradient"))
            sources = tuple(Source(vectors.index(part.place), place_of(part)) for part in parts if part.place != place)
            of_itself = tuple(place_of(part) for part in parts if part.place == place)
            room = bool(sources) and parts[0].place.home.startswith("gradient") and readers[parts[0].place] == 1
            rule, key = buffers.rules[paths[place]], key_of(paths[place])
            found.append(Target(vectors.index(place), rule, key, sources, of_itself, room))
        rows.append(Row(tuple(found), tuple(vectors)))
    return rows


def _adjoin(one: Place, other: Place) -> bool:
    return one.home == other.home and one.start + one.size == other.start
