"""What the checks share: the device, a clock that waits for it, and hosts with made-up clients."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType

from actors.processes.garbage import settle
from algorithms.base import Algorithm
from rayfl.data.images.augment import Augmentation
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.precision import set_arithmetic
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import InputSpec
from rayfl.messages.privacy import PrivacyConfig
from rayfl.models.architecture import Architecture
from rayfl.models.base import Network
from rayfl.tasks.classification import Classification
from tests.support.elsewhere import elsewhere
from tests.support.toys import ListDataset, Toy

REHEARSAL = os.environ.get("CAMPAIGN_DEVICE", "cuda") == "cpu"
"""Whether nothing but the campaign itself is tried, on a CPU."""
DEVICE = torch.device("cpu" if REHEARSAL else "cuda")


def scaled(number: int, rehearsal: int) -> int:
    """A number of clients or samples, and what stands for it in a rehearsal."""
    return rehearsal if REHEARSAL else number


@contextmanager
def failing_device(memory: int | None = None) -> Iterator[torch.device]:
    """A device that things go wrong on: the GPU, or in a rehearsal the pretended one.

    Args:
        memory: bytes that this process may take of it; None for all.
    """
    if REHEARSAL:
        with elsewhere(memory) as device:
            yield device
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if memory is None else min(memory / total, 1.0))
    yield DEVICE


def spread(work: Callable[[str], Any], names: Iterable[str]) -> Iterator[Any]:
    """What some work gives for each name, by up to eight processes, each with two of the machine's cores."""
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin_process) as pool:
        yield from pool.map(work, names)


def _begin_process() -> None:
    torch.set_num_threads(2)
    set_arithmetic("float32")


def wait() -> None:
    """Waits until the device has done all that it was asked for."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """The median time of some work, after one time that is not counted.

    As in an actor, Python's collector then leaves alone what exists: to walk all that the checks import takes it long.
    """
    work()
    wait()
    settle()
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - begun)
    gc.unfreeze()
    return statistics.median(taken)


def peak_bytes(work: Callable[[], object]) -> int | None:
    """The most bytes of the device's memory that some work takes beyond those in use; None on CPUs."""
    if DEVICE.type != "cuda":
        work()
        return None
    wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    wait()
    return torch.cuda.max_memory_allocated() - before


def reserved_bytes(work: Callable[[], object]) -> int | None:
    """The most bytes that PyTorch's allocator holds during some work, with those of graphs; None on CPUs."""
    if DEVICE.type != "cuda":
        return None
    wait()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    wait()
    return torch.cuda.max_memory_reserved()


class Row(NamedTuple):
    """What a profile says of the events of one name on one kind of device."""

    key: str
    device_type: DeviceType
    is_user_annotation: bool
    count: int
    self_device_time_total: float


def profiled(work: Callable[[], object]) -> dict[str, Any]:
    """Launches, synchronisations and milliseconds on the GPU of some work; nothing on CPUs.

    Of the profiler's raw events: to make PyTorch's averages of a round's takes it a minute.
    """
    if DEVICE.type != "cuda":
        return {}
    events = _profile(work, operators=False).profiler.kineto_results.events()
    taken: dict[tuple[str, DeviceType, bool], list[int]] = {}
    for event in events:
        key = event.name(), event.device_type(), event.is_user_annotation()
        taken.setdefault(key, []).append(event.duration_ns())
    return counted([Row(*key, len(spans), sum(spans) / 1e3) for key, spans in taken.items()])


def profile_rows(work: Callable[[], object]) -> Sequence[Any]:
    """The rows of a profile of some work: kernels, and the operators that launched them."""
    return list(_profile(work).key_averages())


