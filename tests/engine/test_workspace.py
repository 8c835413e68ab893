"""Memory used anew changes no bits, and there is never much of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rayfl.data.federated import InputSpec
from rayfl.engine import looped
from rayfl.engine.steps import Kernel
from rayfl.engine.workspace import Workspace
from rayfl.models.perceptron import TwoNN
from rayfl.models.zoo import Architecture, TwoCNN
from rayfl.objectives import loss_of_the_task
from rayfl.params import Layout
from rayfl.tasks import Batch, Classification
from tests.engine.problems import CPU, cross_entropy, examples, request
from tests.toys import assert_equal

SPEC = InputSpec("image", (1, 8, 8), 5)
# 7 and 6 units fill no whole vector of the processor, so that their tensors are followed by padding.
MODELS: list[Architecture] = [TwoNN(hidden=(7, 6)), TwoNN(hidden=(16, 32)), TwoCNN()]


@loss_of_the_task
def declared(model: Any, batch: Batch, task: Classification, frozen: Any, draw: Any) -> Tensor:
    return task.loss(model, batch)


def layout(size: int) -> Layout:
    return Layout.of({"w": torch.zeros(size)})


@pytest.mark.parametrize("kernel", ["reference", "fast"])
def test_a_used_workspace_gives_the_bits_of_a_new_one(kernel: Kernel) -> None:
    used = Workspace()
    for seed in range(3):
        for architecture in MODELS:
            task = Classification(architecture.network(SPEC))
            for objective in (cross_entropy, declared):
                update = request(examples(23, SPEC, seed), task.network.initialize(seed), objective, client=seed)
                found = looped.train(update, task, CPU, kernel, used)
                assert_equal(found, looped.train(update, task, CPU, kernel))
                assert all(tensor.isfinite().all() for tensor in found.values())


def test_nothing_handed_out_lies_in_the_workspace() -> None:
    task, used = Classification(TwoNN(hidden=(7, 6)).network(SPEC)), Workspace()
    first = looped.train(request(examples(23, SPEC, 0), task.network.initialize(0)), task, CPU, workspace=used)
    before = {path: tensor.clone() for path, tensor in first.items()}
    looped.train(request(examples(23, SPEC, 1), task.network.initialize(1)), task, CPU, workspace=used)
    assert_equal(first, before)


def test_buffers_are_told_apart_by_purpose_and_layout() -> None:
    used = Workspace()
    kept = used.buffer("velocity", layout(3), CPU)
    assert used.buffer("velocity", layout(3), CPU) is kept
    assert used.buffer("gradients", layout(3), CPU) is not kept
    # as many bytes with their padding, which lies elsewhere
    assert used.buffer("velocity", layout(4), CPU) is not kept
    assert not kept.any()


def test_of_many_layouts_the_least_recently_used_is_given_up() -> None:
    used = Workspace()
    for size in (1, 2, 3, 4):
        used.buffer("velocity", layout(size), CPU).fill_(size)
    used.buffer("velocity", layout(1), CPU)
    used.buffer("velocity", layout(5), CPU)
    assert [int(used.buffer("velocity", layout(size), CPU)[0]) for size in (1, 3, 4, 5)] == [1, 3, 4, 0]
    assert not used.buffer("velocity", layout(2), CPU).any()
