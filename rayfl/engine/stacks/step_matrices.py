"""Local steps on a sum of terms, as matrices that act on a client's vectors.

The gradient of a term is a combination of vectors: trained and frozen models, and the gradients of losses. SGD moves
along it; momentum is a combination too, and so is the interpolated model at which the next loss is evaluated. So all of
a step but the losses' gradients is one product: new rows = matrix x rows, where each row is a flattened model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from rayfl.engine.updates.requests import TrainRequest
from rayfl.objectives.numbers import Factor, Read, evaluated
from rayfl.objectives.pairs import Slopes
from rayfl.objectives.points import TRAINED, Constant, Name, Scope, Share, bare
from rayfl.objectives.terms import Loss, Penalty, Sum
from rayfl.optimization.optimizers import Rule, rule_of
from rayfl.params import leaves
from rayfl.tasks.base import Task


@dataclass(frozen=True)
class Measure:
    """A penalty whose gradient's coefficients depend on inner products of two rows.

    Attributes:
        rows: the two rows.
        slopes: the coefficients, given the inner products.
        weights: how each coefficient enters the gradients, shape (3, trained models, rows read).
    """

    rows: tuple[int, int]
    slopes: Callable[[Any, Any, Any], Slopes]
    weights: np.ndarray


class StepMatrices:
    """The rows of each client of a stack, and the matrices of their steps.

    The rows are, in this order: interpolated models at which losses are evaluated; trained models; their momenta;
    gradients of losses; frozen models. A step reads all but the first kind and writes the first three.

    Args:
        request: any request of the stack.
        task: what its objective is given.

    Attributes:
        trained: first keys of the trained tree; :data:`TRAINED` if it is a model itself.
        frozen: names of frozen models that are read.
        mixed: number of rows that are interpolated models.
        momenta: by trained model, the row of its momentum; None where there is none.
        points: by loss, the row at which it is evaluated.
        gradients: by loss, the row of its gradient.
        written: number of rows that a step writes.
        rows: number of rows.
        segments: groups of adjacent parameters with the same coefficients in every matrix.
        measures: penalties whose coefficients are only known during the step.

    Raises:
        NotLinearError: when a step is not a matrix product.
    """

    def __init__(self, request: TrainRequest, task: Task) -> None:
        self._names = tuple(task.network.parameter_names)
        self._scope = Scope(request.trainable, task, request.frozen, request.draws)
        if not isinstance(request.objective, Sum) or not request.objective.readable:
            raise NotLinearError("the objective is no sum of terms with known gradients")
        if request.max_grad_norm is not None or task.network.buffer_names:
            raise NotLinearError("gradients are clipped, or the network has buffers")
        terms = request.objective.terms
        self._losses = [(factor, term.at.shares(self._scope)) for factor, term in terms if isinstance(term, Loss)]
        penalties = [(factor, term) for factor, term in terms if isinstance(term, Penalty)]
        nested = isinstance(next(iter(request.trainable.values())), Mapping)
        self.trained = list(request.trainable) if nested else [TRAINED]
        used = [share.of for _, shares in self._losses for parts in shares.values() for share in parts]
        used += [name for _, term in penalties for name in (term.of, term.to)]
        self.frozen = list(dict.fromkeys(bare(name) for name in used if bare(name) not in self.trained))
        for name in (*self.trained, *self.frozen):
            self._check_whole(name)
        self._rules = [self._rule(key, request) for key in self.trained]
        own = [self._own_point(shares) for _, shares in self._losses]
        self.mixed = own.count(None)
        first = self.mixed + len(self.trained)
        self.momenta = [None if not rule.momentum else first + n for n, rule in enumerate(self._rules)]
        if len({bool(rule.momentum) for rule in self._rules}) > 1:
            raise NotLinearError("some of what is trained has momentum")
        self.written = first + (len(self._rules) if self._rules[0].momentum else 0)
        self.gradients = list(range(self.written, self.written + len(self._losses)))
        self.rows = self.written + len(self._losses) + len(self.frozen)
        mixtures = iter(range(self.mixed))
        self.points = [next(mixtures) if name is None else self.row(name) for name in own]
        self.segments = self._segments()
        self._known = [(f, t) for f, t in penalties if isinstance(t.pair.slopes, Slopes)]
        self.measures = [self._measure(f, t) for f, t in penalties if not isinstance(t.pair.slopes, Slopes)]

    def row(self, name: Name) -> int:
        """Returns the row of a trained or frozen model."""
        name = bare(name)
        if name in self.trained:
            return self.mixed + self.trained.index(name)
        return self.written + len(self._losses) + self.frozen.index(name)

    def matrices(self, ranked: Sequence[TrainRequest]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the matrices of all steps, without the measured penalties.

        Args:
            ranked: the stack's requests; the first has most steps.

        Returns:
            float64 of shape (steps + 1, N, segments, written, rows read), of which the first only mixes; and of shape
            (steps + 1, N, segments, written, written less mixed): how measured changes of the trained models and
            momenta enter what is written.
        """
        steps, read = ranked[0].plan.steps, self.rows - self.mixed
        gradient = np.zeros((steps, len(ranked), len(self.segments), len(self.trained), read))
        mixing = np.zeros((steps + 1, len(ranked), len(self.segments), self.mixed, read))
        for n, request in enumerate(ranked):
            self._fill(gradient[: request.plan.steps, n], mixing[: request.plan.steps, n], request)
        fixed, along = self._rule_matrices()
        moved = fixed + along @ gradient
        still = np.broadcast_to(np.eye(*fixed.shape), (1, *moved.shape[1:]))
        moved = np.concatenate([still, moved])
        count = fixed.shape[0]
        # An interpolated model is computed from the trained models after the step, and from frozen ones.
        constant = mixing.copy()
        constant[..., :count] = 0
        matrices = np.concatenate([mixing[..., :count] @ moved + constant, moved], axis=-2)
        entering = np.broadcast_to(np.eye(count), (*moved.shape[:3], count, count))
        return matrices, np.concatenate([mixing[..., :count], entering], axis=-2)

    def along(self) -> np.ndarray:
        """Returns the effect of gradients on trained models and momenta, shape (written less mixed, trained models)."""
        return self._rule_matrices()[1]

    def _fill(self, gradient: np.ndarray, mixing: np.ndarray, request: TrainRequest) -> None:
        """Fills in the coefficients of one client's steps: of gradients and of interpolated models."""

        def values(factor: Factor, group: int | None = None) -> Any:
            def read(number: Read) -> Any:
                found = {"draw": request.draws, "frozen": request.frozen}[number.source][number.name]  # type: ignore[index]
                value = np.asarray(found.cpu() if isinstance(found, Tensor) else found, np.float64)
                return value if group is None or value.ndim == (number.source == "draw") else value[..., group]

            return evaluated(factor, read)

        for (factor, shares), point, row in zip(self._losses, self.points, self.gradients, strict=True):
            weight, column = values(factor), row - self.mixed
            for segment, names in enumerate(self.segments):
                for share in shares[names[0]]:
                    coefficient = values(share.coefficient, share.group)
                    if point < self.mixed:
                        mixing[:, segment, point, self.row(share.of) - self.mixed] += coefficient
                    if self._moves(share.of):
                        gradient[:, segment, self._number(share.of), column] += weight * coefficient
        for factor, term in self._known:
            assert isinstance(term.pair.slopes, Slopes)
            for weights, slope in zip(self._weights(term), term.pair.slopes, strict=True):
                amount = np.asarray(values(factor) * slope, np.float64)
                gradient += (amount[..., None, None] * weights)[..., None, :, :]

    def _weights(self, term: Penalty) -> np.ndarray:
        """Returns how the slopes ``cross``, ``own_first`` and ``own_second`` of a penalty enter the gradients."""
        found = np.zeros((3, len(self.trained), self.rows - self.mixed))
        of, to = self.row(term.of) - self.mixed, self.row(term.to) - self.mixed
        for name, own, other, slope in ((term.of, of, to, 1), (term.to, to, of, 2)):
            if self._moves(name):
                found[0, self._number(name), other] += 1
                found[slope, self._number(name), own] += 1
        return found

    def _measure(self, factor: Factor, term: Penalty) -> Measure:
        if not isinstance(factor, int | float) or term.pair.slopes is None or isinstance(term.pair.slopes, Slopes):
            raise NotLinearError("a measured penalty has a factor that is drawn")
        return Measure((self.row(term.of), self.row(term.to)), term.pair.slopes, factor * self._weights(term))

    def _rule_matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the update rules as two matrices: what acts on models and momenta, and what acts on gradients."""
        count, trained = self.written - self.mixed, len(self.trained)
        fixed, along = np.zeros((count, self.rows - self.mixed)), np.zeros((count, trained))
        for n, (rule, row) in enumerate(zip(self._rules, self.momenta, strict=True)):
            fixed[n, n] = 1
            step, momentum = np.zeros(self.rows - self.mixed), row and row - self.mixed
            step[n], ahead = rule.weight_decay, 1.0
            if momentum is not None:
                fixed[momentum, n], fixed[momentum, momentum], along[momentum, n] = rule.weight_decay, rule.momentum, 1
                step = rule.momentum * fixed[momentum] + step if rule.nesterov else fixed[momentum].copy()
                ahead = 1 + rule.momentum if rule.nesterov else 1.0
            fixed[n] -= rule.lr * step
            along[n, n] = -rule.lr * ahead
        return fixed, along

    def _segments(self) -> list[list[str]]:
        found: list[list[str]] = []
        last: Any = None
        for name in self._names:
            kind = [[(s.of, s.coefficient, s.group) for s in shares[name]] for _, shares in self._losses]
            if kind != last:
                found.append([])
            found[-1].append(name)
            last = kind
        return found

    def _own_point(self, shares: Mapping[str, Sequence[Share]]) -> str | None:
        """Returns the name of the model at which a loss is evaluated; None for an interpolated one."""
        if set(shares) != set(self._names) or any(
            s.row is not None or s.path != n for n, p in shares.items() for s in p
        ):
            raise NotLinearError("a loss is taken at rows of a tensor")
        parts = {(bare(s.of), len(p), s.coefficient == 1, s.group) for p in shares.values() for s in p}
        (name, count, plain, group), *others = parts
        return name if not others and count == 1 and plain and group is None else None

    def _rule(self, key: str, request: TrainRequest) -> Rule:
        """Returns the update rule of a trained model."""
        paths = [f"{key}/{name}" if key else name for name in self._names]
        rules = {rule_of(path, request.rule, request.groups) for path in paths}
        rule = rules.pop()
        if rules or rule.optimizer != "sgd" or rule.bounds is not None or rule.dampening:
            raise NotLinearError("the optimizer is not plain SGD")
        return rule

    def _check_whole(self, name: str) -> None:
        found = self._scope.tree(name)
        whole = isinstance(found, Mapping) and [path for path, _ in leaves(found)] == list(self._names)
        if not whole or not all(isinstance(leaf, Tensor) for leaf in found.values()):
            raise NotLinearError(f"{name!r} is no whole model")
        like = self._scope.tree(self.trained[0])
        if any(leaf.shape != like[path].shape for path, leaf in found.items()):
            raise NotLinearError(f"{name!r} has tensors of other shapes")

    def _moves(self, name: Name) -> bool:
        return not isinstance(name, Constant) and name in self.trained

    def _number(self, name: Name) -> int:
        return self.trained.index(bare(name))


class NotLinearError(Exception):
    """A step is not a matrix product; the message says why."""
