"""Client by client: parameters are views of one flat buffer, moved in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from rayfl.engine.blocked import BlockedSGD
from rayfl.engine.fused import FusedSGD, is_exact
from rayfl.engine.requests import GradientRequest, OutputRequest, TrainRequest
from rayfl.engine.sgd import SGD
from rayfl.params import Layout, Tree, from_leaves, leaves, map_leaves
from rayfl.tape import Tape, total
from rayfl.tasks import Batch, Task

Kernel = Literal["reference", "fast"]


def is_buffer(path: str, task: Task) -> bool:
    """Whether a leaf is a module buffer: it travels with the weights but no gradient step moves it."""
    name = path.rsplit("/", 1)[-1]
    return any(name in candidate.network.buffer_names for candidate in task.candidates)


def train(request: TrainRequest, task: Task, device: torch.device, kernel: Kernel = "reference") -> Tree:
    """Runs one local update and returns the trained tree (fresh memory).

    Args:
        request: the local update.
        task: what the objective is given.
        device: where the steps run.
        kernel: ``reference`` leaves all gradients to autograd, ``fast`` those of penalties and mixtures to a tape.
    """
    layout = Layout.of(request.trainable)
    flat = layout.pack(request.trainable, device)
    model = layout.views(flat)
    paths = [path for path, _ in leaves(model) if not is_buffer(path, task)]
    moved = [leaf.requires_grad_() for path, leaf in leaves(model) if not is_buffer(path, task)]
    sgd = SGD(request, paths)
    velocity = _initial_velocity(request, layout, flat) if sgd.has_momentum else None
    take = (_fast if kernel == "fast" else _reference)(sgd, layout, paths, moved, flat, velocity)
    examples, bounds = request.examples, request.plan.bounds
    variations = None if request.variations is None else request.variations.to(device)
    with _seeded(request.seed, task, device):
        for step, index in enumerate(request.plan.batches(device)):
            x = examples.x.index_select(0, index)
            if variations is not None:
                x = variations.part(bounds[step], bounds[step + 1]).applied(x)
            batch = Batch(x, examples.y.index_select(0, index))
            draw = None if request.draws is None else draw_of_step(request.draws, step)
            take(partial(request.objective, model, batch, task, request.frozen, draw))
    if request.velocity is not None and velocity is not None:
        buffers = dict(leaves(layout.views(velocity)))
        request.velocity.update({path: buffers[path].clone() for path in paths})
    return map_leaves(Tensor.detach, model)


def _reference(
    sgd: SGD, layout: Layout, paths: Sequence[str], moved: Sequence[Tensor], flat: Tensor, velocity: Tensor | None
) -> Callable[[Callable[[], Tensor]], None]:
    """A step along the gradient of a loss, all of it from autograd."""
    step, room = _update(sgd, layout, paths, flat, velocity)
    tape, values = Tape(moved, exact=True, room=room), _views(layout, flat, paths)

    def take(loss: Callable[[], Tensor]) -> None:
        with tape:
            value = loss()
        # zeros for what the objective does not read, as under vmap(grad)
        step([total(terms, like) for terms, like in zip(tape.gradients(value), values, strict=True)])

    return take


def _fast(
    sgd: SGD, layout: Layout, paths: Sequence[str], moved: Sequence[Tensor], flat: Tensor, velocity: Tensor | None
) -> Callable[[Callable[[], Tensor]], None]:
    """The same up to rounding, with the gradients of penalties and mixtures from a tape."""
    step, room = _update(sgd, layout, paths, flat, velocity)
    tape = Tape(moved, room=room)
    values, momentum = _views(layout, flat, paths), [] if velocity is None else _views(layout, velocity, paths)
    blocked = BlockedSGD(sgd, values, moved, momentum)

    def take(loss: Callable[[], Tensor]) -> None:
        with tape:
            value = loss()
        gradients = tape.gradients(value)
        if sgd.max_norm is None and any(len(terms) != 1 for terms in gradients):
            blocked.step(gradients)
        else:
            with torch.no_grad():
                step([total(terms, like) for terms, like in zip(gradients, values, strict=True)])

    return take


def _update(
    sgd: SGD, layout: Layout, paths: Sequence[str], flat: Tensor, velocity: Tensor | None
) -> tuple[Callable[[list[Tensor]], None], Callable[[], Sequence[Tensor]] | None]:
    """What a step does with the gradients of the tensors at ``paths``, and where it would best find them.

    The bits are the same in both cases.
    """
    if is_exact(layout.dtype, flat.device):
        fused = FusedSGD(sgd, layout, paths, flat, velocity)
        return fused.step, lambda: fused.room
    momentum = [] if velocity is None else _views(layout, velocity, paths)
    return partial(sgd.step, _views(layout, flat, paths), velocity=momentum), None


def _views(layout: Layout, flat: Tensor, paths: Sequence[str]) -> list[Tensor]:
    """Views that autograd knows nothing of, so that they may be changed in place."""
    found = dict(leaves(layout.views(flat)))
    return [found[path] for path in paths]


def _initial_velocity(request: TrainRequest, layout: Layout, flat: Tensor) -> Tensor:
    """The momentum buffers before the first step: those the request brings, zeros for the rest."""
    velocity = torch.zeros_like(flat)
    buffers = dict(leaves(layout.views(velocity)))
    for path, kept in (request.velocity or {}).items():
        buffers[path].copy_(kept)
    return velocity


@contextmanager
def _seeded(seed: int, task: Task, device: torch.device) -> Iterator[None]:
    """Dropout draws from ``seed``; the global generators are as before afterwards."""
    if not any(candidate.network.stochastic for candidate in task.candidates):
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # torch.manual_seed would also reseed the accelerators that fork_rng does not restore.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def draw_of_step(draws: Mapping[str, Any], step: int) -> Tree:
    """The draws of one local step."""
    return map_leaves(lambda leaf: leaf[step], draws)


def gradient(request: GradientRequest, task: Task, device: torch.device) -> Tree:
    """The sample-weighted mean of the gradients of consecutive batches: the full-batch gradient."""
    pairs = list(leaves(request.point))
    point = {path: leaf.detach().to(device).clone().requires_grad_(not is_buffer(path, task)) for path, leaf in pairs}
    moved = [leaf for leaf in point.values() if leaf.requires_grad]
    total = [torch.zeros_like(leaf) for leaf in moved]
    x, y = request.examples.x, request.examples.y
    with _seeded(request.seed, task, device):
        for part in torch.split(torch.arange(len(y), device=device), request.batch_size):
            # index_select: fresh memory, aligned the same wherever the samples lie
            batch = Batch(x.index_select(0, part), y.index_select(0, part))
            loss = request.objective(from_leaves(point), batch, task, request.frozen, None)
            parts = torch.autograd.grad(loss, moved, materialize_grads=True)
            torch._foreach_add_(total, list(parts), alpha=len(part) / len(y))
    gradients = iter(total)
    return from_leaves(
        {path: next(gradients) if leaf.requires_grad else torch.zeros_like(leaf) for path, leaf in point.items()}
    )


def outputs(request: OutputRequest, task: Task) -> Tensor:
    """The rows of all batches, one after the other."""
    with torch.no_grad():
        # copies, as in the evaluation: a slice is aligned as its place in memory happens to be
        return torch.cat([request.function(part.clone(), task) for part in torch.split(request.x, request.batch_size)])
