"""Client by client: parameters are views of one flat buffer, moved in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rayfl.engine.requests import GradientRequest, OutputRequest, TrainRequest
from rayfl.engine.sgd import SGD
from rayfl.params import Layout, Tree, from_leaves, leaves, map_leaves
from rayfl.tasks import Batch, Task


def is_buffer(path: str, task: Task) -> bool:
    """Whether a leaf is a module buffer: it travels with the weights but no gradient step moves it."""
    name = path.rsplit("/", 1)[-1]
    return any(name in candidate.network.buffer_names for candidate in task.candidates)


def train(request: TrainRequest, task: Task, device: torch.device) -> Tree:
    """Runs one local update and returns the trained tree (fresh memory)."""
    layout = Layout.of(request.trainable)
    model = layout.views(layout.pack(request.trainable, device))
    paths = [path for path, _ in leaves(model) if not is_buffer(path, task)]
    moved = [leaf.requires_grad_() for path, leaf in leaves(model) if not is_buffer(path, task)]
    sgd = SGD(request, paths)
    velocity = initial_velocity(request, paths, moved) if sgd.has_momentum else []
    examples = request.examples
    with _seeded(request.seed, task, device):
        for step, index in enumerate(request.plan.batches(device)):
            batch = Batch(examples.x.index_select(0, index), examples.y.index_select(0, index))
            draw = None if request.draws is None else draw_of_step(request.draws, step)
            loss = request.objective(model, batch, task, request.frozen, draw)
            # zeros for what the objective does not read, as under vmap(grad)
            gradients = torch.autograd.grad(loss, moved, materialize_grads=True)
            with torch.no_grad():
                sgd.step(moved, list(gradients), velocity)
    if request.velocity is not None:
        request.velocity.update(zip(paths, velocity, strict=bool(velocity)))
    return map_leaves(Tensor.detach, model)


def initial_velocity(request: TrainRequest, paths: Sequence[str], moved: Sequence[Tensor]) -> list[Tensor]:
    """The momentum buffers before the first step (fresh memory): those the request brings, zeros for the rest."""
    kept = request.velocity or {}
    return [
        kept[path].to(leaf.device, copy=True) if path in kept else torch.zeros_like(leaf)
        for path, leaf in zip(paths, moved, strict=True)
    ]


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
