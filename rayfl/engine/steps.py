"""One local step of one client: by autograd, or by what its objective declares, with less of a graph or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from rayfl.closed_form import pulling, writing_gradients
from rayfl.engine.mixing import can_mix, mixed_step
from rayfl.engine.moved import Moved
from rayfl.engine.requests import TrainRequest
from rayfl.objectives import Declared, Envelope, declared
from rayfl.params import Tree, from_leaves, leaves
from rayfl.tasks import Batch, Classification, Task

Kernel = Literal["reference", "fast"]
Step = Callable[[Batch, Any], None]
"""Takes a mini-batch and the step's draws, and moves the parameters."""


def step_of(request: TrainRequest, task: Task, model: Tree, moved: Moved, kernel: Kernel) -> Step:
    """How the steps of a request are taken.

    Args:
        request: the local update.
        task: what the objective is given.
        model: views of the parameters; those that are moved require gradients.
        moved: the same as buffers.
        kernel: ``reference`` keeps the bits of autograd, ``fast`` is equal to it up to rounding.
    """
    known = declared(request.objective)
    if known is not None and isinstance(task, Classification):
        if known.mixture is not None:
            if can_mix(known.mixture, model, moved):
                exact = kernel == "reference"
                return mixed_step(known.mixture, known.pull, task, model, moved, request.frozen, exact)
        elif task.chain(model if known.model is None else model[known.model]) is not None:
            if known.envelope is None:
                return _closed_form(task, moved, known, request.frozen)
            if _can_follow(known.envelope, moved):
                return _enveloped(task, moved, known, known.envelope, request.frozen)
    return _by_autograd(request, task, model, moved)


def _closed_form(task: Classification, moved: Moved, known: Declared, frozen: Any) -> Step:
    """Along the gradient of a fully connected network's own loss, and of a pull: the operations of autograd."""
    step, gradients = _rule(moved)
    names = moved.paths if known.model is None else [path.removeprefix(f"{known.model}/") for path in moved.paths]
    write = _gradient_of_chain(task, names, moved.values, gradients)
    add_pull = None
    if known.pull is not None:
        found = dict(leaves(frozen[known.pull.anchor]))
        add_pull = pulling(moved.values, [found[name] for name in names], known.pull.factor, gradients)

    def take(batch: Batch, draw: Any) -> None:
        with torch.no_grad():
            write(batch)
            if add_pull is not None:
                add_pull()
            step(gradients)

    return take


def _rule(moved: Moved) -> tuple[Callable[[list[Tensor]], None], list[Tensor]]:
    """What a step does with the gradients, and where they are to be written."""
    step, room = moved.rule()
    return step, [torch.zeros_like(value) for value in moved.values] if room is None else room()


def _gradient_of_chain(
    task: Classification, names: Sequence[str], values: Sequence[Tensor], gradients: Sequence[Tensor]
) -> Callable[[Batch], None]:
    """Writes the gradient of a fully connected network's loss; no graph may be recorded.

    Args:
        task: knows the network.
        names: its parameters.
        values: these.
        gradients: where theirs go.
    """
    layers, into = (task.chain(from_leaves(dict(zip(names, tensors, strict=True)))) for tensors in (values, gradients))
    assert layers is not None
    assert into is not None
    write = writing_gradients(layers, into)
    return lambda batch: write(batch.x, batch.y)


def _can_follow(envelope: Envelope, moved: Moved) -> bool:
    """Whether the centre of an envelope, where it does not move, may be left alone; elsewhere a number would wait."""
    rules = moved.entry(envelope.centre).sgd.members
    alone = not any(rule.momentum or rule.weight_decay or rule.bounds for rule in rules)
    return alone and moved.sgd.max_norm is None and moved.flat.device.type == "cpu"


def _enveloped(task: Classification, moved: Moved, known: Declared, envelope: Envelope, frozen: Any) -> Step:
    """The same with a pull towards a centre that moves too: only where it does is it read and written."""
    assert known.model is not None
    inner, outer = moved.entry(known.model), moved.entry(envelope.centre)
    (step, gradients), (move, slopes) = _rule(inner), _rule(outer)
    names = [path.removeprefix(f"{known.model}/") for path in inner.paths]
    write = _gradient_of_chain(task, names, inner.values, gradients)
    ahead = [torch.empty_like(value) for value in outer.values]
    pull, pull_ahead = (pulling(inner.values, centre, envelope.factor, gradients) for centre in (outer.values, ahead))
    follow = pulling(outer.values, inner.values, envelope.factor, slopes)

    def take(batch: Batch, draw: Any) -> None:
        with torch.no_grad():
            write(batch)
            due = draw[envelope.due]
            if not due:
                pull()
                step(gradients)
                return
            for place, one, other in zip(ahead, outer.values, inner.values, strict=True):
                torch.lerp(one, other, (due * frozen[envelope.share]).to(one), out=place)
            pull_ahead()
            torch._foreach_zero_(slopes)
            follow()
            step(gradients)
            move(slopes)

    return take


def _by_autograd(request: TrainRequest, task: Task, model: Tree, moved: Moved) -> Step:
    """Along the gradient of any objective: nothing stands between it and its graph."""
    step, _ = moved.rule()
    objective, found = partial(request.objective, model), dict(leaves(model))
    variables = [found[path] for path in moved.paths]

    def take(batch: Batch, draw: Any) -> None:
        loss = objective(batch, task, request.frozen, draw)
        # zeros for what the objective does not read, as under vmap(grad)
        gradients = torch.autograd.grad(loss, variables, materialize_grads=True)
        with torch.no_grad():
            step(list(gradients))

    return take
