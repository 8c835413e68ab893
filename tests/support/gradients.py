"""Updates whose gradients are given, so that an optimizer can be compared with another one step by step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.updates.requests import TrainRequest
from rayfl.examples import Examples
from rayfl.objectives import loss, squared_distance
from rayfl.optimization.optimizers import Groups, OptimizerState, ParameterGroup, Rule
from rayfl.params import Tree, from_leaves, leaves
from rayfl.tasks.base import Batch
from tests.support.problems import CPU, request

SHAPES = {"first/a.weight": (3, 5), "first/a.bias": (3,), "second/b.weight": (17,), "second/b.scale": ()}
"""Odd sizes: vectorised kernels treat the ends of tensors apart."""
_ENDS = list(itertools.accumulate((torch.Size(shape).numel() for shape in SHAPES.values()), initial=0))
WIDTH = _ENDS[-1]
PLACES = {path.rpartition("/")[2]: slice(*ends) for path, ends in zip(SHAPES, itertools.pairwise(_ENDS), strict=True)}
"""Which inputs are the gradient of which tensor."""
PULL = 0.3
"""The coefficient of the squared distance in :data:`PULLED`."""


class _Network:
    parameter_names = tuple(PLACES)
    buffer_names: tuple[str, ...] = ()
    vectorizable = True
    why_not_vectorizable = ""
    stochastic = False
    batch_statistics = False
    padding = None
    rows_per_sample = 0

    def release(self) -> None:
        """Holds nothing."""


class GivenGradients:
    """A task of two models, whose losses together have the mean of the inputs as their gradient, wherever taken."""

    def __init__(self) -> None:
        self.network = _Network()
        self.candidates = (self,)

    def loss(self, model: Mapping[str, Any], batch: Batch) -> Tensor:
        return batch.mean(sum(batch.x[:, PLACES[name]] @ leaf.flatten() for name, leaf in model.items()))  # type: ignore[arg-type]


PLAIN = loss(at="first") + loss(at="second")
"""Gradients as autograd makes them, and parameters that are moved along them at once."""
PULLED = PLAIN + PULL * squared_distance("first", "first anchor") + PULL * squared_distance("second", "second anchor")
"""Gradients that are combined piece by piece."""


def function(model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> Tensor:
    """The losses as a function, which is autograd's."""
    value: Tensor = task.loss(model["first"], batch) + task.loss(model["second"], batch)
    return value


def tree_of(flat: Tensor) -> Tree:
    """The tree with some numbers in it."""
    parts = torch.split(flat, [torch.Size(shape).numel() for shape in SHAPES.values()])
    return from_leaves({path: part.reshape(SHAPES[path]).clone() for path, part in zip(SHAPES, parts, strict=True)})


def updates(
    objective: Any, rule: Rule, dtype: torch.dtype, steps: Sequence[int] = (20, 8, 13), **options: Any
) -> list[TrainRequest]:
    """Local updates of one sample a step, of clients of different numbers of steps."""
    made = []
    for client, number in enumerate(steps):
        generator = torch.Generator().manual_seed(client)
        x = torch.randn(number, WIDTH, generator=generator, dtype=dtype)
        start = tree_of(torch.randn(WIDTH, generator=generator, dtype=dtype))
        anchors = tree_of(torch.randn(WIDTH, generator=generator, dtype=dtype))
        data = Examples(x, torch.zeros(number, dtype=torch.int64))
        frozen = {f"{key} anchor": anchor for key, anchor in anchors.items()} if objective is PULLED else None
        update = request(data, start, objective, client=client, frozen=frozen, batch_size=1, epochs=1)
        made.append(replace(update, rule=rule, **options))
    return made


def given(update: TrainRequest) -> list[Tensor]:
    """The gradients of the loss, step by step."""
    return [update.examples.x[i] for i in update.plan.order.tolist()]


def trained(mode: str, requests: Sequence[TrainRequest]) -> list[Tree]:
    """What the engine makes of some updates."""
    engine = Engine(GivenGradients(), CPU, EngineConfig(mode=mode, width=32))  # type: ignore[arg-type]
    replies = engine.execute(list(requests))
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


class PlainLion(torch.optim.Optimizer):
    """Lion as its paper's program 1 has it, which PyTorch lacks."""

    def __init__(self, parameters: Any, lr: float, decay: float, first: float, second: float) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay, "first": first, "second": second})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One number after the other."""
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                pace = (group["first"] * kept + (1 - group["first"]) * parameter.grad).sign()
                parameter *= 1 - group["lr"] * group["decay"]
                parameter -= group["lr"] * pace
                kept.copy_(group["second"] * kept + (1 - group["second"]) * parameter.grad)


def optimizer_of(rule: Rule, parameters: Any) -> torch.optim.Optimizer:
    """PyTorch's own, in its plainest form."""
    common: dict[str, Any] = {"lr": rule.lr, "weight_decay": rule.weight_decay, "foreach": False, "fused": False}
    if rule.optimizer == "sgd":
        more = {"momentum": rule.momentum, "dampening": rule.dampening, "nesterov": rule.nesterov}
        return torch.optim.SGD(parameters, **common, **more)
    options = dict(rule.options)
    if rule.optimizer == "adagrad":
        initial = options.pop("initial", 0.0)
        return torch.optim.Adagrad(parameters, **common, **options, initial_accumulator_value=initial)
    if rule.optimizer == "rmsprop":
        del common["fused"]
        return torch.optim.RMSprop(parameters, **common, **options)
    if rule.optimizer == "lion":
        return PlainLion(parameters, rule.lr, rule.weight_decay, *options.get("betas", (0.9, 0.99)))
    kind = torch.optim.AdamW if rule.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, **common, betas=rule.betas, eps=rule.eps)


class ByTorch:
    """The same update by ``torch.optim``, with one optimizer for each first key of the tree."""

    def __init__(self, update: TrainRequest, groups: Groups = ()) -> None:
        self._update = update
        self.parameters = {path: leaf.clone().requires_grad_() for path, leaf in leaves(update.trainable)}
        self.optimizers = {key: self._optimizer(key, groups) for key in ("first", "second")}

    def _optimizer(self, key: str, groups: Groups) -> torch.optim.Optimizer:
        rule = dict(groups).get(key, ParameterGroup()).applied(self._update.rule)
        return optimizer_of(rule, [leaf for path, leaf in self.parameters.items() if path.startswith(key)])

    def run(self, max_norm: float | None = None) -> Tree:
        """All steps once more."""
        anchors = {path.replace(" anchor", ""): leaf for path, leaf in leaves(self._update.frozen or {})}
        for flat in given(self._update):
            for path, gradient in leaves(tree_of(flat)):
                own = self.parameters[path]
                own.grad = gradient
                if anchors:
                    own.grad = own.grad + 2 * PULL * (own.detach() - anchors[path])
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), max_norm)
            for optimizer in self.optimizers.values():
                optimizer.step()
        return from_leaves({path: leaf.detach().clone() for path, leaf in self.parameters.items()})


def keeping(requests: Sequence[TrainRequest]) -> list[TrainRequest]:
    """The same updates, with optimizers that leave what they keep."""
    return [replace(update, optimizer_state=OptimizerState()) for update in requests]
