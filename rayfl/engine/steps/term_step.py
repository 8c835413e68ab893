"""Local steps on a sum of terms with known gradients, on flat buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from rayfl.engine.gradients.loss_gradient import LossGradient, layers_of
from rayfl.engine.steps.rows import (
    PIECE,
    SCRATCH,
    Combination,
    Operation,
    Products,
    Row,
    Source,
    Target,
    Update,
    Vector,
    merged,
    pieces,
)
from rayfl.engine.steps.training_buffers import MOVED, TrainingBuffers
from rayfl.engine.updates.flat import Layout
from rayfl.engine.updates.requests import TrainRequest
from rayfl.objectives.numbers import Factor, Read, evaluated, is_measured, measured
from rayfl.objectives.pairs import Slopes
from rayfl.objectives.points import Constant, Scope, Share, bare
from rayfl.objectives.terms import Loss, Penalty, Sum
from rayfl.optimization.optimizers import key_of
from rayfl.params import Tree, leaves, map_leaves
from rayfl.tasks.base import Batch, Task


def draw_of_step(draws: Mapping[str, Any], number: int) -> Tree:
    """Returns the draws of one local step."""
    return map_leaves(lambda leaf: leaf[number], draws)


class StepOnTerms:
    """Takes steps on a sum whose terms all have known gradients.

    The gradient of a term is a linear combination of vectors: gradients of losses, trained and frozen models. Its
    coefficients are known when the step runs. So a step (1) interpolates the models at which losses are evaluated, (2)
    computes the inner products on which coefficients depend, (3) computes the gradients of the losses, and (4) combines
    them and applies the update rule.
    """

    def __init__(self, objective: Sum, request: TrainRequest, task: Task, memory: TrainingBuffers) -> None:
        self._memory, self._flats, self._layouts = memory, dict(memory.flats), {MOVED: memory.layout}
        self._scope = Scope(memory.tree, task, request.frozen, request.draws)
        self._factors: dict[tuple[Factor, int | None], int] = {}
        self._known: list[Any] = []
        self._left: dict[str, Tensor] = {}
        self._losses: list[LossGradient] = []
        self._measures: dict[str, tuple[Callable[..., Slopes], Products]] = {}
        self._rows_of: dict[str, int] = {}
        self._parts: dict[Vector, list[tuple[Vector, int]]] = {}
        self._tails: dict[Vector, tuple[str, int | None]] = {}
        self._paths: dict[Vector, str] = {}
        losses = [(str(n), factor, term) for n, (factor, term) in enumerate(objective.terms) if isinstance(term, Loss)]
        others = [(str(n), f, term) for n, (f, term) in enumerate(objective.terms) if isinstance(term, Penalty)]
        before, ready = list[Row](), list[tuple[int, Operation]]()
        self._after: list[Operation] = []
        # Losses first: their interpolated models decide how penalties split into rows. No comprehensions around views:
        # these are closures, see Operation.
        for loss in losses:
            before += self._loss(*loss)
        for penalty in others:
            before += self._penalty(*penalty)
        for row in merged(before):
            ready += pieces(row, self._flats, self._left)
        self._before = [run for _, run in sorted(ready, key=lambda piece: piece[0])]
        for row in merged(self._updates()):
            self._after += [run for _, run in pieces(row, self._flats, self._left)]

    def take(self, batch: Batch, number: int) -> None:
        """Updates the parameters by a step on one mini-batch. No autograd graph may be recorded."""
        self._memory.begin()
        values = [known[number] if isinstance(known, list) else known for known in self._known]
        for prepare in self._before:
            prepare(values)
        for name, (slopes_of, products) in self._measures.items():
            self._settle(values, number, name, slopes_of(*products.sums()))
        for loss in self._losses:
            loss.compute(batch)
        for update in self._after:
            update(values)
        self._left.clear()

    def _settle(self, values: list[Any], number: int, name: str, slopes: Slopes) -> None:
        """Fills in the coefficients that depend on measured inner products."""
        numbers = {f"{name}.{slope}": value for slope, value in slopes._asdict().items()}
        draws = self._scope.draw
        scope = Scope({}, None, self._scope.frozen, None if draws is None else draw_of_step(draws, number), numbers)
        for (factor, _), place in self._factors.items():
            if is_measured(factor, name):
                values[place] = float(scope.number(factor))

    def _loss(self, number: str, factor: Factor, term: Loss) -> Iterator[Row]:
        """Adds a loss: interpolates its model if needed, and passes its gradient on to the shares."""
        shares = term.at.shares(self._scope)
        tensors = {name: self._tensor(parts[0]) for name, parts in shares.items()}
        made = {name: tensor for name, tensor in tensors.items() if not _is_tensor(shares[name])}
        model = {**term.at.base(self._scope), **tensors, **self._new(f"mixed.{number}", made)}
        apart = {name: f"gradient.{number}.{name}" for name in self._large(tensors, model)}
        for name, home in apart.items():
            self._layouts[home] = Layout.of({name: tensors[name]})
        gathered = {name: tensor for name, tensor in tensors.items() if name not in apart}
        room, into, left = self._new(f"gradient.{number}", gathered), dict[str, Tensor](), dict[str, str]()
        for name, parts in shares.items():
            if name in made:
                sources = tuple(
                    Source(i, self._factor(part.coefficient, part.group)) for i, part in enumerate(parts, 1)
                )
                vectors = (self._in(f"mixed.{number}", name), *map(self._vector, parts))
                yield Row(Combination(0, sources), vectors)
            for part in filter(self._moves, parts):
                self._rows_of |= {} if part.row is None else {_path(part): len(self._whole(part))}
                gradient = self._in(apart.get(name, f"gradient.{number}"), name)
                self._add(part, gradient, factor, part.coefficient, part.group)
                if name in apart:
                    left[name] = apart[name]
                else:
                    into[name] = room[name]
        if into or left:
            self._losses.append(LossGradient(self._scope.task, model, into, left, self._left))

    def _large(self, tensors: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> list[str]:
        """Returns the parameters whose gradients are read where autograd puts them: to copy these would take long."""
        if self._flats[MOVED].device.type != "cpu" or layers_of(self._scope.task, model) is not None:
            return []
        return [name for name, tensor in tensors.items() if tensor.numel() > PIECE]

    def _penalty(self, number: str, factor: Factor, term: Penalty) -> Iterator[Row]:
        """Adds a penalty: both gradients, each a combination of its two vectors; measures inner products if needed."""
        slopes, products = term.pair.slopes, Products()
        if not isinstance(slopes, Slopes):
            assert slopes is not None
            self._measures[number] = slopes, products
            slopes = Slopes(*(measured(f"{number}.{slope}") for slope in Slopes._fields))
        for path in term.sides(self._scope)[0]:
            count = max(self._rows_of.get(_path(Share(name, path)), 0) for name in (term.of, term.to))
            for row in range(count) if count else (None,):
                first, second = (Share(name, path, row=row) for name in (term.of, term.to))
                vectors = self._vector(first), self._vector(second)
                if number in self._measures:
                    yield Row(products, vectors)
                for own, other, slope in (
                    (first, vectors[1], slopes.own_first),
                    (second, vectors[0], slopes.own_second),
                ):
                    if self._moves(own):
                        self._add(own, other, factor, slopes.cross)
                        self._add(own, self._vector(own), factor, slope)

    def _add(self, part: Share, source: Vector, factor: Factor, slope: Factor, group: int | None = None) -> None:
        """Adds a summand to the gradient of a trained tensor."""
        vector = self._vector(part)
        found = slope if factor == 1 else factor if slope == 1 else factor * slope
        self._parts.setdefault(vector, [])
        if found != 0:
            self._parts[vector].append((source, self._factor(found, group)))

    def _updates(self) -> Iterator[Row]:
        """Yields rows that update trained vectors; vectors that read each other are in one row."""
        for path in self._memory.layout.moved:
            whole = self._vector(Share("", path))
            if path not in self._rows_of:
                self._parts.setdefault(whole, [])
        readers = Counter(source for parts in self._parts.values() for source, _ in parts)
        together: dict[tuple[str, int | None], list[Vector]] = {}
        for vector in sorted(self._parts):
            together.setdefault(self._tails[vector], []).append(vector)
        for moved in together.values():
            yield self._row(moved, readers)

    def _row(self, moved: list[Vector], readers: Mapping[Vector, int]) -> Row:
        """Returns the row of vectors that are updated together."""
        vectors: list[Vector] = []
        targets = []
        for number, vector in enumerate(moved):
            rule = self._memory.rules[self._paths[vector]]
            parts = sorted(self._parts[vector], key=lambda one: not one[0].home.startswith("gradient"))
            # The gradient of a loss is overwritten if no other row reads it.
            own_room = bool(parts) and parts[0][0].home.startswith("gradient") and readers[parts[0][0]] == 1
            room = parts[0][0] if own_room else vector._replace(home=f"{SCRATCH}{number}")
            place = len(vectors)
            vectors += [vector, *(vector._replace(home=slot) for slot in rule.slots), room]
            targets.append((place, rule, parts))
        places = {vector: place for place, vector in enumerate(vectors)}
        for vector in (source for _, _, parts in targets for source, _ in parts):
            if vector not in places:
                places[vector] = len(vectors)
                vectors.append(vector)
        found = []
        for vector, (place, rule, parts) in zip(moved, targets, strict=True):
            sources = tuple(Source(places[source], factor) for source, factor in parts if source != vector)
            own = tuple(factor for source, factor in parts if source == vector)
            gradient = Combination(place + len(rule.slots) + 1, sources)
            found.append(Target(place, rule, key_of(self._paths[vector]), gradient, own))
        return Row(Update(tuple(found), self._memory.steps), tuple(vectors))

    def _factor(self, factor: Factor, group: int | None = None) -> int:
        """Returns the index of a factor's value."""
        if (factor, group) not in self._factors:
            self._factors[factor, group] = len(self._known)
            known = 0.0 if is_measured(factor) else evaluated(factor, partial(self._read, group=group))
            self._known.append(known.tolist() if isinstance(known, np.ndarray) else known)
        return self._factors[factor, group]

    def _read(self, number: Read, group: int | None) -> Any:
        """Returns a number on the host: for all steps if drawn; the group's entry if it is a vector."""
        drawn, found = number.source == "draw", self._scope.source(number)
        value = np.asarray(found.cpu() if isinstance(found, Tensor) else found, np.float64)
        return value if group is None or value.ndim == drawn else value[..., group]

    def _moves(self, part: Share) -> bool:
        return not isinstance(part.of, Constant) and _path(part) in self._memory.rules

    def _whole(self, part: Share) -> Any:
        tree = self._scope.tree(bare(part.of))
        return dict(leaves(tree))[part.path] if part.path else tree

    def _tensor(self, part: Share) -> Any:
        return self._whole(part) if part.row is None else self._whole(part)[part.row]

    def _vector(self, part: Share) -> Vector:
        """Returns the vector of a share's tensor; packs a frozen one first."""
        home, path, name = MOVED, _path(part), bare(part.of)
        if path not in self._memory.rules:
            home, path = f"frozen.{name}", part.path
            if home not in self._flats:
                found = {p: leaf.to(self._memory.layout.dtype) for p, leaf in self._scope.parameters(name).items()}
                self._layouts[home] = Layout.of(found)
                self._flats[home] = self._layouts[home].pack(found, self._flats[MOVED].device)
        vector = self._in(home, path)
        if part.row is not None:
            size = self._tensor(part).numel()
            vector = Vector(home, vector.start + part.row * size, size)
        tail = part.path, part.row
        # Vectors that terms compare have equal tails; a term on a whole tree has longer ones.
        self._tails[vector] = min(tail, self._tails.get(vector, tail), key=lambda one: len(one[0]))
        self._paths[vector] = path
        return vector

    def _new(self, home: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Allocates a flat buffer for tensors of these shapes; returns views."""
        if not tensors:
            return {}
        self._layouts[home] = Layout.of(tensors)
        self._flats[home] = self._layouts[home].zeros(self._flats[MOVED].device)
        return self._layouts[home].leaves(self._flats[home])

    def _in(self, home: str, path: str) -> Vector:
        place = self._layouts[home].places[path]
        return Vector(home, place.start, place.stop - place.start)


def _path(part: Share) -> str:
    """Returns a share's path, with its name as first key unless it is the trained tree itself."""
    name = bare(part.of)
    return f"{name}/{part.path}" if name and part.path else name or part.path


def _is_tensor(parts: Sequence[Share]) -> bool:
    """Returns whether a parameter is a single tensor of a tree, with coefficient 1."""
    first, *others = parts
    return not others and first.row is None and first.group is None and first.coefficient == 1
