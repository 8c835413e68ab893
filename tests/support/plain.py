"""Local updates as one writes them without a framework: autograd on the whole objective, and ``torch.optim``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rayfl.engine.steps.looped import moved_paths, seeded
from rayfl.engine.updates.requests import TrainRequest
from rayfl.optimization.optimizers import Rule, key_of, rule_of
from rayfl.params import Tree, copy, from_leaves, leaves, map_leaves
from rayfl.tasks.base import Batch, Task

_ADAM = {"m": "exp_avg", "v": "exp_avg_sq"}
_SLOTS = {"sgd": {"momentum": "momentum_buffer"}, "adam": _ADAM, "adamw": _ADAM}
"""What an optimizer keeps, and what PyTorch calls it."""


def train(request: TrainRequest, task: Task, device: torch.device) -> Tree:
    """What ``rayfl.engine.steps.looped.train`` returns."""
    pairs = dict(leaves(copy(request.trainable)))
    moved = {path: pairs[path].requires_grad_() for path in moved_paths(request.trainable, task)}
    rules = {path: rule_of(path, request.rule, request.groups) for path in moved}
    optimizers = {path: _optimizer(leaf, rules[path]) for path, leaf in moved.items()}
    _take_up(request, moved, optimizers)
    tree, data = from_leaves(pairs), request.examples
    with seeded(request.seed, task, device):
        for number, (start, stop) in enumerate(pairwise(request.plan.bounds)):
            rows = request.plan.order[start:stop]
            draw = None if request.draws is None else map_leaves(lambda d, n=number: _draw(d[n], moved), request.draws)
            objective = request.objective(tree, Batch(data.x[rows], data.y[rows]), task, request.frozen, draw)
            gradients = torch.autograd.grad(objective, list(moved.values()), materialize_grads=True)
            for leaf, gradient in zip(moved.values(), gradients, strict=True):
                leaf.grad = gradient
            if request.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(list(moved.values()), request.max_grad_norm)
            for path, optimizer in optimizers.items():
                optimizer.step()
                if (bounds := rules[path].bounds) is not None:
                    moved[path].data.clamp_(*bounds)
    if request.optimizer_state is not None:
        request.optimizer_state.slots = {
            slot: {
                path: one.state[moved[path]][name]
                for path, one in optimizers.items()
                if one.state[moved[path]].get(name) is not None
            }
            for slot, name in _SLOTS[request.rule.optimizer].items()
        }
        made = {key_of(path): one.state[moved[path]].get("step", 1) for path, one in optimizers.items()}
        request.optimizer_state.steps = {key: int(count) for key, count in made.items()}
    return map_leaves(Tensor.detach, tree)


def _optimizer(leaf: Tensor, rule: Rule) -> Any:
    if rule.optimizer == "sgd":
        options = {
            "momentum": rule.momentum,
            "dampening": rule.dampening,
            "nesterov": rule.nesterov and rule.momentum > 0,
        }
        return torch.optim.SGD([leaf], lr=rule.lr, weight_decay=rule.weight_decay, **options)  # type: ignore[arg-type]
    kind = torch.optim.Adam if rule.optimizer == "adam" else torch.optim.AdamW
    return kind([leaf], lr=rule.lr, betas=rule.betas, eps=rule.eps, weight_decay=rule.weight_decay)


def _take_up(request: TrainRequest, moved: dict[str, Tensor], optimizers: dict[str, Any]) -> None:
    """What the optimizer of the last pass left."""
    if request.optimizer_state is None:
        return
    for slot, name in _SLOTS[request.rule.optimizer].items():
        for path, buffer in request.optimizer_state.slots.get(slot, {}).items():
            state = optimizers[path].state[moved[path]]
            state[name] = buffer.clone()
            if request.rule.optimizer != "sgd":
                state["step"] = torch.tensor(float(request.optimizer_state.steps.get(key_of(path), 0)))


def _draw(value: Any, moved: dict[str, Tensor]) -> Tensor:
    return torch.as_tensor(value, dtype=next(iter(moved.values())).dtype)
