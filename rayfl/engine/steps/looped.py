"""Trains client by client: parameters are views of one flat buffer, updated in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rayfl.diagnosis.device_errors import Pieces
from rayfl.engine.steps.step import step_of
from rayfl.engine.steps.training_buffers import TrainingBuffers
from rayfl.engine.updates.flat import ALIGNMENT_BYTES, Layout
from rayfl.engine.updates.requests import GradientRequest, OutputRequest, TrainRequest, one_value
from rayfl.engine.updates.write_guard import WriteGuard
from rayfl.errors import MethodError
from rayfl.models.forward_pass import keys_of
from rayfl.params import Tree, from_leaves, leaves, map_leaves
from rayfl.tasks.base import Batch, Task, begin_step, recorded_names, tells_steps
from rayfl.tasks.texts import PaddingTrimmer, trimmer_of

_GATHERED_BYTES = 1 << 18
"""Samples copied at a time: few operations, and all of it still in the processor's cache when it is read."""


def moved_paths(tree: Tree, task: Task) -> list[str]:
    """Returns the paths of the leaves that steps update: all but module buffers."""
    recorded = recorded_names(task)
    return [path for path, _ in leaves(tree) if path.rpartition("/")[2] not in recorded]


def train(request: TrainRequest, task: Task, device: torch.device) -> Tree:
    """Runs one local update and returns the trained tree (fresh memory)."""
    moved = frozenset(moved_paths(request.trainable, task))
    memory = TrainingBuffers(request, Layout.of(request.trainable, moved), device)
    lent = WriteGuard(request.frozen or {}, recorded_names(task))
    take = step_of(request, task, memory)
    with seeded(request.seed ^ request.begun, task, device), torch.no_grad():
        keys = step_keys([request], request.plan.steps, task, device)
        for number, batch in enumerate(_batches(request, device, trimmer_of(task))):
            if keys is not None:
                begin_step(task, keys[number, 0])
            take(batch, number)
    check_frozen(lent)
    memory.save_optimizer_state()
    return map_leaves(Tensor.detach, memory.tree)


def step_keys(requests: Sequence[TrainRequest], steps: int, task: Task, device: torch.device) -> Tensor | None:
    """Returns the random keys of the steps, int64 of shape (steps, clients); None if no layer draws numbers.

    Args:
        requests: one per client.
        steps: number of steps of the longest request.
        task: has the networks.
        device: where the keys are needed.
    """
    if not tells_steps(task):
        return None
    keys = keys_of([request.seed for request in requests], [request.begun for request in requests], steps)
    return torch.from_numpy(keys).to(device)


def check_frozen(lent: WriteGuard) -> None:
    """Raises a MethodError if an objective has written in place to ``frozen``."""
    if (leaf := lent.written()) is not None:
        raise MethodError(
            f"the objective writes to {leaf!r} of frozen in place: it must only read it; what an objective changes "
            "belongs into the trained tree (a forward pass in training mode writes running statistics: training=False)"
        )


def _batches(request: TrainRequest, device: torch.device, trimmer: PaddingTrimmer | None) -> Iterator[Batch]:
    """Yields the mini-batches; gathers several at a time if each is then aligned like fresh memory."""
    x, y = request.examples.x, request.examples.y
    bounds = request.plan.bounds
    variations = None if request.variations is None else request.variations.to(device)
    order = request.plan.order.to(device)
    lengths = None if trimmer is None else trimmer.lengths(x, y)[request.plan.order]
    for first, last in _stretches(bounds, x[:1].nbytes):
        start, stop = bounds[first], bounds[last]
        index = order[start:stop]
        inputs, labels = x.index_select(0, index), y.index_select(0, index)
        if variations is not None:
            inputs, labels = variations.part(start, stop).applied(inputs, labels)
        sizes = [bounds[step + 1] - bounds[step] for step in range(first, last)]
        parts = zip(torch.split(inputs, sizes), torch.split(labels, sizes), strict=True)
        if trimmer is None or lengths is None:
            yield from (Batch(*part) for part in parts)
        else:
            own = torch.split(lengths[start:stop], sizes)
            yield from (Batch(*trimmer.cut(*part, needed)) for part, needed in zip(parts, own, strict=True))


