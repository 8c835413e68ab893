"""Failures in stacks of clients, and networks that cannot be stacked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rayfl.engine.stacks import vectorized
from rayfl.engine.steps import looped
from rayfl.engine.updates.requests import GradientRequest, TrainRequest
from rayfl.errors import MethodError
from rayfl.examples import InputSpec
from rayfl.models.base import Network
from rayfl.params import Tree
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.problems import CPU, Gated, Partly, Scaled, SelfNormalized, cross_entropy, examples, request
from tests.support.stacks import engine, network_of, run
from tests.support.toy_networks import TwoLayers
from tests.support.toys import assert_close, assert_equal

SMALL = tuple(enumerate((17, 3, 24, 9, 10, 12)))

VECTOR = InputSpec("image", (6,), 4)


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


def over_all_rows(model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> Tensor:
    """As PyTorch's users write it; it takes the padding for samples."""
    return torch.nn.functional.cross_entropy(task.logits(model, batch), batch.y)


def test_an_objective_that_counts_padding_as_samples_is_trained_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    network = Network(lambda: TwoLayers(6, 9, 4))
    requests = [request(examples(n, VECTOR, k), network.initialize(k), over_all_rows, client=k) for k, n in SMALL]
    with caplog.at_level(logging.WARNING):
        replies = engine(network).execute(requests)
    for asked, reply in zip(requests, replies, strict=True):
        assert_equal(reply, looped.train(asked, Classification(network), CPU))
    assert "depends on its padding (average over samples with batch.mean(values)" in caplog.text
    assert "the objective over_all_rows are trained one by one from now on" in caplog.text


def toward(key: Any) -> Callable[..., Tensor]:
    """An objective that reads an entry of ``frozen``."""
    return lambda model, batch, task, frozen, draw: task.loss(model, batch) + frozen[key]["w"].sum()


@pytest.mark.parametrize(
    ("key", "given", "said"),
    [
        (1, {1: {"w": torch.ones(2)}}, "one by one: frozen has the key 1 (keys are to be strings without '/');"),
        ("a/b", {"a/b": {"w": torch.ones(2)}}, "frozen has the key 'a/b' (keys are to be strings without '/');"),
    ],
)
def test_the_log_says_which_keys_of_frozen_cannot_be_stacked(
    key: Any, given: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    network, objective = Network(lambda: TwoLayers(6, 9, 4)), toward(key)
    requests = [
        request(examples(8, VECTOR, k), network.initialize(k), objective, client=k, frozen=given) for k in (0, 1)
    ]
    with caplog.at_level(logging.WARNING):
        replies = engine(network).execute(requests)
    for asked, reply in zip(requests, replies, strict=True):
        assert_equal(reply, looped.train(asked, Classification(network), CPU))
    assert said in caplog.text


def test_the_log_says_that_a_key_was_missing_in_a_stack(caplog: pytest.LogCaptureFixture) -> None:
    network, tried = Network(lambda: TwoLayers(6, 9, 4)), []

    def lacks(model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> Tensor:
        tried.append(1)
        return task.loss(model, batch) if len(tried) > 1 else frozen["teacher"]

    requests = [request(examples(8, VECTOR, k), network.initialize(k), lacks, client=k, frozen={}) for k in (0, 1)]
    with caplog.at_level(logging.WARNING):
        engine(network).execute(requests)
    assert "not one by one: KeyError: 'teacher';" in caplog.text


@pytest.mark.parametrize(("objective", "sizes"), [(over_all_rows, (8, 8, 8)), (cross_entropy, (17, 3, 24))])
def test_objectives_are_stacked_where_no_padding_counts(
    objective: Any, sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(lambda: TwoLayers(6, 9, 4))
    requests = [
        request(examples(n, VECTOR, k), network.initialize(k), objective, client=k) for k, n in enumerate(sizes)
    ]
    alone = [looped.train(one, Classification(network), CPU) for one in requests]
    monkeypatch.setattr(looped, "train", lambda *_: pytest.fail("trained one by one"))
    for reply, expected in zip(engine(network).execute(requests), alone, strict=True):
        assert_close(reply, expected, 1e-5)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("reduced", [lambda values: values, lambda values: None, lambda values: 1.0])
def test_an_objective_returns_one_number(mode: str, reduced: Callable[[Tensor], Any]) -> None:
    network = Network(lambda: TwoLayers(6, 9, 4))

    def objective(model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> Any:
        return reduced(torch.nn.functional.cross_entropy(task.logits(model, batch), batch.y, reduction="none"))

    requests = [request(examples(5, VECTOR, k), network.initialize(k), objective, client=k) for k in range(3)]
    gradient = GradientRequest(3, examples(5, VECTOR, 3), network.initialize(3), objective, 4, seed=0)
    for reply in engine(network, mode).execute([*requests, gradient]):
        assert isinstance(reply, MethodError)
        assert "must return one number" in str(reply)


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
