"""The looped engine computes what a plain PyTorch loop computes, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfl.engine.steps import looped
from rayfl.engine.updates.requests import GradientRequest, TrainRequest
from rayfl.examples import InputSpec
from rayfl.models.base import Network
from rayfl.models.forward_pass import ForwardPass, keys_of
from rayfl.models.zoo import Architecture, CharLSTM, LeafCNN, TwoCNN, TwoNN
from rayfl.params import Tree, copy, squared_distance
from rayfl.tasks.base import Batch, Task
from rayfl.tasks.classification import Classification
from tests.support.problems import CPU, Counting, Dropping, Normalized, Partly, cross_entropy, examples, request
from tests.support.toy_networks import DoubleNetwork, TwoLayers
from tests.support.toys import assert_close, assert_equal

torch.set_num_threads(1)

VECTOR = InputSpec("image", (6,), 4)
DIGITS = InputSpec("image", (1, 28, 28), 10)
SMALL_IMAGE = InputSpec("image", (1, 8, 8), 5)
TEXT = InputSpec("tokens", (8,), 12, vocabulary=12)

MODELS: list[tuple[str, Architecture, InputSpec, tuple[int, ...], int]] = [
    ("two_nn", TwoNN(), DIGITS, (3, 10, 17, 64, 200), 1),
    ("two_nn_kdd", TwoNN(hidden=(20, 20, 20), bias=False, init="xavier_normal"), DIGITS, (3, 10, 17, 64, 200), 2),
    ("two_cnn", TwoCNN(), SMALL_IMAGE, (3, 10, 17, 64), 2),
    ("two_cnn_digits", TwoCNN(), DIGITS, (17,), 1),
    ("leaf_cnn", LeafCNN(), SMALL_IMAGE, (3, 10, 17), 2),
    ("char_lstm", CharLSTM(hidden=16), TEXT, (3, 10, 17, 64), 2),
]


def plain(module: nn.Module, update: TrainRequest) -> dict[str, Tensor]:
    """What one writes without a framework."""
    module.train()
    rule = update.rule
    optimizer = torch.optim.SGD(module.parameters(), lr=rule.lr, momentum=rule.momentum, weight_decay=rule.weight_decay)
    order, data = update.plan.order, update.examples
    for start, stop in itertools.pairwise(update.plan.bounds):
        chosen = order[start:stop]
        optimizer.zero_grad()
        F.cross_entropy(module(data.x[chosen]), data.y[chosen]).backward()
        optimizer.step()
    return {name: value.detach() for name, value in module.state_dict().items() if value.is_floating_point()}


def loaded(factory: Callable[[], nn.Module], tree: Tree) -> nn.Module:
    module = factory()
    module.load_state_dict(tree, strict=False)
    return module


@pytest.mark.parametrize(
    ("architecture", "spec", "sizes", "epochs"), [m[1:] for m in MODELS], ids=[m[0] for m in MODELS]
)
def test_equal_to_a_plain_loop(
    architecture: Architecture, spec: InputSpec, sizes: tuple[int, ...], epochs: int
) -> None:
    network = architecture.network(spec)
    for size in sizes:
        update = request(examples(size, spec, size), network.initialize(size), epochs=epochs, client=size)
        start = copy(update.trainable)
        trained = looped.train(update, Classification(network), CPU)
        expected = plain(loaded(lambda: architecture.build(spec), update.trainable), update)
        assert_close(trained, expected, 1e-5)
        assert list(trained) == list(start)
        assert_equal(update.trainable, start)
        assert not torch.equal(trained["head.weight"], start["head.weight"])


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0, "weight_decay": 0.0},
        {"momentum": 0.0, "weight_decay": 0.1},
        {"momentum": 0.5, "weight_decay": 0.0},
        {"batch_size": None, "epochs": 5},
        {"batch_size": 1},
        {"batch_size": 500},
        {"lr": 0.0},
        {"lr": 1.7},
    ],
    ids=str,
)
def test_equal_to_a_plain_loop_with_other_settings(options: dict[str, Any]) -> None:
    network = Network(lambda: TwoLayers(6, 9, 4))
    for size in (3, 10, 17):
        update = request(examples(size, VECTOR, size), network.initialize(size), client=size, **options)
        trained = looped.train(update, Classification(network), CPU)
        assert_close(trained, plain(loaded(lambda: TwoLayers(6, 9, 4), update.trainable), update), 1e-5)


def test_equal_to_a_plain_loop_in_double_precision() -> None:
    network = DoubleNetwork(lambda: TwoLayers(6, 9, 4))
    update = request(examples(17, VECTOR, 0, torch.float64), network.initialize(0))
    trained = looped.train(update, Classification(network), CPU)
    assert_close(trained, plain(loaded(lambda: TwoLayers(6, 9, 4).double(), update.trainable), update), 1e-12)
    assert trained["head.weight"].dtype == torch.float64


@pytest.mark.parametrize("factory", [Normalized, Counting])
@pytest.mark.parametrize("nesting", ["alone", "beside_another"])
def test_running_statistics_travel_and_no_gradient_step_moves_them(nesting: str, factory: Callable[[], Any]) -> None:
    network = Network(factory)
    start = network.initialize(0)
    start["norm.running_mean"] = torch.linspace(-1, 1, 8)
    update = request(examples(34, VECTOR, 0), start, batch_size=16, weight_decay=0.1)
    expected = plain(loaded(factory, start), update)
    if nesting == "alone":
        trained = looped.train(update, Classification(network), CPU)
    else:
        both = {"mine": start, "other": network.initialize(1)}
        pair = request(update.examples, both, _of_first, batch_size=16, weight_decay=0.1)
        result = looped.train(pair, Classification(network), CPU)
        trained = result["mine"]
        assert_equal(
            {name: result["other"][name] for name in network.buffer_names},
            {name: both["other"][name] for name in network.buffer_names},
        )
    assert_close(trained, expected, 1e-5)
    for name in ("norm.running_mean", "norm.running_var"):
        assert not torch.equal(trained[name], start[name])
        assert not trained[name].requires_grad
    assert_equal(start["norm.running_mean"], torch.linspace(-1, 1, 8))


def _of_first(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    loss: Tensor = task.loss(model["mine"], batch)
    return loss


def test_without_steps_the_model_comes_back_as_a_copy() -> None:
    network = Network(Normalized)
    for data, epochs in ((examples(17, VECTOR, 0), 0), (examples(0, VECTOR, 0), 2)):
        update = request(data, network.initialize(0), epochs=epochs)
        trained = looped.train(update, Classification(network), CPU)
        assert_equal(trained, update.trainable)
        trained["head.weight"].fill_(7.0)
        assert not (update.trainable["head.weight"] == 7.0).any()


def test_dropout_is_reproducible_and_leaves_the_global_generator_alone() -> None:
    network = Network(Dropping)
    task = Classification(network)
    update = request(examples(34, VECTOR, 0), network.initialize(0))
    torch.manual_seed(1)
    first = looped.train(update, task, CPU)
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    second = looped.train(update, task, CPU)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert_equal(first, second)
    other = request(update.examples, update.trainable, client=1)
    reseeded = TrainRequest(**{**vars(update), "seed": other.seed})
    assert not torch.equal(looped.train(reseeded, task, CPU)["head.weight"], first["head.weight"])


def test_dropout_equals_a_plain_loop_with_the_masks_of_its_keys() -> None:
    network = Network(Dropping)
    update = request(examples(34, VECTOR, 0), network.initialize(0))
    trained = looped.train(update, Classification(network), CPU)
    module, masks = loaded(Dropping, update.trainable), ForwardPass()
    keys = torch.from_numpy(keys_of([update.seed], [0], update.plan.steps))
    number = -1

    def dropped(x: Tensor) -> Tensor:
        nonlocal number
        number += 1
        masks.key, masks.calls = keys[number, 0], 0
        return x * masks.kept(x.shape, 0.5, x)

    module.dropout.forward = dropped
    assert_close(trained, plain(module, update), 1e-5)
    assert number == update.plan.steps - 1


def test_the_generator_is_put_back_when_an_objective_fails() -> None:
    def fails(*_: Any) -> Tensor:
        torch.rand(1)
        raise RuntimeError("broken objective")

    network = Network(Dropping)
    before = torch.random.get_rng_state()
    with pytest.raises(RuntimeError, match="broken objective"):
        looped.train(request(examples(5, VECTOR, 0), network.initialize(0), fails), Classification(network), CPU)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_frozen_trees_and_draws_reach_the_objective_step_by_step() -> None:
    network = DoubleNetwork(lambda: TwoLayers(6, 9, 4))
    anchor = network.initialize(5)
    seen: list[float] = []

    def proximal(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        seen.append(float(draw["weight"]["scale"]))
        return task.loss(model, batch) + draw["weight"]["scale"] * squared_distance(model, frozen["anchor"])

    draws = {"weight": {"scale": np.linspace(0.1, 0.4, 4)}}
    update = request(
        examples(17, VECTOR, 0, torch.float64),
        network.initialize(0),
        proximal,
        frozen={"anchor": anchor},
        draws=draws,
        momentum=0.0,
        weight_decay=0.0,
    )
    before = copy(anchor)
    trained = looped.train(update, Classification(network), CPU)
    assert seen == draws["weight"]["scale"].tolist()
    assert_equal(anchor, before)
    point = copy(update.trainable)
    for scale, chosen in zip(seen, update.plan.batches(CPU), strict=True):
        module = loaded(lambda: TwoLayers(6, 9, 4).double(), point)
        F.cross_entropy(module(update.examples.x[chosen]), update.examples.y[chosen]).backward()
        gradient = {name: p.grad + 2 * scale * (point[name] - anchor[name]) for name, p in module.named_parameters()}
        point = {name: value - update.rule.lr * gradient[name] for name, value in point.items()}
    assert_close(trained, point, 1e-14)


def test_what_the_objective_does_not_read_has_a_zero_gradient() -> None:
    network = Network(Partly)
    for weight_decay in (0.0, 0.1):
        update = request(
            examples(17, VECTOR, 0), network.initialize(0), weight_decay=weight_decay, momentum=0.0, lr=0.5
        )
        trained = looped.train(update, Classification(network), CPU)
        idle = update.trainable["idle.weight"]
        for _ in range(update.plan.steps):
            idle = idle - 0.5 * (weight_decay * idle)
        torch.testing.assert_close(trained["idle.weight"], idle)
        assert not torch.equal(trained["head.weight"], update.trainable["head.weight"])


@pytest.mark.parametrize("batch_size", [7, 34, 100])
def test_the_gradient_is_that_of_the_mean_loss_over_all_samples(batch_size: int) -> None:
    network = DoubleNetwork(lambda: TwoLayers(6, 9, 4))
    data = examples(34, VECTOR, 0, torch.float64)
    point = network.initialize(0)
    found = looped.gradient(
        GradientRequest(0, data, point, cross_entropy, batch_size, seed=0), Classification(network), CPU
    )
    module = loaded(lambda: TwoLayers(6, 9, 4).double(), point)
    F.cross_entropy(module(data.x), data.y).backward()
    assert_close(found, {name: p.grad for name, p in module.named_parameters()}, 1e-15)
    assert not any(leaf.requires_grad for leaf in [*point.values(), *found.values()])
