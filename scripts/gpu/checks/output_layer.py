"""Part d, its last check: the output layer of a language model in parts, against all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from checks.bases import BASES, network_of, stack_of
from checks.bench import DEVICE, REHEARSAL, peak_bytes, scaled, seconds
from checks.running import Check, Record
from rayfl.tasks.base import Batch
from rayfl.tasks.further_tasks import LanguageModel

_NAME = "many words"


def in_parts(record: Record) -> None:
    """Losses and gradients of two clients' adapters: they must be the same, for a third of the bytes at most."""
    network = network_of(_NAME, checkpointing=True, head={"train": False})
    task, stack = LanguageModel(network), stack_of(network, 2)
    spec = BASES[_NAME][2]
    shape = (2, scaled(4, 2), scaled(spec.shape[0], 16) + 1)
    tokens = torch.randint(spec.vocabulary, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x, y = tokens[..., :-1], tokens[..., 1:]

    def whole(tree: Any, x: Tensor, y: Tensor) -> Tensor:
        batch = Batch(x, y)
        return task.loss_of(task.logits(tree, batch), batch)

    def parts(tree: Any, x: Tensor, y: Tensor) -> Tensor:
        return task.loss(tree, Batch(x, y))

    def step(loss: Callable[..., Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in stack.items()}
        losses = vmap(loss)(leaves, x, y)
        return losses.detach(), torch.autograd.grad(losses.sum(), list(leaves.values()))

    (one, first), (other, second) = step(parts), step(whole)
    by_loss = float(((one - other).abs() / other).max())
    by_gradient = max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in zip(first, second, strict=True))
    record.goal("losses in parts to those of all logits", "within 1 %", by_loss, by_loss < 0.01)
    record.goal("gradients in parts to those of all logits", "within 5 %", by_gradient, by_gradient < 0.05)
    for name, loss in (("in parts", parts), ("all logits", whole)):
        record.note(f"s a step, {name}", seconds(lambda loss=loss: step(loss), 2))  # type: ignore[misc]
    bytes_of = [peak_bytes(lambda loss=loss: step(loss)) for loss in (parts, whole)]  # type: ignore[misc]
    record.note("peak bytes, in parts and of all logits", bytes_of)
    if not REHEARSAL and bytes_of[0] is not None and bytes_of[1]:
        ratio = bytes_of[0] / bytes_of[1]
        record.goal("bytes in parts to those of all logits", "at most a third", ratio, ratio <= 1 / 3)


CHECKS = (Check("adapters_output", 60, "The output layer in parts against all logits at once", in_parts),)