def _profile(work: Callable[[], object], operators: bool = True) -> Any:
    """A profile of some work, with or without the operators that launch kernels."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = [ProfilerActivity.CUDA] if DEVICE.type == "cuda" else []
    with profile(activities=[*on_gpu, *([ProfilerActivity.CPU] if operators or not on_gpu else [])]) as found:
        work()
        wait()
    return found


def counted(rows: Sequence[Any]) -> dict[str, Any]:
    """What a profile's rows tell.

    Args:
        rows: of ``key_averages``. A kernel's time is in its own row and once more in that of the operator on the CPU
            which launched it: the kernels' rows alone are added.
    """
    kernels = [row for row in rows if row.device_type != DeviceType.CPU and not row.is_user_annotation]
    busy = sorted(kernels, key=lambda row: -row.self_device_time_total)
    return {
        "launches": sum(row.count for row in rows if "LaunchKernel" in row.key or "GraphLaunch" in row.key),
        "waits": {row.key: row.count for row in rows if "Synchronize" in row.key or row.key == "cudaMalloc"},
        "copies": sum(row.count for row in rows if row.key == "cudaMemcpyAsync"),
        "ms on the GPU": sum(row.self_device_time_total for row in kernels) / 1e3,
        "longest": [f"{row.key[:60]} x {row.count}: {row.self_device_time_total / 1e3:.2f} ms" for row in busy[:5]],
    }


def shares(rows: Sequence[Any], of: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Parts of the time of all operators, on the GPU or, where nothing ran there, on the CPU.

    Args:
        rows: of ``key_averages``. Kernels' own rows are left out: their time is in the rows of operators once more.
        of: the operators of each part.
    """
    operators = [row for row in rows if row.device_type == DeviceType.CPU and not row.is_user_annotation]
    on_gpu = any(row.self_device_time_total for row in operators)
    taken = {row.key: row.self_device_time_total if on_gpu else row.self_cpu_time_total for row in operators}
    total = sum(taken.values())
    return {part: sum(taken.get(name, 0.0) for name in names) / total for part, names in of.items()}


def samples(spec: InputSpec, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random inputs and labels."""
    labels = torch.randint(0, spec.num_classes, (count,), generator=generator)
    if spec.kind == "tokens":
        return torch.randint(0, spec.vocabulary, (count, *spec.shape), generator=generator), labels
    return torch.rand(count, *spec.shape, generator=generator), labels


def federation(
    method: Algorithm,
    sizes: Sequence[int],
    architecture: Architecture,
    spec: InputSpec,
    mode: str = "vectorized",
    width: int = 1000,
    device: torch.device = DEVICE,
    cohort: int | None = None,
    data_memory: int | None = None,
    network: Network | None = None,
    augmentation: Augmentation | None = None,
    engine: Mapping[str, Any] = MappingProxyType({}),
    privacy: PrivacyConfig | None = None,
    **train: Any,
) -> Toy:
    """One host in this process, with a client for each of the sizes.

    Args:
        method: what is trained.
        sizes: samples of each client.
        architecture: the network.
        spec: of the inputs.
        mode: looped or vectorized.
        width: clients stacked at a time.
        device: where.
        cohort: clients in a round; None for all.
        data_memory: bytes of samples that stay on the device.
        network: in place of the architecture's.
        augmentation: of the images.
        engine: further options of the engine.
        privacy: of clients or of their samples.
        train: of the training section.
    """
    generator = torch.Generator().manual_seed(0)
    data = ListDataset([samples(spec, size, generator) for size in sizes], spec.num_classes)
    data.spec = spec
    settings = {"rounds": 99, "clients_per_round": cohort or "all", "local_epochs": 1, "batch_size": 10, "lr": 0.01}
    task = Classification(network or architecture.network(spec))
    config = TrainConfig(**{**settings, **train})
    limits = privacy or PrivacyConfig()
    toy = Toy(
        method, data, task, config, device=device, data_memory=data_memory, augmentation=augmentation, privacy=limits
    )
    for host in toy.client_hosts:
        host.engine = Engine(task, device, EngineConfig(mode=mode, width=width, **engine))  # type: ignore[arg-type]
    return toy


def play(toy: Toy) -> None:
    """One round, in which nobody is scored."""
    toy.federation.begin_round(toy.round, ())
    chosen = toy.cohort(toy.round)
    toy.server = {**toy.server, **toy.algorithm.round(toy.server, chosen, toy.federation)}
    toy.round += 1
