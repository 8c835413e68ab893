"""What a client costs is measured by its method's own steps, and leaves no trace."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rayfl
from actors.hosting.building import build_host
from actors.hosting.host import ClientHost
from actors.hosting.job import Job, JobResult
from actors.probing import memory as probe_memory
from actors.probing.measure import Measured, ProbeFailedError, ShortenedEngine, measure
from actors.probing.memory import GpuMemory, ProcessMemory, Room, memory_of
from actors.probing.probe_calls import ProbeCall, middling, probe_calls
from algorithms.registry import Experiment
from rayfl.aggregation.exact_sum import MAX_WAITING_BYTES
from rayfl.config.loading import load_config
from rayfl.config.schema import ExperimentConfig
from rayfl.engine import engine as engine_module
from rayfl.engine.engine import EngineConfig
from rayfl.engine.stacks import vectorized
from rayfl.engine.updates.requests import Request, TrainRequest
from rayfl.errors import DeviceLostError, ResourceError
from rayfl.experiment.parts import Parts
from rayfl.models.base import Network
from tests.support.experiments import assert_same, each_method, outcome, small_experiment

GIB = 1 << 30


class Scripted:
    """A device whose peaks are given, one a mark."""

    def __init__(self, *peaks: int) -> None:
        self._peaks = list(peaks)
        self.marks = 0

    def mark(self) -> None:
        self.marks += 1

    def peak(self) -> int:
        return self._peaks[self.marks - 1]

    def room(self) -> Room:
        return Room(100, 8 * GIB, 10 * GIB)


def experiment(folder: Path, method: str = "superfed-mm", mode: str = "looped") -> ExperimentConfig:
    return load_config(Experiment, small_experiment(folder, "run", method) | {"engine": {"mode": mode}}, {})


def measured(config: ExperimentConfig, memory: Any = None, calls: Sequence[ProbeCall] | None = None) -> Measured:
    parts = Parts(config)
    found = probe_calls(parts, parts.check()) if calls is None else calls
    host = build_host(config, 0, "cpu")
    return measure(host, config.engine, found, memory or Scripted(50, 110), "node x", 7)


PLAIN = {"dispfl", "feddisco", "fediir", "fedmd", "mime", "fedpcl", "pacfl", "pefll", "pfedhn", "qfedavg", "term"}
PLAIN |= {"fairfed", "fedpft"}
"""Measured by federated averaging's steps: the round's first call takes none, or the server works before it."""


@pytest.mark.parametrize("mode", [pytest.param("looped", marks=pytest.mark.slow), "vectorized"])
@pytest.mark.parametrize("method", each_method())
def test_every_method_is_measured_by_its_own_steps(method: str, mode: str, tmp_path: Path) -> None:
    config = experiment(tmp_path, method, mode)
    parts = Parts(config)
    own = [call for call in probe_calls(parts, parts.check()) if not call.is_fedavg or method in PLAIN]
    found = measured(config, calls=own)
    assert 0 < found.step_s < found.first_step_s + 1
    assert found.vectorized == (mode == "vectorized" and parts.task.network.vectorizable)
    assert not (tmp_path / "run").exists()


def test_the_last_round_is_measured_and_else_the_first_and_else_a_plain_one(tmp_path: Path) -> None:
    parts = Parts(experiment(tmp_path))
    calls = probe_calls(parts, parts.check())
    assert [(call.job.procedure, call.job.round, call.is_fedavg) for call in calls] == [
        ("local_update", 3, False),
        ("local_update", 0, False),
        ("local_update", 0, True),
    ]
    broken = Parts(parts.config.model_copy(update={"algorithm": Broken()}))
    (plain,) = probe_calls(broken, parts.check())
    assert plain.is_fedavg
    assert measured(broken.config, calls=[plain]).step_s > 0
    with pytest.raises(ProbeFailedError, match="no client"):
        measured(broken.config, calls=[])
    with pytest.raises(ProbeFailedError, match="nowhere"):
        measured(broken.config, calls=[ProbeCall(Job("nowhere", "mean", 0, (0,)), {})])


class Broken(rayfl.Algorithm):
    """A method whose round needs what is not there."""

    name: str = "broken"

    def init(self, task: Any, context: Any) -> dict[str, Any]:
        raise RuntimeError("no server today")


def test_an_actor_has_a_base_and_each_stacked_client_takes_the_same(tmp_path: Path) -> None:
    stacked = measured(experiment(tmp_path, mode="vectorized"), Scripted(50, 110))
    assert (stacked.client_bytes, stacked.base_bytes) == (30, 120)  # three clients: 50, 80, 110
    looped = measured(experiment(tmp_path), Scripted(50, 70))  # of one client, and with the sum of several
    assert (looped.client_bytes, looped.base_bytes) == (70, 100 + MAX_WAITING_BYTES)
    for found in (stacked, looped):
        assert (found.held_bytes, found.device_free_bytes, found.device_total_bytes) == (7, 8 * GIB, 10 * GIB)
    noisy = measured(experiment(tmp_path, mode="vectorized"), Scripted(50, 40))
    assert (noisy.client_bytes, noisy.base_bytes) == (1, 149)


def test_few_steps_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[list[int]] = []
    execute = ShortenedEngine.execute

    def noting(self: ShortenedEngine, requests: Sequence[Request]) -> list[Any]:
        done.append([self._short(one).plan.steps for one in requests if isinstance(one, TrainRequest)])  # type: ignore[union-attr]
        return execute(self, requests)

    monkeypatch.setattr(ShortenedEngine, "execute", noting)
    config = experiment(tmp_path, "fedavg", "vectorized")
    config = config.model_copy(update={"train": config.train.model_copy(update={"local_epochs": 50})})
    measured(config)
    assert done == [[1, 1, 1], [4], [2, 2, 2]]


@pytest.mark.parametrize("method", ["superfed-mm", pytest.param("fedphp", marks=pytest.mark.slow)])
def test_nothing_is_written_and_no_bit_changes(method: str, tmp_path: Path) -> None:
    content = small_experiment(tmp_path, "before", method, backend="inline")
    rayfl.run(content)
    seeds = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    measured(load_config(Experiment, content | {"name": "after"}, {}))
    assert not (tmp_path / "after").exists()
    assert torch.equal(torch.get_rng_state(), seeds[0])
    assert np.array_equal(np.random.get_state()[1], seeds[1])  # type: ignore[index]
    rayfl.run(content | {"name": "after"})
    assert_same(outcome(tmp_path / "before"), outcome(tmp_path / "after"))


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")],
)
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_a_device_too_small_for_a_client_is_named(
    mode: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(vectorized, "train", full)
    monkeypatch.setattr("rayfl.engine.steps.looped.train", full)
    wanted = (
        r"node x has 8\.0 GiB for this run \(other processes have 2\.0 of 10\.0\), too little for one client at a time "
        r".*train\.batch_size.*device=cpu"
    )
    with pytest.raises(ResourceError, match=wanted):
        measured(experiment(tmp_path, mode=mode))


def test_a_device_that_is_lost_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def lost(self: ClientHost, *_: object) -> JobResult:
        tried.append(self)
        raise DeviceLostError("this process can no longer compute on cuda: CUDA error")

    monkeypatch.setattr(ClientHost, "run", lost)
    with pytest.raises(ProbeFailedError, match="can no longer compute on cuda"):
        measured(experiment(tmp_path))
    assert len(tried) == 1


def test_fewer_are_stacked_where_memory_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = vectorized.train

    def small(requests: Sequence[TrainRequest], *rest: Any) -> Any:
        if len(requests) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(requests, *rest)

    monkeypatch.setattr(vectorized, "train", small)
    found = measured(experiment(tmp_path, mode="vectorized"), Scripted(50))
    assert (found.client_bytes, found.base_bytes) == (50, 100)


def test_clients_that_are_in_no_stack_together_are_not_counted_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "clients_for_rows", lambda rows, task, size: 2)
    found = measured(experiment(tmp_path, mode="vectorized"), Scripted(50, 110))
    assert (found.client_bytes, found.base_bytes) == (60, 100)  # two clients at a time: 50, 110


def test_costs_of_steps_that_save_memory_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, saved = vectorized.train, list[bool]()

    def small(requests: Sequence[TrainRequest], *rest: Any) -> Any:
        if not saved:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(requests, *rest)

    def save(network: Network) -> bool:
        saved.append(True)
        return len(saved) == 1

    monkeypatch.setattr(vectorized, "train", small)
    monkeypatch.setattr(Network, "save_memory", save)
    found = measured(experiment(tmp_path, mode="vectorized"), Scripted(50, 110))
    assert found.saves_memory and found.client_bytes == 30
    monkeypatch.undo()
    assert not measured(experiment(tmp_path, mode="vectorized"), Scripted(50, 110)).saves_memory


@given(samples=st.lists(st.integers(0, 50), min_size=1, max_size=9))
def test_clients_of_middling_size_come_first(samples: list[int]) -> None:
    order = middling(range(len(samples)), np.array(samples))
    assert sorted(order) == [client for client, n in enumerate(samples) if n]
    median = np.median([n for n in samples if n]) if order else 0
    distances = [abs(samples[client] - median) for client in order]
    assert distances == sorted(distances)


def test_memory_of_this_process() -> None:
    memory = memory_of(torch.device("cpu"))
    assert isinstance(memory, ProcessMemory)
    memory.mark()
    room = memory.room()
    assert 10 << 20 < room.own <= room.free <= room.total
    # of the kernel's, since what an allocator has left from earlier would be no new memory
    with mmap.mmap(-1, 40 << 20) as block:
        for _ in range(40):
            block.write(bytes(1 << 20))
        assert memory.peak() >= 30 << 20
    memory.mark()
    assert memory.peak() < 30 << 20


def test_without_proc_the_peak_of_the_process_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_memory, "STATUS_FILE", tmp_path / "none")
    monkeypatch.setattr(probe_memory, "RESET_FILE", tmp_path / "none" / "none")
    memory = ProcessMemory()
    memory.mark()
    assert memory.room().own > 10 << 20
    assert memory.peak() >= 0


def gpu(monkeypatch: pytest.MonkeyPatch, free: float, **numbers: float) -> GpuMemory:
    """A GPU of 16 GiB that does not exist; numbers in GiB."""
    fake = {name: (lambda _device, n=n: int(n * GIB)) for name, n in numbers.items()}
    fake |= {"mem_get_info": lambda _device: (int(free * GIB), 16 * GIB)}
    fake |= {name: lambda _device: None for name in ("synchronize", "reset_peak_memory_stats")}
    monkeypatch.setattr(probe_memory.torch, "cuda", SimpleNamespace(**fake))
    memory = memory_of(torch.device("cuda"))
    assert isinstance(memory, GpuMemory)
    memory.mark()
    return memory


def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = gpu(monkeypatch, 15, memory_reserved=0.5, memory_allocated=0.25, max_memory_allocated=2.25)
    assert alone.room() == Room(int(0.75 * GIB), 16 * GIB, 16 * GIB)  # half a GiB of context
    assert alone.peak() == 2 * GIB
    shared = gpu(monkeypatch, 10, memory_reserved=0.5, memory_allocated=0.25, max_memory_allocated=0)
    assert shared.room() == Room(int(1.25 * GIB), int(11.5 * GIB), 16 * GIB)  # others have 4.5 GiB
    assert shared.peak() == 0


def test_width_auto_without_a_measurement() -> None:
    config = EngineConfig(mode="vectorized", width="auto")
    parts = Parts(experiment(Path("nowhere")))
    assert ShortenedEngine(parts.task, torch.device("cpu"), config).width == 32
