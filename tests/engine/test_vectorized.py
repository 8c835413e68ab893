"""Looped and vectorised execution agree up to rounding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import _functorch as functorch

from algorithms.fedavg import FedAvg
from rayfl.engine import looped, vectorized
from rayfl.engine.classification import Classification
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.requests import GradientRequest, TrainRequest
from rayfl.engine.settings import TrainConfig
from rayfl.engine.tasks import Batch, Task
from rayfl.examples import InputSpec
from rayfl.models.base import Network
from rayfl.models.zoo import TwoNN
from rayfl.params import Tree, copy, interpolate, squared_distance
from tests.support.problems import (
    CPU,
    Gated,
    Partly,
    Scaled,
    SelfNormalized,
    SmallCNN,
    cross_entropy,
    examples,
    request,
)
from tests.support.toys import DoubleNetwork, Toy, TwoLayers, assert_close, assert_equal, random_clients, two_layers

torch.set_num_threads(1)

SIZES = (17, 3, 64, 200, 10, 10, 41)
SMALL = tuple(enumerate((17, 3, 24, 9, 10, 12)))
VECTOR = InputSpec("image", (6,), 4)
IMAGE = InputSpec("image", (1, 6, 6), 4)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
MODELS: list[tuple[str, Callable[[], Any], InputSpec]] = [
    ("two_nn", lambda: TwoNN(hidden=(20, 20)).build(IMAGE), IMAGE),
    ("small_cnn", SmallCNN, IMAGE),
    ("mlp2", lambda: TwoLayers(6, 9, 4), VECTOR),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def network_of(factory: Callable[[], Any], dtype: torch.dtype) -> Network:
    return (DoubleNetwork if dtype == torch.float64 else Network)(factory)


def engine(network: Network, mode: str = "vectorized", width: int = 32) -> Engine:
    return Engine(Classification(network), CPU, EngineConfig(mode=mode, width=width))  # type: ignore[arg-type]


def run(network: Network, requests: Sequence[TrainRequest], width: int = 32) -> list[Tree]:
    """Runs requests vectorised and checks each against the looped engine."""
    before = [copy(r.trainable) for r in requests]
    replies = engine(network, width=width).execute(requests)
    for reply, update, start in zip(replies, requests, before, strict=True):
        if isinstance(reply, Exception):
            raise reply
        dtype = update.trainable["head.weight"].dtype
        assert_close(reply, looped.train(update, Classification(network), CPU), TOLERANCE[dtype])
        assert_equal(update.trainable, start)
    return replies


@DTYPES
@pytest.mark.parametrize(("factory", "spec"), [m[1:] for m in MODELS], ids=[m[0] for m in MODELS])
def test_ragged_clients_agree(factory: Callable[[], Any], spec: InputSpec, dtype: torch.dtype) -> None:
    network = network_of(factory, dtype)
    shared = network.initialize(0)
    requests = [request(examples(n, spec, k, dtype), shared, client=k) for k, n in enumerate(SIZES)]
    replies = run(network, requests)
    for reply in replies:
        assert not torch.equal(reply["head.weight"], shared["head.weight"])
        assert list(reply) == list(shared)


@DTYPES
@pytest.mark.parametrize("batch_size", [1, 10, None])
def test_batch_sizes_agree(batch_size: int | None, dtype: torch.dtype) -> None:
    network = network_of(lambda: TwoLayers(6, 9, 4), dtype)
    sizes = (7, 3, 12)
    run(
        network,
        [
            request(examples(n, VECTOR, k, dtype), network.initialize(k), client=k, batch_size=batch_size)
            for k, n in enumerate(sizes)
        ],
    )


def test_a_whole_experiment_agrees() -> None:
    servers = []
    for mode in ("looped", "vectorized"):
        toy = Toy(
            FedAvg(),
            random_clients([17, 3, 40, 9, 23]),
            two_layers(),
            TrainConfig(rounds=3, clients_per_round=4, local_epochs=2, batch_size=5, lr=0.1, momentum=0.9),
            mode=mode,
        )
        servers.append(toy.run())
    assert_close(servers[0], servers[1], 1e-10)


def along_the_line(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    """Reads a shared and an own frozen tree, a frozen number, nested trees and draws of two shapes."""
    mixed = interpolate(model["inner"]["a"], model["b"], draw["coefficient"])
    loss = task.loss(mixed, batch) + frozen["weight"] * squared_distance(mixed, frozen["shared"]["model"])
    pull = frozen["own"]["head.weight"] * draw["noise"][:, None]
    return loss + ((model["b"]["head.weight"] - pull) ** 2).mean()


@DTYPES
def test_frozen_trees_and_draws_agree(dtype: torch.dtype) -> None:
    network = network_of(lambda: TwoLayers(6, 9, 4), dtype)
    shared = {"model": network.initialize(100)}
    generator = torch.Generator().manual_seed(0)
    requests = []
    for k, n in enumerate(SIZES):
        data = examples(n, VECTOR, k, dtype)
        steps = request(data, network.initialize(0)).plan.steps
        draws = {
            "coefficient": torch.rand(steps, generator=generator).numpy(),
            "noise": torch.randn(steps, 4, generator=generator).numpy(),
        }
        requests.append(
            request(
                data,
                {"inner": {"a": network.initialize(0)}, "b": network.initialize(k)},
                along_the_line,
                client=k,
                frozen={"shared": shared, "own": network.initialize(200 + k), "weight": 0.1},
                draws=draws,
            )
        )
    replies = engine(network).execute(requests)
    for reply, update in zip(replies, requests, strict=True):
        assert_close(reply, looped.train(update, Classification(network), CPU), TOLERANCE[dtype])


def test_shared_frozen_tensors_are_not_stacked() -> None:
    network = Network(lambda: TwoLayers(6, 9, 4))
    shared = network.initialize(100)
    seen: list[tuple[bool, ...]] = []

    def is_whole(tensor: Tensor, original: Tensor) -> bool:
        """Whether beneath the transformations lies the original itself, for all clients."""
        while functorch.is_functorch_wrapped_tensor(tensor):
            if functorch.is_batchedtensor(tensor):
                return False
            tensor = functorch.get_unwrapped(tensor)
        return tensor.data_ptr() == original.data_ptr()

    def spying(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        seen.append(tuple(is_whole(frozen[name]["head.weight"], shared["head.weight"]) for name in ("shared", "own")))
        return task.loss(model, batch) + squared_distance(model, frozen["shared"])

    requests = [
        request(
            examples(n, VECTOR, k),
            network.initialize(0),
            spying,
            client=k,
            frozen={"shared": shared, "own": network.initialize(k)},
        )
        for k, n in enumerate((17, 3, 12))
    ]
    engine(network).execute(requests)
    assert seen == [(True, False)] * 4


def test_clients_wider_than_the_stack() -> None:
    network = Network(lambda: TwoLayers(6, 9, 4))
    requests = [request(examples(n, VECTOR, k), network.initialize(k), client=k) for k, n in enumerate(SIZES)]
    for width in (1, 2, 3, 7, 32):
        run(network, requests, width=width)


def test_the_width_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(lambda: TwoLayers(6, 9, 4))
    stacked: list[list[int]] = []
    train = vectorized.train

    def counting(requests: Sequence[TrainRequest], *rest: Any) -> list[Tree]:
        stacked.append([r.client for r in requests])
        return train(requests, *rest)

    monkeypatch.setattr(vectorized, "train", counting)
    requests = [request(examples(5, VECTOR, k), network.initialize(k), client=k) for k in range(5)]
    engine(network, width=2).execute(requests)
    assert stacked == [[0, 1], [2, 3], [4]]


def test_a_single_client_and_none() -> None:
    network = Network(lambda: TwoLayers(6, 9, 4))
    run(network, [request(examples(17, VECTOR, 0), network.initialize(0))])
    assert engine(network).execute([]) == []


@pytest.mark.parametrize("idle", [(0,), (2,), (0, 1, 2)], ids=str)
def test_clients_without_steps_keep_their_model(idle: tuple[int, ...]) -> None:
    network = Network(lambda: TwoLayers(6, 9, 4))
    updates = []
    for k, n in enumerate((17, 30, 3)):
        data = examples(0 if k in idle and k == 2 else n, VECTOR, k)
        updates.append(request(data, network.initialize(k), client=k, epochs=0 if k in idle else 2))
    replies = run(network, updates)
    for k in idle:
        assert_equal(replies[k], updates[k].trainable)
        replies[k]["head.weight"].fill_(7.0)
        assert not (updates[k].trainable["head.weight"] == 7.0).any()


def test_results_share_no_memory() -> None:
    network = Network(lambda: TwoLayers(6, 9, 4))
    requests = [request(examples(5, VECTOR, k), network.initialize(k), client=k) for k in range(3)]
    replies = engine(network).execute(requests)
    expected = copy(replies[1])
    replies[0]["head.weight"].fill_(7.0)
    replies[2]["head.weight"].fill_(7.0)
    assert_equal(replies[1], expected)


def test_only_equal_work_is_stacked_and_replies_come_in_order() -> None:
    """Different objectives, learning rates, frozen numbers and shapes in one call."""
    network = Network(lambda: TwoLayers(6, 9, 4))

    def weighted(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        loss: Tensor = frozen["weight"] * task.loss(model, batch)
        return loss

    def of_first(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        loss: Tensor = task.loss(model["first"], batch)
        return loss

    made: list[Callable[[int], TrainRequest]] = [
        lambda k: request(examples(5 + k, VECTOR, k), network.initialize(k), client=k),
        lambda k: request(examples(5 + k, VECTOR, k), network.initialize(k), client=k, lr=0.5),
        lambda k: request(examples(5 + k, VECTOR, k), network.initialize(k), weighted, frozen={"weight": 2.0}),
        lambda k: request(examples(5 + k, VECTOR, k), network.initialize(k), weighted, frozen={"weight": 3.0}),
        lambda k: request(examples(5 + k, VECTOR, k), {"first": network.initialize(k)}, of_first, client=k),
    ]
    requests = [made[k % 5](k) for k in range(10)]
    task = Classification(network)
    for reply, update in zip(engine(network).execute(requests), requests, strict=True):
        assert_close(reply, looped.train(update, task, CPU), 1e-5)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_an_objective_that_fails_fails_its_clients_and_no_others(mode: str) -> None:
    network = Network(lambda: TwoLayers(6, 9, 4))

    def fails(*_: Any) -> Tensor:
        raise ArithmeticError("broken objective")

    requests = [
        request(examples(5, VECTOR, k), network.initialize(k), fails if k in (1, 3) else cross_entropy, client=k)
        for k in range(5)
    ]
    replies = engine(network, mode).execute(requests)
    for k, reply in enumerate(replies):
        if k in (1, 3):
            assert isinstance(reply, ArithmeticError)
        else:
            assert_close(reply, looped.train(requests[k], Classification(network), CPU), 1e-5)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_a_malformed_request_fails_its_client_and_no_other(mode: str) -> None:
    network = Network(lambda: TwoLayers(6, 9, 4))
    good = request(examples(5, VECTOR, 0), network.initialize(0))
    mixed = request(examples(5, VECTOR, 1), {"a": torch.zeros(1), "b": torch.zeros(1).double()})
    unhashable = request(examples(5, VECTOR, 2), {"a": torch.zeros(1), "n": 3})
    replies = engine(network, mode).execute([mixed, good, unhashable, object()])  # type: ignore[list-item]
    assert [isinstance(reply, TypeError) for reply in replies] == [True, False, True, True]
    assert_close(replies[1], looped.train(good, Classification(network), CPU), 1e-5)


def test_gradients_are_answered_among_updates() -> None:
    network = Network(lambda: TwoLayers(6, 9, 4))
    ask = GradientRequest(1, examples(9, VECTOR, 1), network.initialize(1), cross_entropy, 4, seed=0)
    requests: list[Any] = [request(examples(5, VECTOR, k), network.initialize(k), client=k) for k in (0, 2)]
    replies = engine(network).execute([requests[0], ask, requests[1]])
    assert_equal(replies[1], looped.gradient(ask, Classification(network), CPU))
    assert_close(replies[2], looped.train(requests[1], Classification(network), CPU), 1e-5)


@pytest.mark.parametrize("factory", [Gated, SelfNormalized])
def test_a_network_that_cannot_be_stacked_is_looped_with_one_warning(
    factory: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    network = Network(factory)
    with caplog.at_level(logging.WARNING):
        fallback = engine(network)
        assert not fallback.vectorized
        assert fallback.width == 1
        requests = [request(examples(17, VECTOR, k), network.initialize(k), client=k) for k in range(3)]
        for reply, update in zip(fallback.execute(requests), requests, strict=True):
            assert_equal(reply, looped.train(update, Classification(network), CPU))
    (record,) = caplog.records
    assert network.why_not_vectorizable in record.getMessage()
    caplog.clear()
    assert not engine(network, "looped").vectorized
    assert not caplog.records


def test_auto_stacks_on_accelerators_only() -> None:
    assert not engine(Network(lambda: TwoLayers(6, 9, 4)), "auto").vectorized


def test_buffers_are_neither_moved_nor_decayed() -> None:
    network = Network(Scaled)
    updates = [request(examples(n, VECTOR, k), network.initialize(k), client=k) for k, n in enumerate((17, 3))]
    for update in updates:
        update.trainable["scale"].mul_(1.0 + update.client)
    for update, reply in zip(updates, run(network, updates), strict=True):
        assert torch.equal(reply["scale"], update.trainable["scale"])
        assert not torch.equal(reply["head.weight"], update.trainable["head.weight"])


def test_what_the_objective_does_not_read_agrees() -> None:
    network = Network(Partly)
    run(
        network,
        [
            request(examples(n, VECTOR, k), network.initialize(k), client=k, weight_decay=0.1)
            for k, n in enumerate((17, 3))
        ],
    )


def test_a_diverging_client_does_not_touch_the_others() -> None:
    network = Network(lambda: TwoLayers(6, 9, 4))
    requests = [request(examples(n, VECTOR, k), network.initialize(k), client=k) for k, n in enumerate((17, 20, 3))]
    requests[1].examples.x.fill_(float("inf"))
    replies = engine(network).execute(requests)
    assert not torch.isfinite(replies[1]["head.weight"]).any()
    for k in (0, 2):
        assert_close(replies[k], looped.train(requests[k], Classification(network), CPU), 1e-5)


@pytest.mark.parametrize("fitting", [1, 2, 3, 6])
def test_half_as_many_clients_at_a_time_where_the_memory_of_the_gpu_is_too_small(
    fitting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = network_of(lambda: TwoLayers(6, 9, 4), torch.float64)
    requests = [request(examples(n, VECTOR, k, torch.float64), network.initialize(k), client=k) for k, n in SMALL]
    expected = run(network, requests)
    tried: list[int] = []
    train = vectorized.train

    def small_gpu(some: Sequence[TrainRequest], *rest: Any) -> list[Tree]:
        tried.append(len(some))
        if len(some) > fitting:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return train(some, *rest)

    monkeypatch.setattr(vectorized, "train", small_gpu)
    limited = engine(network, width=32)
    replies = limited.execute(requests)
    assert_close(dict(enumerate(replies)), dict(enumerate(expected)), 1e-10)
    assert limited.width == (32 if fitting == 6 else fitting)
    tried.clear()
    limited.execute(requests)
    assert max(tried) <= fitting  # it has learned


def test_one_client_that_is_too_large_for_the_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*arguments: Any) -> list[Tree]:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(vectorized, "train", no_room)
    network = network_of(lambda: TwoLayers(6, 9, 4), torch.float64)
    requests = [request(examples(n, VECTOR, k, torch.float64), network.initialize(k), client=k) for k, n in SMALL]
    replies = engine(network).execute(requests)
    assert [type(reply) for reply in replies] == [torch.cuda.OutOfMemoryError] * len(SMALL)