def _stretches(bounds: Sequence[int], row: int) -> Iterator[tuple[int, int]]:
    """Yields the first and last (exclusive) step of the mini-batches that are gathered together.

    Args:
        bounds: samples before each step.
        row: bytes of a sample.
    """
    first = 0
    for step in range(1, len(bounds)):
        size = (bounds[step] - bounds[first]) * row
        if step == len(bounds) - 1 or size % ALIGNMENT_BYTES or size + row > _GATHERED_BYTES:
            yield first, step
            first = step


@contextmanager
def seeded(seed: int, task: Task, device: torch.device) -> Iterator[None]:
    """Seeds PyTorch's global generators for a network's own random numbers; restores their state afterwards."""
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


def gradient(request: GradientRequest, task: Task, device: torch.device, pieces: Pieces | None = None) -> Tree:
    """Computes the full-batch gradient: the sample-weighted mean of the gradients of consecutive batches.

    Args:
        request: what is asked for.
        task: what the objective is given.
        device: where to compute.
        pieces: makes the batches smaller where the device's memory is too small.
    """
    pieces = pieces or Pieces("samples of a gradient")
    paths = moved_paths(request.point, task)
    pairs = leaves(request.point)
    point = {path: leaf.detach().to(device).clone().requires_grad_(path in paths) for path, leaf in pairs}
    moved = [leaf for leaf in point.values() if leaf.requires_grad]
    total = [torch.zeros_like(leaf) for leaf in moved]
    lent = WriteGuard(request.frozen or {}, recorded_names(task))
    x, y = request.examples.x, request.examples.y
    if not len(y):
        raise ValueError("a client without training samples has no gradient")
    trimmer = trimmer_of(task)
    lengths = None if trimmer is None else trimmer.lengths(x, y)

    def add(rows: Tensor) -> None:
        # index_select copies: alignment, and so the last bits, do not depend on where the samples lie
        batch = Batch(x.index_select(0, rows), y.index_select(0, rows))
        if trimmer is not None and lengths is not None:
            batch = Batch(*trimmer.cut(batch.x, batch.y, lengths[rows.cpu()]))
        loss = one_value(request.objective(from_leaves(point), batch, task, request.frozen, None))
        parts = torch.autograd.grad(loss, moved, materialize_grads=True)
        torch._foreach_add_(total, list(parts), alpha=len(rows) / len(y))

    with seeded(request.seed, task, device):
        if tells_steps(task):
            begin_step(task, torch.from_numpy(keys_of([request.seed], [0], 1))[0, 0].to(device))
        for part in torch.split(torch.arange(len(y), device=device), request.batch_size):
            pieces.of(part, add)
    check_frozen(lent)
    gradients = iter(total)
    return from_leaves(
        {path: next(gradients) if leaf.requires_grad else torch.zeros_like(leaf) for path, leaf in point.items()}
    )


def outputs(request: OutputRequest, task: Task, pieces: Pieces | None = None) -> Tensor:
    """Returns the concatenated outputs of all batches.

    Args:
        request: what is asked for.
        task: what the function is given.
        pieces: makes the batches smaller where the device's memory is too small.
    """
    pieces, rows = pieces or Pieces("samples of a forward pass"), list[Tensor]()

    def add(part: Tensor) -> None:
        # copies, as in the evaluation: a slice's alignment would change the last bits
        rows.append(request.function(part.clone(), task))

    with torch.no_grad():
        if not len(request.x):
            add(request.x)
        for part in torch.split(request.x, request.batch_size):
            pieces.of(part, add)
        return torch.cat(rows)
