"""The line between two models, as buffers: the mixed model, the gradient of its loss, and pieces of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfl.closed_form import writing_gradients
from rayfl.engine.moved import Moved
from rayfl.objectives import Mixture
from rayfl.params import ALIGNMENT_BYTES, Layout, Tree, leaves
from rayfl.tasks import Batch, Classification

PIECE = 1 << 16
"""Elements worked on at a time: what several operations read and write stays in the processor's cache."""


@dataclass(frozen=True)
class Span:
    """Where neighbouring elements of all parameters are.

    Attributes:
        group: which mixing coefficient is theirs.
        source: which vector of the gradient has theirs.
        within: where in that vector.
        here: where in the layout.
    """

    group: int
    source: int
    within: slice
    here: slice

    def widened(self, layout: Layout) -> slice:
        """``here`` with the padding that follows a tensor's last elements."""
        step = ALIGNMENT_BYTES // layout.dtype.itemsize
        return slice(self.here.start, -(-self.here.stop // step) * step)


@dataclass(frozen=True)
class Line:
    """Two models of one network, and what lies between them.

    Attributes:
        mixture: which they are, and the penalty between them.
        moved: both as buffers, and the rule by which they are moved.
        half: the layout of one of them.
        names: its parameters, without what no gradient moves.
        groups: names of the parameters that share a mixing coefficient.
        anchor: what the start is pulled towards, a model; empty without a pull.
        towards: the factor of the pull.
    """

    mixture: Mixture
    moved: Moved
    half: Layout
    names: Sequence[str]
    groups: Sequence[Sequence[str]]
    anchor: Tree
    towards: float

    def buffer(self, purpose: str) -> Tensor:
        """Memory of earlier local updates for one model."""
        return self.moved.workspace.buffer(purpose, self.half, self.moved.flat.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters in a buffer of one model."""
        found = dict(leaves(self.half.views(flat)))
        return [found[name] for name in self.names]

    def halves(self, flat: Tensor | None) -> list[Tensor]:
        """Start and end in a buffer of both; nothing of None."""
        return [] if flat is None else list(torch.split(flat, self.half.size))

    def by_chain(self, task: Classification, mixed: Tensor, into: Tensor) -> Callable[[Batch], None] | None:
        """Writes the gradient of the mixed model's loss to a buffer; None if the network is no chain of layers."""
        layers, room = (task.chain(self.half.views(flat)) for flat in (mixed, into))
        if layers is None or room is None:
            return None
        write = writing_gradients(layers, room)
        return lambda batch: write(batch.x, batch.y)

    def by_autograd(self, task: Classification, mixed: Tensor, start: Tree) -> Callable[[Batch], list[Tensor]]:
        """Makes that gradient, one vector a parameter.

        Args:
            task: knows the network.
            mixed: the buffer of the mixed model.
            start: has the buffers of the network: what a forward pass records in them is recorded there.
        """
        variables = [view.detach().requires_grad_() for view in self.views(mixed)]
        model = {**start, **dict(zip(self.names, variables, strict=True))}

        @torch.enable_grad()
        def differentiate(batch: Batch) -> list[Tensor]:
            found = torch.autograd.grad(task.loss(model, batch), variables, materialize_grads=True)
            return [gradient.contiguous().view(-1) for gradient in found]

        return differentiate

    def spans(self) -> Iterator[Span]:
        """Pieces of one tensor each, for a gradient of one vector a parameter."""
        places = {name: place for place, name in enumerate(self.names)}
        sizes = {path: shape.numel() for path, shape in zip(self.half.paths, self.half.shapes, strict=True)}
        bounds = _bounds(self.half)
        for group, names in enumerate(self.groups):
            for name in names:
                first = bounds[name].start
                for part in _pieces(slice(0, sizes[name])):
                    yield Span(group, places[name], part, slice(first + part.start, first + part.stop))

    def flat_spans(self) -> Iterator[Span]:
        """Pieces of neighbouring tensors with their padding, for a gradient that lies as they do."""
        bounds = _bounds(self.half)
        for group, names in enumerate(self.groups):
            for run in _runs(bounds[name] for name in names):
                yield from (Span(group, 0, here, here) for here in _pieces(run))


def _bounds(layout: Layout) -> dict[str, slice]:
    """Where tensors lie, with their padding."""
    stops = (*layout.offsets[1:], layout.size)
    return {path: slice(*ends) for path, *ends in zip(layout.paths, layout.offsets, stops, strict=True)}


def _runs(bounds: Iterable[slice]) -> Iterator[slice]:
    """Neighbours together."""
    runs: list[list[int]] = []
    for begin, stop in sorted((one.start, one.stop) for one in bounds):
        if runs and runs[-1][1] == begin:
            runs[-1][1] = stop
        else:
            runs.append([begin, stop])
    yield from (slice(*run) for run in runs)


def _pieces(whole: slice) -> Iterator[slice]:
    for begin in range(whole.start, whole.stop, PIECE):
        yield slice(begin, min(begin + PIECE, whole.stop))
