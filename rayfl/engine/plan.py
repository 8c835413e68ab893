"""What a step on a sum of terms does, as combinations of flat vectors.

The gradient of a term is a combination of vectors: the loss's gradient at a point, trained and frozen models. Its
factors are known when the step is taken. So a step mixes the models at which losses are taken, measures inner products
where factors depend on them, takes the gradients of the losses, and combines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayfl.engine.flat import Layout
from rayfl.engine.numbers import Factor, Read
from rayfl.engine.pairs import Slopes
from rayfl.engine.terms import Constant, Loss, Name, Penalty, Scope, Share, Sum
from rayfl.params import from_leaves, leaves

MOVED = "moved"
"""The home of the parameters."""


class Place(NamedTuple):
    """A vector: where it lies in the flat buffer of its home."""

    home: str
    start: int
    size: int


class Part(NamedTuple):
    """A vector with its factor; ``group`` is the entry of the factor's value, None where that is a scalar."""

    place: Place
    factor: Factor = 1
    group: int | None = None


class Measure(NamedTuple):
    """A pair whose slopes, read as ``<name>.cross`` and so on, depend on inner products of corresponding vectors."""

    name: str
    slopes: Callable[[Tensor, Tensor, Tensor], Slopes]
    places: list[tuple[Place, Place]]


class LossPlan(NamedTuple):
    """A loss.

    Attributes:
        term: the loss.
        model: by parameter, where it lies.
        room: home of the gradient.
        wanted: the parameters that have one.
    """

    term: Loss
    model: dict[str, Place]
    room: str
    wanted: list[str]


@dataclass
class Plan:
    """What a step does.

    Attributes:
        layouts: of all homes but that of the parameters.
        frozen: homes of frozen trees, and the names of these.
        mixes: parameters of models at points, each with its parts.
        measures: pairs to be measured.
        losses: gradients to be taken.
        gradients: by trained vector, the parts of its gradient.
    """

    layouts: dict[str, Layout] = field(default_factory=dict)
    frozen: dict[str, str] = field(default_factory=dict)
    mixes: list[tuple[Place, list[Part]]] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)
    losses: list[LossPlan] = field(default_factory=list)
    gradients: dict[Place, list[Part]] = field(default_factory=dict)


Structure = tuple[tuple[str, torch.Size | None], ...]
"""Paths and shapes of a tree's leaves; None for numbers."""


def structure(tree: Mapping[str, Any] | None) -> Structure:
    """The structure of a tree; empty for none."""
    return tuple((path, getattr(leaf, "shape", None)) for path, leaf in leaves(tree or {}))


@lru_cache(maxsize=64)
def plan_of(objective: Sum, trained: Layout, frozen: Structure, task: Any) -> Plan:
    """Returns the plan of a readable sum.

    Args:
        objective: the sum.
        trained: layout of the trained tree.
        frozen: structure of what the objective is given as frozen.
        task: knows the network.
    """
    trees = (
        from_leaves({p: torch.empty(s or (), dtype=trained.dtype, device="meta") for p, s in pairs})
        for pairs in (zip(trained.paths, trained.shapes, strict=True), frozen)
    )
    planner = _Planner(Scope(next(trees), task, next(trees)), trained)
    for kind in (Loss, Penalty):
        for number, (factor, term) in enumerate(objective.terms):
            if isinstance(term, kind):
                planner.add(str(number), factor, term)
    return planner.plan


