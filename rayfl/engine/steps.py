"""One local step of one client in three ways: by autograd, with sums of tensors out of the graph, without any graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from rayfl.closed_form import gradients_into, pulling
from rayfl.engine.blocked import BlockedSGD
from rayfl.engine.fused import FusedSGD, is_exact
from rayfl.engine.requests import TrainRequest
from rayfl.engine.sgd import SGD
from rayfl.engine.workspace import Workspace
from rayfl.objectives import Pull, declared
from rayfl.params import Layout, Tree, from_leaves, leaves
from rayfl.tape import Tape, total
from rayfl.tasks import Batch, Classification, Task

Kernel = Literal["reference", "fast"]
Step = Callable[[Batch, Any], None]
"""Takes a mini-batch and the step's draws, and moves the parameters."""


@dataclass(frozen=True)
class Moved:
    """What a local update moves, and by which rule.

    Attributes:
        sgd: the rule.
        layout: where the tensors lie in the buffers.
        paths: which of them are moved, in the order in which ``sgd`` knows them.
        flat: the parameters.
        velocity: the momentum buffers; None where nothing has momentum.
        workspace: memory for gradients.
    """

    sgd: SGD
    layout: Layout
    paths: Sequence[str]
    flat: Tensor
    velocity: Tensor | None
    workspace: Workspace

    @cached_property
    def values(self) -> list[Tensor]:
        """Views that autograd knows nothing of, so that they may be changed in place."""
        return self._views(self.flat)

    @cached_property
    def momentum(self) -> list[Tensor]:
        """The same of the momentum buffers."""
        return [] if self.velocity is None else self._views(self.velocity)

    def _views(self, flat: Tensor) -> list[Tensor]:
        found = dict(leaves(self.layout.views(flat)))
        return [found[path] for path in self.paths]

    def rule(self) -> tuple[Callable[[list[Tensor]], None], Callable[[], list[Tensor]] | None]:
        """What a step does with the gradients, and where it would best find them; the bits are the same everywhere."""
        if is_exact(self.layout.dtype, self.flat.device):
            fused = FusedSGD(self.sgd, self.layout, self.paths, self.flat, self.velocity, self.workspace)
            return fused.step, lambda: fused.room
        return partial(self.sgd.step, self.values, velocity=self.momentum), None


def step_of(request: TrainRequest, task: Task, model: Tree, moved: Moved, kernel: Kernel) -> Step:
    """How the steps of a request are taken.

    Args:
        request: the local update.
        task: what the objective is given.
        model: views of the parameters; those that are moved require gradients.
        moved: the same as buffers.
        kernel: ``reference`` leaves all gradients to autograd, ``fast`` those of penalties and mixtures to a tape.
    """
    known = declared(request.objective)
    if known is not None and isinstance(task, Classification) and task.chain(model) is not None:
        return _closed_form(task, moved, known.pull, request.frozen)
    objective = partial(request.objective, model)

    def loss(batch: Batch, draw: Any) -> Tensor:
        return objective(batch, task, request.frozen, draw)

    found = dict(leaves(model))
    return (_fast if kernel == "fast" else _reference)(loss, [found[path] for path in moved.paths], moved)


def _closed_form(task: Classification, moved: Moved, pull: Pull | None, frozen: Any) -> Step:
    """Along the gradient of a fully connected network's own loss: the operations of the tape's, without the tape."""
    step, room = moved.rule()
    gradients = [torch.zeros_like(value) for value in moved.values] if room is None else room()
    layers, into = (
        task.chain(from_leaves(dict(zip(moved.paths, tensors, strict=True)))) for tensors in (moved.values, gradients)
    )
    assert layers is not None
    assert into is not None
    found = {} if pull is None else dict(leaves(frozen[pull.anchor]))
    anchors = [found[path] for path in moved.paths] if pull is not None else []
    add_pull = None if pull is None else pulling(moved.values, anchors, pull.factor, gradients)

    def take(batch: Batch, draw: Any) -> None:
        with torch.no_grad():
            gradients_into(layers, into, batch.x, batch.y)
            if add_pull is not None:
                add_pull()
            step(gradients)

    return take


def _reference(loss: Callable[[Batch, Any], Tensor], model: Sequence[Tensor], moved: Moved) -> Step:
    """Along the gradient of a loss, all of it from autograd."""
    step, room = moved.rule()
    tape, values = Tape(model, exact=True, room=room), moved.values

    def take(batch: Batch, draw: Any) -> None:
        with tape:
            value = loss(batch, draw)
        # zeros for what the objective does not read, as under vmap(grad)
        step([total(terms, like) for terms, like in zip(tape.gradients(value), values, strict=True)])

    return take


def _fast(loss: Callable[[Batch, Any], Tensor], model: Sequence[Tensor], moved: Moved) -> Step:
    """The same up to rounding, with the gradients of penalties and mixtures from a tape."""
    step, room = moved.rule()
    tape, values = Tape(model, room=room), moved.values
    blocked = BlockedSGD(moved.sgd, values, model, moved.momentum)

    def take(batch: Batch, draw: Any) -> None:
        with tape:
            value = loss(batch, draw)
        gradients = tape.gradients(value)
        if moved.sgd.max_norm is None and any(len(terms) != 1 for terms in gradients):
            blocked.step(gradients)
        else:
            with torch.no_grad():
                step([total(terms, like) for terms, like in zip(gradients, values, strict=True)])

    return take
