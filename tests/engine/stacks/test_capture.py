"""Recorded steps are those that would be launched: the same operations on the same memory, to the bit."""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from rayfl.data.images.augment import AugmentConfig
from rayfl.data.images.augmentation import Augmentation
from rayfl.data.images.variations import Variations
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.stacks import vectorized
from rayfl.engine.stacks.capture import Capture, CudaGraphs
from rayfl.engine.updates.requests import TrainRequest
from rayfl.examples import InputSpec
from rayfl.models.base import Network
from rayfl.models.zoo import TwoNN
from rayfl.objectives import drawn, line, loss, squared_cosine, squared_distance
from rayfl.optimization.optimizers import OptimizerState, Rule
from rayfl.tasks.classification import Classification
from tests.support.problems import CPU, VECTOR, Dropping, Normalized, Recurrent, SmallCNN, examples, request
from tests.support.recording import Recording
from tests.support.toys import assert_equal

torch.set_num_threads(1)

IMAGE = InputSpec("image", (1, 6, 6), 4)
SUM = (
    loss(at=line("federated", "local", drawn("coefficient")))
    + 0.1 * squared_distance("federated", "received")
    + squared_cosine("federated", "local")
)
MODELS: dict[str, tuple[Callable[[], Any], InputSpec]] = {
    "two_nn": (lambda: TwoNN(hidden=(8,)).build(IMAGE), IMAGE),
    "small_cnn": (SmallCNN, IMAGE),
    "normalized": (Normalized, VECTOR),
    "dropping": (Dropping, VECTOR),
    "recurrent": (Recurrent, VECTOR),
}


def updates_of(
    network: Network, spec: InputSpec, sizes: Sequence[int] = (27, 17, 8), epochs: int = 8
) -> list[TrainRequest]:
    """SuPerFed's local updates of ragged clients, in mini-batches of ten."""
    found = []
    for k, size in enumerate(sizes):
        trained = {"federated": network.initialize(100), "local": network.initialize(k)}
        frozen = {"received": trained["federated"]}
        one = request(examples(size, spec, k), trained, SUM, client=k, epochs=epochs)
        draws = {"coefficient": np.random.default_rng(k).random(one.plan.steps)}
        found.append(replace(one, draws=draws, frozen=frozen, optimizer_state=OptimizerState()))
    return found


def both(updates: Sequence[TrainRequest], network: Network) -> Recording:
    """Trains with and without recorded steps, to the same bits."""
    recording, capture = Recording(), None
    task, found = Classification(network), []
    for recorder in (None, recording):
        given = [replace(one, optimizer_state=OptimizerState()) for one in updates]
        capture = None if recorder is None else Capture(recorder)
        trained = vectorized.train(given, task, CPU, capture)
        found.append(
            [{"trained": tree, "kept": one.optimizer_state.slots} for tree, one in zip(trained, given, strict=True)]
        )
    assert capture is not None and not capture.refused
    for plain, recorded in zip(*found, strict=True):
        assert_equal(plain, recorded)
    return recording


@pytest.mark.parametrize("products", [False, True], ids=["autograd", "products"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("normalized", "dropping") else pytest.mark.slow) for name in MODELS],
)
@pytest.mark.first_case
def test_replays_are_the_steps_to_the_bit(name: str, products: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectorized, "are_products", lambda device: products)
    factory, spec = MODELS[name]
    recording = both(updates_of(Network(factory), spec), Network(factory))
    assert recording.replayed >= 3 and recording.recorded


@pytest.mark.parametrize(
    "change",
    [
        {"rule": Rule(0.01, optimizer="adam")},
        {"rule": Rule(0.05, momentum=0.9, nesterov=True)},
        pytest.param({"max_grad_norm": 0.5}, marks=pytest.mark.slow),
    ],
    ids=["adam", "nesterov", "clipped"],
)
@pytest.mark.first_case
def test_rules_are_replayed(change: dict[str, Any]) -> None:
    network = Network(SmallCNN)
    both([replace(one, **change) for one in updates_of(network, IMAGE)], network)


def test_augmented_samples_are_replayed() -> None:
    network = Network(lambda: TwoNN(hidden=(8,)).build(IMAGE))
    augmentation = Augmentation(AugmentConfig(crop=1, flip=True), torch.zeros(1))
    changed = []
    for one in updates_of(network, IMAGE):
        drawn_numbers = augmentation.draw(np.random.default_rng(one.client), len(one.plan.order))
        changed.append(replace(one, variations=Variations(augmentation, drawn_numbers)))
    both(changed, network)


