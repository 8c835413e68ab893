"""Trains many clients at once: their models are stacked, and take each step together.

Clients are sorted by their number of steps, most first. A step covers the first clients of the stack, rounded up to one
of few counts so that shapes repeat (:func:`bucket`). A finished client's model is copied out; its slot may be stepped
on until the next smaller count suffices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rayfl.engine.stacks.capture import Capture, GraphedSteps
from rayfl.engine.stacks.compiled_steps import Compiler
from rayfl.engine.stacks.padding import PaddingCheck
from rayfl.engine.stacks.stacked_autograd import StackedAutograd
from rayfl.engine.stacks.stacked_terms import StackedTerms
from rayfl.engine.stacks.step_matrices import NotLinearError, StepMatrices
from rayfl.engine.steps.looped import check_frozen, moved_paths
from rayfl.engine.updates.feed import Feed
from rayfl.engine.updates.requests import TrainRequest
from rayfl.engine.updates.write_guard import WriteGuard
from rayfl.errors import MethodError
from rayfl.optimization.optimizers import key_of
from rayfl.params import Tree
from rayfl.tasks.base import Task
from rayfl.tasks.texts import bucket, next_power, trimmer_of


class Stack(Protocol):
    """Stacked models of clients that take steps together.

    Attributes:
        lent: guards the frozen tensors that the objective reads.
        phase: index of the memory block that the next step reads.
    """

    lent: WriteGuard
    phase: int

    def step(self, number: int | Tensor, active: int, x: Tensor, y: Tensor, mask: Tensor | None) -> None: ...

    def models_of(self, start: int, stop: int) -> list[Tree]: ...

    def slots_of(self, rank: int) -> dict[str, dict[str, Tensor]]: ...


def train(
    requests: Sequence[TrainRequest],
    task: Task,
    device: torch.device,
    capture: Capture | None = None,
    compiler: Compiler | None = None,
    padding: PaddingCheck | None = None,
) -> list[Tree]:
    """Runs the local updates of one group (equal ``TrainRequest.group()``).

    Args:
        requests: the updates.
        task: what is learned.
        device: where to compute.
        capture: captures steps as graphs and replays them; None for eager steps.
        compiler: compiles steps; None for eager steps. With a compiler, texts keep their padding, and there are fewer
            different numbers of clients, so that few forms of steps are compiled.
        padding: tries the objective on padded mini-batches; None to take it as it is.

    Returns:
        The trained trees, in the order given.

    Raises:
        MethodError: the objective can only be read one client at a time.
    """
    order = sorted(range(len(requests)), key=lambda i: -requests[i].plan.steps)
    ranked = [requests[i] for i in order]
    feed = Feed(ranked, device, trimmer_of(task) if compiler is None else None)
    _check_keys(ranked[0].frozen or {}, "frozen")
    if padding is not None:
        padding.check(ranked, feed, task, device)
    stack = _stack_of(ranked, task, device, compiler)
    trained: list[Tree] = []
    slots: list[dict[str, dict[str, Tensor]]] = []

    def take_out(count: int) -> None:
        """Copies out the last of the remaining clients, down to ``count``."""
        stop = len(ranked) - len(trained)
        if not count:
            return
        trained.extend(reversed(stack.models_of(stop - count, stop)))
        for rank in reversed(range(stop - count, stop)):
            slots.append({} if ranked[rank].optimizer_state is None else stack.slots_of(rank))

    def take(step: int | Tensor, active: int) -> None:
        stack.step(step, active, *feed.batch(step, active))

    left = [feed.active(step) for step in range(ranked[0].plan.steps)]
    sizes = [min(bucket(count) if compiler is None else next_power(count), len(ranked)) for count in left]
    recorded = None if capture is None else GraphedSteps(capture, stack, take, Counter(sizes), device)
    for step, (count, active) in enumerate(zip(left, sizes, strict=True)):
        take_out(len(ranked) - len(trained) - count)
        if recorded is None:
            take(step, active)
        else:
            recorded.take(active)
    check_frozen(stack.lent)
    take_out(len(ranked) - len(trained))
    # Last of all: if memory runs out before, the requests are unchanged and can be run again.
    for request, kept in zip(ranked, reversed(slots), strict=True):
        if request.optimizer_state is not None:
            keys = dict.fromkeys(map(key_of, moved_paths(request.trainable, task)))
            made = request.plan.steps if any(rule.counts for rule in request.rules) else 0
            request.optimizer_state.steps = {key: request.optimizer_state.steps.get(key, 0) + made for key in keys}
            request.optimizer_state.slots = kept
    found = dict(zip(order, reversed(trained), strict=True))
    return [found[position] for position in range(len(requests))]


def _check_keys(tree: Mapping[str, Any], of: str) -> None:
    """Refuses keys that a stack cannot give back as they are: it has leaves by their path, ``a/b``."""
    for key, value in tree.items():
        if not isinstance(key, str) or "/" in key:
            raise MethodError(f"{of} has the key {key!r} (keys are to be strings without '/')")
        if isinstance(value, Mapping):
            _check_keys(value, of)


def _stack_of(ranked: Sequence[TrainRequest], task: Task, device: torch.device, compiler: Compiler | None) -> Stack:
    """Returns matrix steps if the objective is a suitable sum of terms; autograd steps otherwise.

    Compiled and private steps always use autograd.
    """
    if are_products(device) and compiler is None and ranked[0].private is None:
        try:
            return StackedTerms(StepMatrices(ranked[0], task), ranked, task, device)
        except NotLinearError:
            pass
    return StackedAutograd(ranked, task, device, compiler)


def are_products(device: torch.device) -> bool:
    """Returns whether a device runs steps on sums of terms as matrix products.

    Not on CPUs: fewer kernel launches gain little there, and equal methods give equal bits. Nor where matrix products
    round their inputs (TF32): they would round the parameters.
    """
    return device.type != "cpu" and not (device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32)
