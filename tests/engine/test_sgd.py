"""SGD with parameter groups, bounds, clipped gradients and kept momentum: the same looped, stacked and in PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rayfl.data.federated import InputSpec
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.requests import ParameterGroup, TrainRequest
from rayfl.models.base import Network
from rayfl.params import Tree, from_leaves
from rayfl.tasks import Batch, Classification, Task
from tests.engine.problems import CPU, Scaled, examples, request
from tests.toys import TwoLayers, assert_close

SPEC = InputSpec("image", (6,), 4)
TASK = Classification(Network(lambda: TwoLayers(6, 7, 4)))
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def run(requests: list[TrainRequest], mode: str, task: Classification = TASK) -> list[Tree]:
    replies = Engine(task, CPU, EngineConfig(mode=mode, width=4)).execute(requests)  # type: ignore[arg-type]
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def pytorch(update: TrainRequest, groups: list[dict[str, Any]], max_norm: float | None = None) -> dict[str, Tensor]:
    """The same local update with ``torch.optim.SGD``; groups name the parameters they hold."""
    model = {name: leaf.clone().requires_grad_() for name, leaf in update.trainable.items()}
    optimizer = torch.optim.SGD(
        [{**group, "params": [model[name] for name in group["params"]]} for group in groups],
        lr=update.lr, momentum=update.momentum, weight_decay=update.weight_decay,
    )  # fmt: skip
    for index in update.plan.batches(CPU):
        optimizer.zero_grad()
        TASK.loss(model, Batch(update.examples.x[index], update.examples.y[index])).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.values(), max_norm)
        optimizer.step()
    return {name: leaf.detach() for name, leaf in model.items()}


def updates(**options: Any) -> list[TrainRequest]:
    """Ragged clients."""
    start = TASK.network.initialize(0)
    return [
        replace(request(examples(n, SPEC, n), start, client=k, batch_size=5, **options))
        for k, n in enumerate((11, 4, 23))
    ]


@MODES
def test_groups_are_those_of_pytorch(mode: str) -> None:
    group = ParameterGroup(lr=0.3, momentum=0.0, weight_decay=0.02)
    requests = [
        replace(update, groups=(("head.weight", group), ("head.bias", ParameterGroup(momentum=0.5))))
        for update in updates()
    ]
    for update, reply in zip(requests, run(requests, mode), strict=True):
        expected = pytorch(
            update,
            [
                {"params": ["inner.weight", "inner.bias"]},
                {"params": ["head.weight"], "lr": 0.3, "momentum": 0.0, "weight_decay": 0.02},
                {"params": ["head.bias"], "momentum": 0.5},
            ],
        )
        assert_close(reply, expected, 1e-6)


@MODES
def test_gradients_are_clipped_as_by_pytorch(mode: str) -> None:
    requests = [replace(update, max_grad_norm=0.05) for update in updates()]
    free = run(updates(), mode)
    for update, reply, unclipped in zip(requests, run(requests, mode), free, strict=True):
        expected = pytorch(update, [{"params": list(update.trainable)}], 0.05)
        assert_close(reply, expected, 1e-6)
        assert not torch.allclose(reply["head.weight"], unclipped["head.weight"], atol=1e-4)


@MODES
def test_values_stay_within_their_bounds(mode: str) -> None:
    def pull(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        loss: Tensor = task.loss(model["model"], batch)
        return loss - 10 * model["share"]

    requests = [
        replace(
            update,
            trainable={"model": update.trainable, "share": torch.tensor(0.9)},
            objective=pull,
            groups=(("share", ParameterGroup(momentum=0.0, weight_decay=0.0, bounds=(0.0, 1.0))),),
        )
        for update in updates()
    ]
    for reply in run(requests, mode):
        assert reply["share"] == 1


@MODES
def test_kept_momentum_continues_as_one_long_pass(mode: str) -> None:
    whole = updates(epochs=2)
    expected = run(whole, mode)
    kept: list[dict[str, Tensor]] = [{} for _ in whole]
    trees = [update.trainable for update in whole]
    for half in range(2):
        parts = []
        for update, velocity, tree in zip(whole, kept, trees, strict=True):
            steps = update.plan.steps // 2
            bounds = update.plan.bounds[half * steps : (half + 1) * steps + 1]
            plan = replace(
                update.plan,
                order=update.plan.order[bounds[0] : bounds[-1]],
                bounds=tuple(b - bounds[0] for b in bounds),
            )
            parts.append(replace(update, plan=plan, trainable=tree, velocity=velocity))
        trees = run(parts, mode)
    assert all(velocity for velocity in kept)
    for tree, reply in zip(trees, expected, strict=True):
        assert_close(tree, reply, 1e-6)
        assert mode == "vectorized" or torch.equal(tree["head.weight"], reply["head.weight"])
    assert set(from_leaves(kept[0])) == set(TASK.network.parameter_names)


def test_buffers_of_every_candidate_are_left_alone() -> None:
    candidates = [Classification(Network(Scaled)), TASK]
    task = Classification(candidates[0].network, candidates)

    def both(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        first, second = task.candidates
        loss: Tensor = first.loss(model["first"], batch) + second.loss(model["second"], batch)
        return loss

    pair = {"first": candidates[0].network.initialize(0), "second": candidates[1].network.initialize(0)}
    update = request(examples(9, SPEC, 0), pair, both, batch_size=4)
    for mode in ("looped", "vectorized"):
        (reply,) = run([update], mode, task)
        assert torch.equal(reply["first"]["scale"], torch.full((6,), 2.0))
        assert not torch.equal(reply["second"]["head.weight"], pair["second"]["head.weight"])
