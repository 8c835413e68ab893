"""Functions of whole models whose gradients need no graph: they are sums of known tensors with known factors.

A penalty or a mixture of models reads every parameter. Autograd makes each of its gradients as a tensor of its own and
adds them up, which for large models takes longer than the model itself. A :class:`Tape` notes tensors and factors.
:mod:`rayfl.closed_form` adds small networks, whose gradients keep the bits of autograd.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import TracebackType

import torch
from torch import Tensor

Terms = list[tuple[float, Tensor]]
"""A sum of tensors times factors; zero if it is empty."""
Gradients = Sequence[Tensor | None]

_BATCH = 1 << 17
"""Elements that are worked on at a time: what several operations read and write stays in the processor's cache."""

_VECTOR = 16
"""Pieces begin at multiples of it, where the processor reads fastest."""

_TINY = 1e-12
_thread = threading.local()


class Tape:
    """The gradients of one local step after the other, with respect to tensors that are fixed once.

    Within ``with tape:`` the functions of this module cut the graph: what they return is a leaf for autograd. From the
    gradients of these leaves :meth:`gradients` goes on itself. An objective that differentiates on its own finds no way
    through them: see :meth:`record`.

    Args:
        moved: the tensors; leaves that require gradients.
        exact: whether only what keeps the bits of autograd is noted: networks, no penalties and no mixtures.
        room: called when it is first needed: memory for one gradient of each of the tensors, used anew in every step.
    """

    def __init__(
        self, moved: Sequence[Tensor], exact: bool = False, room: Callable[[], Sequence[Tensor]] | None = None
    ) -> None:
        self.exact, self._room, self._cuts = exact, room, True
        self._moved = list(moved)
        self._fixed = {id(tensor): place for place, tensor in enumerate(self._moved)}
        self._clear()

    def __enter__(self) -> None:
        self._clear()
        _thread.tape = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _thread.tape = None

    def _clear(self) -> None:
        self._leaves: list[Tensor] = []
        self._pulls: list[tuple[int, int, Callable[[Gradients], None]]] = []
        self._places = dict(self._fixed)
        self._terms: list[Terms] = [[] for _ in self._moved]

    def record(self, objective: Callable[[], Tensor]) -> Tensor:
        """The value of an objective; the graph stays whole from the call on in which it differentiates on its own."""
        if self._cuts:
            try:
                with self:
                    return objective()
            except RuntimeError:
                if not self._leaves:
                    raise
                # Any other reason comes up again.
                self._cuts = False
        self._clear()
        return objective()

    def wants(self, tensor: Tensor) -> bool:
        """Whether gradients with respect to the tensor are noted."""
        return id(tensor) in self._places

    def reads(self, tensors: Sequence[Tensor]) -> bool:
        """Whether each of the tensors is moved, comes from this tape or is constant, and not all are constant."""
        wanted = [id(tensor) in self._places for tensor in tensors]
        return any(wanted) and all(
            here or not tensor.requires_grad for here, tensor in zip(wanted, tensors, strict=True)
        )

    def covers(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
        """Whether corresponding tensors have one shape, none is empty or listed twice, each is moved or constant."""
        return (
            self.reads((*left, *right))
            and all(a.shape == b.shape for a, b in zip(left, right, strict=True))
            and all(tensor.numel() for tensor in left)
            and all(len({id(tensor) for tensor in side}) == len(side) for side in (left, right))
        )

    def cut(self, values: Sequence[Tensor], pull: Callable[[Gradients], None]) -> list[Tensor]:
        """Ends the graph at ``values``.

        Args:
            values: computed without a graph.
            pull: is given their gradients (None for what the loss does not read) and calls :meth:`add`.

        Returns:
            ``values`` as leaves that require gradients.
        """
        found = [value.requires_grad_() for value in values]
        self._pulls.append((len(self._leaves), len(self._leaves) + len(found), pull))
        for leaf in found:
            self._places[id(leaf)] = len(self._terms)
            self._terms.append([])
        self._leaves += found
        return found

    def room_for(self, target: Tensor) -> Tensor | None:
        """Where the first gradient of a tensor that is moved may be written; None: to fresh memory."""
        place = self._fixed.get(id(target))
        if self._room is None or place is None or self._terms[place]:
            return None
        return self._room()[place]

    def add(self, targets: Sequence[Tensor], factor: float, tensors: Gradients) -> None:
        """Adds ``factor`` times a tensor to the gradient of each target that is noted; None stands for zeros."""
        for target, tensor in zip(targets, tensors, strict=True):
            place = self._places.get(id(target))
            if place is not None and tensor is not None and factor:
                self._terms[place].append((factor, tensor))

    def gradients(self, loss: Tensor) -> list[Terms]:
        """The gradients of ``loss``, computed by :meth:`record` or within ``with tape:`` just before."""
        known, terms = len(self._moved), self._terms
        if self._leaves and loss is self._leaves[-1]:
            terms[-1].append((1.0, torch.ones_like(loss)))
        else:
            every = [*self._moved, *self._leaves]
            self.add(every, 1.0, torch.autograd.grad(loss, every, allow_unused=True))
        with torch.no_grad():
            for start, stop, pull in reversed(self._pulls):
                own = [(terms[known + i], self._leaves[i]) for i in range(start, stop)]
                pull([total(found, like) if found else None for found, like in own])
        self._clear()
        return terms[:known]


def total(terms: Terms, like: Tensor) -> Tensor:
    """The sum itself; ``like`` gives shape and type of an empty one."""
    if not terms:
        return torch.zeros_like(like)
    (factor, first), *rest = terms
    result = first if factor == 1 else first * factor
    for factor, tensor in rest:
        result = torch.add(result, tensor, alpha=factor)
    return result


def recording() -> bool:
    """Whether a tape is active in this thread."""
    return getattr(_thread, "tape", None) is not None and torch.is_grad_enabled()


def tape_for(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tape | None:
    """The active tape, if it notes functions of such pairs of tensors."""
    if not recording():
        return None
    tape: Tape = _thread.tape
    return tape if not tape.exact and tape.covers(left, right) else None


def tape_of(tensors: Sequence[Tensor]) -> Tape | None:
    """The active tape, if it reads these tensors."""
    if not recording():
        return None
    tape: Tape = _thread.tape
    return tape if tape.reads(tensors) else None


@torch.no_grad()
def interpolate(tape: Tape, start: Sequence[Tensor], end: Sequence[Tensor], coefficient: float) -> list[Tensor]:
    """``(1 - coefficient) start + coefficient end``."""

    def pull(gradients: Gradients) -> None:
        tape.add(start, 1 - coefficient, gradients)
        tape.add(end, coefficient, gradients)

    return tape.cut(torch._foreach_lerp(list(start), list(end), coefficient), pull)


@torch.no_grad()
def inner_product(tape: Tape, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """The sum of all products; a scalar."""

    def pull(gradients: Gradients) -> None:
        upstream = _number(gradients)
        tape.add(left, upstream, right)
        tape.add(right, upstream, left)

    return tape.cut([_total([torch.dot(a, b) for a, b in _pieces(left, right)])], pull)[0]


@torch.no_grad()
def squared_distance(tape: Tape, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """The sum of all squared differences; a scalar."""
    differences = (d for a, b in in_batches(left, right) for d in torch._foreach_sub(a, b))

    def pull(gradients: Gradients) -> None:
        upstream = _number(gradients)
        for one, other in ((left, right), (right, left)):
            tape.add(one, 2 * upstream, one)
            tape.add(one, -2 * upstream, other)

    return tape.cut([_total([torch.dot(d, d) for d in differences])], pull)[0]


@torch.no_grad()
def squared_cosine(tape: Tape, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """The squared cosine of the angle between two vectors; a scalar.

    For its gradient see :func:`squared_cosine_factors`.
    """
    rows = [(torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)) for a, b in _pieces(left, right)]
    product, left_norm, right_norm = (_total(column) for column in zip(*rows, strict=True))
    cosine = squared_cosine_of(product, left_norm, right_norm)
    found = squared_cosine_factors(torch.ones_like(cosine), cosine, product, left_norm, right_norm)
    cross, own_left, own_right = (factor.item() for factor in found)

    def pull(gradients: Gradients) -> None:
        upstream = _number(gradients)
        tape.add(left, upstream * cross, right)
        tape.add(right, upstream * cross, left)
        tape.add(left, upstream * own_left, left)
        tape.add(right, upstream * own_right, right)

    return tape.cut([cosine], pull)[0]


def squared_cosine_of(product: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """It from the inner product of two vectors and their squared norms; all are scalars."""
    return product * product / (left * right).clamp_min(_TINY)


def squared_cosine_factors(
    upstream: Tensor, cosine: Tensor, product: Tensor, left: Tensor, right: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the squared cosine q between f and l: those of l in f's and of f in l's, f in f's, l in l's.

    As a function of f it is 2 p / (|f|^2 |l|^2) l - 2 q / |f|^2 f. Where the denominator is held at its floor it is a
    constant, and only the numerator has a gradient.

    Args:
        upstream: the gradient of q; all are scalars.
        cosine: q.
        product: p, of f and l.
        left: |f|^2.
        right: |l|^2.
    """
    norms = left * right
    own = torch.where(norms > _TINY, -2 * upstream * cosine, torch.zeros_like(cosine))
    cross = 2 * upstream * product / norms.clamp_min(_TINY)
    return cross, own / left.clamp_min(_TINY), own / right.clamp_min(_TINY)


def in_batches(*columns: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Corresponding pieces of corresponding tensors of one shape, batch by batch.

    A batch holds as many small tensors as make up one piece of a large one, so that there are few operations.

    Args:
        columns: tensors; all columns are of one length.

    Yields:
        One list of one-dimensional views a column.
    """
    flat = [[tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in column] for column in columns]
    for batch in _batches(tuple(tensor.numel() for tensor in columns[0])):
        yield [[row[i] if whole else row[i][start:stop] for i, start, stop, whole in batch] for row in flat]


@lru_cache
def _batches(sizes: tuple[int, ...]) -> tuple[tuple[tuple[int, int, int, bool], ...], ...]:
    """(tensor, first element, last element + 1, whether that is all of it) of every piece, by batch."""
    batches: list[list[tuple[int, int, int, bool]]] = [[]]
    room = _BATCH
    for i, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            batches[-1].append((i, start, stop, stop - start == size))
            room -= -(-(stop - start) // _VECTOR) * _VECTOR
            start = stop
            if not room:
                batches.append([])
                room = _BATCH
    return tuple(tuple(batch) for batch in batches if batch)


def _pieces(left: Sequence[Tensor], right: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for a, b in in_batches(left, right):
        yield from zip(a, b, strict=True)


def _total(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum()


def _number(gradients: Gradients) -> float:
    """The gradient of a scalar; 0 if the loss does not read it."""
    (upstream,) = gradients
    return 0.0 if upstream is None else upstream.item()
