"""The fast kernel agrees with the reference kernel, is deterministic, and knows what it must leave to autograd."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from algorithms.base import Averaging
from algorithms.ditto import Ditto
from algorithms.fedphp import FedPHP
from algorithms.fedprox import FedProx
from algorithms.floco import Floco
from algorithms.superfed import SuPerFed
from rayfl import tape
from rayfl.cosine import squared_cosine
from rayfl.data.federated import InputSpec
from rayfl.engine import looped
from rayfl.engine.client import Client, RoundContext
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.requests import ParameterGroup, TrainRequest
from rayfl.engine.settings import TrainConfig
from rayfl.engine.trampoline import run_procedures
from rayfl.models.base import ClassificationModel, Network
from rayfl.params import Tree, inner_product, interpolate, map_leaves, squared_distance, squared_norm
from rayfl.randomness import RandomStreams
from rayfl.tasks import Batch, Classification, Task
from tests.engine.problems import CPU, Dropping, Normalized, Partly, cross_entropy, examples, request
from tests.toys import DoubleNetwork, TwoLayers, assert_close, assert_equal

SPEC = InputSpec("image", (6,), 4)
SIZES = (12, 4, 23)


def two_layers() -> ClassificationModel:
    return TwoLayers(6, 7, 4)


def weights(model: Any, task: Task) -> Tree:
    return {name: model[name] for name in task.network.parameter_names}


def everything(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    """A mixed model, all penalties, and a tensor that is read outside of them as well."""
    first, second = weights(model["first"], task), weights(model["second"], task)
    mixed = {**model["first"], **interpolate(first, second, draw["share"])}
    loss: Tensor = task.loss(mixed, batch) + 0.3 * task.loss(model["second"], batch)
    anchor = weights(frozen["anchor"], task)
    loss = loss + 0.1 * squared_distance(first, anchor) / 2 + 0.05 * squared_distance(first, second)
    loss = loss + squared_cosine(first, second) + 0.2 * inner_product(second, anchor) ** 2
    return loss + 0.01 * squared_norm(second) + 0.1 * (mixed["head.bias"] * model["first"]["head.bias"]).sum()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0, "weight_decay": 0.0},
    "momentum": {"momentum": 0.9, "weight_decay": 0.0},
    "weight_decay": {"momentum": 0.0, "weight_decay": 0.1},
    "both": {"momentum": 0.9, "weight_decay": 0.01},
    "clipped": {"max_grad_norm": 0.3},
    "groups": {
        "groups": (
            ("first/head.weight", ParameterGroup(lr=0.2, momentum=0.0, bounds=(-0.2, 0.2))),
            ("second", ParameterGroup(momentum=0.5, weight_decay=0.3)),
        )
    },
    "kept_velocity": {"velocity": {}},
}
NETWORKS = {"linear": two_layers, "buffers": Normalized, "dropout": Dropping, "partly_read": Partly}


def nested(network: Network, **options: Any) -> list[TrainRequest]:
    """Ragged clients that train two models each."""
    velocity = options.pop("velocity", None)
    requests = []
    for k, n in enumerate(SIZES):
        dtype = network.initialize(0)["head.weight"].dtype
        data = examples(n, SPEC, n, dtype)
        pair = {"first": network.initialize(0), "second": network.initialize(k + 1)}
        base = request(
            data,
            pair,
            everything,
            client=k,
            batch_size=5,
            frozen={"anchor": network.initialize(9)},
            draws={"share": torch.linspace(0, 1, 2 * -(-n // 5), dtype=dtype)},
        )
        requests.append(replace(base, **options, velocity=None if velocity is None else {}))
    return requests


@pytest.fixture(params=["few_batches", "many_batches"])
def batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As it is, and with tensors that are larger than a batch."""
    if request.param == "many_batches":
        monkeypatch.setattr(tape, "_BATCH", 16)
    tape._batches.cache_clear()
    yield
    tape._batches.cache_clear()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("network", NETWORKS)
def test_equal_to_the_reference(network: str, options: str) -> None:
    task = Classification(Network(NETWORKS[network]))
    both = zip(nested(task.network, **OPTIONS[options]), nested(task.network, **OPTIONS[options]), strict=True)
    for mine, theirs in both:
        fast = looped.train(mine, task, CPU, "fast")
        reference = looped.train(theirs, task, CPU)
        assert_close(fast, reference, 1e-5)
        assert not torch.equal(fast["first"]["head.weight"], mine.trainable["first"]["head.weight"])
        if mine.velocity is not None:
            assert theirs.velocity is not None
            # sums of ten gradients, and so of ten roundings
            assert_close(mine.velocity, theirs.velocity, 1e-4)
            assert set(mine.velocity) == set(theirs.velocity) != set()