def test_most_steps_are_replays() -> None:
    """Of nine steps that are alike one is launched, and eight are replays of what is then recorded."""
    network = Network(SmallCNN)
    recording = both(updates_of(network, IMAGE, (30, 30, 30), epochs=3), network)
    assert (recording.launched, len(recording.recorded), recording.replayed) == (1, 1, 8)
    few = both(updates_of(network, IMAGE, (10, 10), epochs=3), network)  # three steps are not worth it
    assert (few.launched, few.recorded, few.replayed) == (0, [], 0)


def test_what_cannot_be_recorded_is_launched_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    network, recording = Network(SmallCNN), Recording()
    task, capture = Classification(network), Capture(recording)

    def waiting(model: Any, batch: Any, task: Any, frozen: Any, draw: Any) -> Tensor:
        scale = float(torch.ones(3).sum())  # what a GPU's host waits for
        found: Tensor = task.loss(model, batch) * scale
        return found

    updates = [request(examples(30, IMAGE, k), network.initialize(k), waiting, client=k, epochs=3) for k in range(2)]
    expected = vectorized.train(updates, task, CPU)
    for _ in range(2):
        for found, one in zip(vectorized.train(updates, task, CPU, capture), expected, strict=True):
            assert_equal(found, one)
    assert "_local_scalar_dense" in capture.refused and not recording.recorded and recording.launched == 1
    assert caplog.text.count("launched one by one") == 1


def test_memory_that_runs_out_is_no_refusal() -> None:
    class Full(Recording):
        def record(self, work: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    network, capture = Network(SmallCNN), Capture(Full())
    with pytest.raises(torch.OutOfMemoryError):
        vectorized.train(updates_of(network, IMAGE), Classification(network), CPU, capture)
    assert not capture.refused


class Graph:
    """A CUDA graph as PyTorch's allocator sees it: a pool ends with its last graph, and takes no other one then."""

    pools: ClassVar[Counter[int]] = Counter()
    begun: ClassVar[set[int]] = set()

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        if pool in self.begun and not self.pools[pool]:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.begun.add(pool)
        self.pools[pool] += 1
        weakref.finalize(self, self.pools.subtract, [pool])

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands in for CUDA; how many graphs there were whenever the allocator's cache was emptied."""
    stream = mock.Mock()
    monkeypatch.setattr(Graph, "pools", Counter())
    monkeypatch.setattr(Graph, "begun", set())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", itertools.count().__next__)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    times: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: times.append(sum(Graph.pools.values())))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return times


@pytest.mark.parametrize(
    ("work", "refused"),
    [(lambda: None, "capture was invalidated"), (mock.Mock(side_effect=RuntimeError("its own")), "its own")],
    ids=["at the end", "before"],
)
def test_a_capture_that_cannot_end_is_taken_from_the_allocator(
    work: Any, refused: str, emptied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda device, pool, name=name: told.append((name, device, pool)))
    monkeypatch.setattr(Graph, "capture_end", mock.Mock(side_effect=RuntimeError("capture was invalidated")))
    capture = Capture(CudaGraphs(CPU))
    capture.recorder.warm(lambda: None)
    assert capture.record(work) is None
    assert capture.refused == refused
    assert told == [("_cuda_endAllocateToPool", 0, 0), ("_cuda_releasePool", 0, 0)]


def test_stacks_after_the_first_are_recorded_too(emptied: list[int]) -> None:
    capture = Capture(CudaGraphs(CPU))
    for _ in range(3):
        capture.recorder.warm(lambda: None)
        graphs = [capture.record(lambda: None) for _ in range(2)]
        assert all(graphs), capture.refused
        assert max(Graph.pools.values()) == 2  # those of one stack share their memory
        del graphs  # as at a stack's end
        gc.collect()
        assert not sum(Graph.pools.values())
    # once a stack, when no graph needs its memory any more
    assert emptied == [0, 0, 0]


def test_capture_without_a_gpu_is_said(caplog: pytest.LogCaptureFixture) -> None:
    task = Classification(Network(SmallCNN))
    with caplog.at_level(logging.WARNING):
        engine = Engine(task, CPU, EngineConfig(mode="vectorized", capture=True))
    assert "engine.capture is for GPUs" in engine.note and "engine.capture" in caplog.text
    assert not Engine(task, CPU, EngineConfig(mode="vectorized")).note
