"""Looped and vectorised execution agree up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import _functorch as functorch

from algorithms.fedavg import FedAvg
from rayfl.engine.stacks import vectorized
from rayfl.engine.steps import looped
from rayfl.engine.updates.requests import TrainRequest
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import InputSpec
from rayfl.models.base import Network
from rayfl.models.zoo import TwoNN
from rayfl.params import Tree, copy, interpolate, squared_distance
from rayfl.tasks.base import Batch, Task
from rayfl.tasks.classification import Classification
from tests.support.problems import CPU, SmallCNN, examples, request
from tests.support.stacks import TOLERANCE, engine, network_of, run
from tests.support.toy_networks import TwoLayers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

torch.set_num_threads(1)

SIZES = (17, 3, 64, 200, 10, 10, 41)
VECTOR = InputSpec("image", (6,), 4)
IMAGE = InputSpec("image", (1, 6, 6), 4)
MODELS: list[tuple[str, Callable[[], Any], InputSpec]] = [
    ("two_nn", lambda: TwoNN(hidden=(20, 20)).build(IMAGE), IMAGE),
    ("small_cnn", SmallCNN, IMAGE),
    ("mlp2", lambda: TwoLayers(6, 9, 4), VECTOR),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


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
    assert seen == [(True, False)] * 6  # the first two are for the padding, of one client


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