@pytest.mark.usefixtures("batches")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("network", NETWORKS)
def test_equal_to_the_reference_in_double_precision(network: str, options: str) -> None:
    task = Classification(DoubleNetwork(NETWORKS[network]))
    mine, theirs = (nested(task.network, **OPTIONS[options])[2] for _ in range(2))
    assert_close(looped.train(mine, task, CPU, "fast"), looped.train(theirs, task, CPU), 1e-12)
    assert_close(mine.velocity or {}, theirs.velocity or {}, 1e-11)


def test_a_pass_in_two_halves_with_kept_velocity_is_one_long_pass() -> None:
    task = Classification(Network(two_layers))
    whole = nested(task.network)[2]
    expected = looped.train(whole, task, CPU, "fast")
    tree, velocity = whole.trainable, {}
    for piece in whole.pieces(whole.plan.steps // 2):
        tree = looped.train(replace(piece, trainable=tree, velocity=velocity), task, CPU, "fast")
    assert_equal(tree, expected)


@pytest.mark.parametrize("network", NETWORKS)
def test_the_same_bits_again_and_in_any_order_of_clients(network: str) -> None:
    task = Classification(Network(NETWORKS[network]))
    requests = nested(task.network)
    expected = None
    for order in itertools.permutations(range(len(SIZES))):
        engine = Engine(task, CPU, EngineConfig(mode="looped", kernel="fast"))
        replies = dict(zip(order, engine.execute([requests[i] for i in order]), strict=True))
        expected = expected or replies
        for i, reply in replies.items():
            assert_equal(reply, expected[i])


@pytest.mark.parametrize("options", ["plain", "both", "clipped"])
def test_without_penalties_the_bits_are_those_of_the_reference(options: str) -> None:
    network = Network(two_layers)
    update = replace(request(examples(17, SPEC, 0), network.initialize(0)), **OPTIONS[options])
    task = Classification(network)
    assert_equal(looped.train(update, task, CPU, "fast"), looped.train(update, task, CPU))


def learned_share(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    mixed = interpolate(model["first"], model["second"], model["share"])
    return task.loss(mixed, batch) + squared_norm({"share": model["share"]})


def chained(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    """Penalties of a mixture, and mixtures of detached tensors."""
    mixed = interpolate(model["first"], model["second"], 0.3)
    constant = map_leaves(Tensor.detach, mixed)
    loss: Tensor = task.loss(interpolate(constant, model["second"], 0.4), batch)
    return loss + squared_distance(mixed, model["first"]) + squared_cosine(mixed, constant)


def one_tensor_twice(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    bias = model["first"]["head.bias"]
    loss: Tensor = task.loss(model["first"], batch)
    return loss + inner_product({"a": bias, "b": bias}, {"a": bias, "b": model["second"]["head.bias"]})


def stretched(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    """One number set against a whole tensor."""
    loss: Tensor = task.loss(model["first"], batch)
    mixed = interpolate({"w": model["share"]}, {"w": model["second"]["head.weight"]}, 0.5)
    return loss + (mixed["w"] ** 2).sum()


def exchanged(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    """The gradient of each model is the other itself: neither may move before both are read."""
    return inner_product(model["first"], model["second"])


def unread(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    interpolate(model["first"], model["second"], 0.3)
    squared_distance(model["first"], model["second"])
    loss: Tensor = task.loss(model["first"], batch)
    return loss + 0.0 * squared_cosine(model["first"], model["second"])


def without_gradients(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    with torch.no_grad():
        size = squared_distance(model["first"], model["second"])
    assert not size.requires_grad
    loss: Tensor = task.loss(model["first"], batch)
    return size * loss


@pytest.mark.parametrize(
    "objective",
    [learned_share, chained, one_tensor_twice, stretched, exchanged, unread, without_gradients],
    ids=lambda function: function.__name__,
)
def test_unusual_objectives(objective: Callable[..., Tensor]) -> None:
    network = DoubleNetwork(two_layers)
    tree = {
        "first": network.initialize(0),
        "second": network.initialize(1),
        "share": torch.tensor(0.3, dtype=torch.float64),
    }
    task = Classification(network)
    update = request(examples(11, SPEC, 0, torch.float64), tree, objective, batch_size=5, epochs=1)
    fast, reference = (looped.train(update, task, CPU, kernel) for kernel in ("fast", "reference"))  # type: ignore[arg-type]
    assert_close(fast, reference, 1e-13)
    assert not torch.equal(fast["first"]["head.bias"], tree["first"]["head.bias"])


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0])
def test_the_squared_cosine_at_its_floor(scale: float) -> None:
    pair = [torch.full((3,), scale, dtype=torch.float64), torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64) * scale]
    moved = [leaf.clone().requires_grad_() for leaf in pair]
    value = squared_cosine({"w": moved[0]}, {"w": moved[1]})
    expected = torch.autograd.grad(value, moved)
    noted = tape.Tape(moved)
    with noted:
        found = squared_cosine({"w": moved[0]}, {"w": moved[1]})
    assert found.item() == pytest.approx(value.item())
    for terms, gradient, like in zip(noted.gradients(found), expected, pair, strict=True):
        torch.testing.assert_close(tape.total(terms, like).detach(), gradient)


def test_a_failing_objective_leaves_no_tape_behind() -> None:
    def fails(*_: Any) -> Tensor:
        assert tape.recording()
        raise RuntimeError("broken objective")

    network = Network(two_layers)
    update = request(examples(5, SPEC, 0), network.initialize(0), fails)
    with pytest.raises(RuntimeError, match="broken objective"):
        looped.train(update, Classification(network), CPU, "fast")
    assert not tape.recording()


@pytest.mark.parametrize(
    "method",
    [
        SuPerFed(start=0.0),
        SuPerFed(start=0.0, mode="lm"),
        SuPerFed(start=0.0, proximal_form="norm_per_layer"),
        SuPerFed(start=1.0),
        Ditto(),
        FedProx(),
        FedPHP(transfer="prox", transfer_weight=0.2),
        FedPHP(),
        Floco(simplex_dimension=2),
    ],
    ids=lambda method: f"{method.name}-{getattr(method, 'mode', '')}",
)
def test_methods(method: Averaging) -> None:
    task = Classification(Network(two_layers))
    train = TrainConfig(rounds=1, local_epochs=2, batch_size=5, lr=0.1, momentum=0.9, weight_decay=0.01)
    context = RoundContext(0, 1, len(SIZES), train, RandomStreams(0))
    server = method.init(task, context)
    model = server.get("model", server)
    found: dict[str, list[Any]] = {}
    for kernel in ("reference", "fast"):
        engine = Engine(task, CPU, EngineConfig(mode="looped", kernel=kernel))  # type: ignore[arg-type]
        clients = [Client(k, {}, {"train": examples(n, SPEC, k)}, task, context, CPU) for k, n in enumerate(SIZES)]
        sent = run_procedures({c.id: method.local_update(c, model) for c in clients}, engine)
        found[kernel] = [(sent[c.id].tree, c.state) for c in clients]
    for (tree, state), (expected, kept) in zip(found["fast"], found["reference"], strict=True):
        assert_close(tree, expected, 1e-5)
        assert_close(state, kept, 1e-5)


def test_the_configuration_says_where_there_is_no_fast_kernel() -> None:
    with pytest.raises(ValidationError, match="set mode=looped, or kernel=reference"):
        EngineConfig(mode="vectorized", kernel="fast")
    task = Classification(Network(two_layers))
    assert Engine(task, CPU, EngineConfig(kernel="fast")).note == ""
    elsewhere = Engine(task, torch.device("cuda"), EngineConfig(kernel="fast"))
    assert elsewhere.note == "engine.kernel=fast is for CPUs: on cuda it is reference"
    assert elsewhere.vectorized


def test_pieces_cover_every_element_once() -> None:
    sizes = (5, 3, 200_000, 16, 131_072, 1, 0, 40)
    tensors = [torch.zeros(size) for size in sizes]
    for batch, twin in tape.in_batches(tensors, tensors):
        assert sum(piece.numel() for piece in batch) <= 1 << 17
        for piece, same in zip(batch, twin, strict=True):
            assert piece.data_ptr() == same.data_ptr()
            piece += 1
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_cross_entropy_alone_needs_no_tape() -> None:
    network = Network(two_layers)
    moved = [leaf.requires_grad_() for leaf in network.initialize(0).values()]
    noted = tape.Tape(moved)
    data = examples(5, SPEC, 0)
    with noted:
        model = dict(zip(network.parameter_names, moved, strict=True))
        loss = cross_entropy(model, Batch(data.x, data.y), Classification(network), None, None)
    assert [[factor for factor, _ in terms] for terms in noted.gradients(loss)] == [[1.0]] * len(moved)