class _Planner:
    def __init__(self, scope: Scope, trained: Layout) -> None:
        self.plan = Plan()
        self._scope, self._trained = scope, trained
        self._rows: dict[str, int] = {}

    def add(self, number: str, factor: Factor, term: Any) -> None:
        if isinstance(term, Loss):
            self._add_loss(number, factor, term)
        else:
            self._add_penalty(number, factor, term)

    def _add_loss(self, number: str, factor: Factor, term: Loss) -> None:
        shares = term.at.shares(self._scope)
        mixed, room = f"mixed.{number}", f"gradient.{number}"
        shapes = {name: self._tensor(parts[0]) for name, parts in shares.items()}
        self.plan.layouts[room] = Layout.of(shapes)
        if between := {name: shapes[name] for name, parts in shares.items() if not _is_tensor(parts)}:
            self.plan.layouts[mixed] = Layout.of(between)
        loss = LossPlan(term, {}, room, [])
        for name, parts in shares.items():
            loss.model[name] = self._in(mixed, name) if name in between else self._place(parts[0])
            if name in between:
                found = [Part(self._place(part), part.coefficient, part.group) for part in parts]
                self.plan.mixes.append((loss.model[name], found))
            moving = [part for part in parts if self._moves(part)]
            for part in moving:
                self._rows |= {_path(part): self._whole(part).shape[0]} if part.row is not None else {}
                gradient = Part(self._in(room, name), _times(factor, part.coefficient), part.group)
                self._parts_of(part).append(gradient)
            loss.wanted.extend([name] if moving else [])
        if loss.wanted:
            self.plan.losses.append(loss)

    def _add_penalty(self, number: str, factor: Factor, term: Penalty) -> None:
        pairs = list(self._corresponding(term.of, term.to))
        slopes = term.pair.slopes
        if not isinstance(slopes, Slopes):
            assert slopes is not None
            places = [(self._place(first), self._place(second)) for first, second in pairs]
            self.plan.measures.append(Measure(number, slopes, places))
            slopes = Slopes(*(Read("measured", f"{number}.{name}") for name in Slopes._fields))
        for first, second in pairs:
            for own, other, own_slope in ((first, second, slopes.own_first), (second, first, slopes.own_second)):
                found = [Part(self._place(other), _times(factor, slopes.cross))]
                found += [Part(self._place(own), _times(factor, own_slope))] if own_slope != 0 else []
                if self._moves(own):
                    self._parts_of(own).extend(found)

    def _corresponding(self, of: Name, to: Name) -> Iterable[tuple[Share, Share]]:
        """Corresponding tensors of two names; row by row where a loss is taken at combinations of rows."""
        for path in self._scope.parameters(_bare(of)):
            rows = self._rows.get(_path(Share(of, path)), None) or self._rows.get(_path(Share(to, path)), None)
            for row in range(rows) if rows else [None]:
                yield Share(of, path, row=row), Share(to, path, row=row)

    def _parts_of(self, part: Share) -> list[Part]:
        return self.plan.gradients.setdefault(self._place(part), [])

    def _moves(self, part: Share) -> bool:
        return not isinstance(part.of, Constant) and _path(part) in self._trained.places

    def _whole(self, part: Share) -> Any:
        tree = self._scope.tree(_bare(part.of))
        return dict(leaves(tree))[part.path] if part.path else tree

    def _tensor(self, part: Share) -> Any:
        return self._whole(part) if part.row is None else self._whole(part)[part.row]

    def _place(self, part: Share) -> Place:
        """Where a share's tensor lies."""
        home, layout, path = MOVED, self._trained, _path(part)
        if path not in layout.places:
            name, path = _bare(part.of), part.path
            home = f"frozen.{name}"
            if home not in self.plan.layouts:
                self.plan.layouts[home] = Layout.of(self._scope.parameters(name))
                self.plan.frozen[home] = name
            layout = self.plan.layouts[home]
        place = layout.places[path]
        if part.row is None:
            return Place(home, place.start, place.stop - place.start)
        size = self._tensor(part).numel()
        return Place(home, place.start + part.row * size, size)

    def _in(self, home: str, name: str) -> Place:
        place = self.plan.layouts[home].places[name]
        return Place(home, place.start, place.stop - place.start)


def _bare(name: Name) -> str:
    return name.name if isinstance(name, Constant) else name


def _path(part: Share) -> str:
    """The path in the trained tree, if it is there."""
    name = _bare(part.of)
    return f"{name}/{part.path}" if name and part.path else name or part.path


def _is_tensor(parts: Iterable[Share]) -> bool:
    """Whether a parameter is a tensor of a tree itself."""
    first, *others = parts
    return not others and first.row is None and first.group is None and first.coefficient == 1


def _times(factor: Factor, other: Factor) -> Factor:
    return other if factor == 1 else factor if other == 1 else factor * other
