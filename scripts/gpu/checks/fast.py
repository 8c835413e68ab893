"""Part b: seconds, bytes and launches, and what they were meant to be."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from actors.hosting.building import device_state_memory_of
from actors.hosting.device_states import DeviceStateCache
from algorithms.base import Algorithm
from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from algorithms.fedphp import FedPHP
from algorithms.floco import Floco
from algorithms.superfed import SuPerFed
from checks.bench import DEVICE, federation, peak_bytes, play, profiled, scaled, seconds
from checks.running import Check, Record
from rayfl.config.cluster_section import ClusterConfig
from rayfl.examples import InputSpec
from rayfl.messages.privacy import PrivacyConfig
from rayfl.models.zoo import TwoNN

_DIGITS = InputSpec("image", (1, 28, 28), 10)


def device_itself(record: Record) -> None:
    """What the device takes for a launch, a transfer, a copy and a product, without rayfl."""
    one, small = torch.ones(1, device=DEVICE), torch.ones(200_000)
    big = torch.ones(scaled(1 << 28, 1 << 20), device=DEVICE)
    clients = scaled(1000, 10)
    left, right = (torch.rand(clients, *shape, device=DEVICE) for shape in ((10, 784), (784, 200)))

    def each(work: Callable[[], object], times: int) -> float:
        return seconds(lambda: [work() for _ in range(times)]) / times

    record.note("us a launch", 1e6 * each(lambda: one.add_(1), 1000))
    record.note("us to the device, 0.8 MB", 1e6 * each(lambda: small.to(DEVICE), 100))
    if DEVICE.type == "cuda":
        pinned = small.pin_memory()
        record.note("us to the device, 0.8 MB, pinned", 1e6 * each(lambda: pinned.to(DEVICE, non_blocking=True), 100))
    there = small.to(DEVICE)
    record.note("us from the device, 0.8 MB", 1e6 * each(there.cpu, 100))
    record.note("GB/s of a copy, read and written", 2 * big.nbytes / each(big.clone, 1) / 1e9)
    operations = 2 * clients * 10 * 784 * 200
    for allowed in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        name = f"TFLOP/s of batched products, {'tf32' if allowed else 'float32'}"
        record.note(name, operations / each(lambda: torch.bmm(left, right), 1) / 1e12)


def _measured(
    record: Record,
    name: str,
    method: Algorithm,
    sizes: Sequence[int],
    mode: str = "vectorized",
    width: int = 1000,
    states: int | None = None,
    privacy: PrivacyConfig | None = None,
) -> float:
    """Seconds of a round, which are noted with its bytes and launches.

    Args:
        record: of the check.
        name: of what is measured.
        method: what is trained.
        sizes: samples of each client.
        mode: looped or vectorized.
        width: clients stacked at a time.
        states: bytes of states that stay on the device; None: as many as by default.
        privacy: of clients or of their samples.
    """
    toy = federation(method, sizes, TwoNN(), _DIGITS, mode, width, privacy=privacy)
    by_default = device_state_memory_of(ClusterConfig(), DEVICE)
    toy.client_hosts[0]._device_states = DeviceStateCache(by_default if states is None else states)
    play(toy)
    taken = seconds(lambda: play(toy), 2)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    play(toy)
    found = {"s a round": taken, "page faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults}
    record.note(name, {**found, "peak bytes": peak_bytes(lambda: play(toy)), **profiled(lambda: play(toy))})
    return taken


def thousand_clients(record: Record) -> None:
    """A round of 1,000 TwoNN clients of 400 samples, batches of 10, by width."""
    sizes = [scaled(400, 20)] * scaled(1000, 10)
    best = _measured(record, "all at a time", FedAvg(), sizes)
    record.goal("a round of 1,000 TwoNN clients of 400 samples, FedAvg", "at most 1 s", best, best <= 1)
    for width in (256, 32):
        _measured(record, f"{width} at a time", FedAvg(), sizes, width=width)


def methods_of_two_models(record: Record) -> None:
    """Rounds of methods that train or keep two models a client, against federated averaging, 1,000 clients."""
    sizes = [scaled(100, 20)] * scaled(1000, 8)
    average = _measured(record, "fedavg", FedAvg(), sizes)
    methods: dict[str, Algorithm] = {
        "superfed": SuPerFed(start=0.0),
        "ditto": Ditto(),
        "floco": Floco(),
        "fedphp": FedPHP(),
    }
    for name, method in methods.items():
        ratio = _measured(record, name, method, sizes) / average
        record.note(f"{name} / fedavg", ratio)
        if name == "superfed":
            record.goal("a round of SuPerFed to one of FedAvg, 1,000 clients", "at most 1.5", ratio, ratio <= 1.5)


def stacked_against_looped(record: Record) -> None:
    """A round of 100 TwoNN clients, stacked and one by one."""
    sizes = [scaled(100, 20)] * scaled(100, 8)
    looped = _measured(record, "one by one", FedAvg(), sizes, "looped")
    stacked = _measured(record, "stacked", FedAvg(), sizes)
    ratio = looped / stacked
    record.goal("one by one to stacked, 100 TwoNN clients", "at least 15", ratio, ratio >= 15)


def private_clients(record: Record) -> None:
    """Rounds of 100 TwoNN clients, without privacy, with that of clients, and with that of samples (DP-SGD)."""
    sizes, method = [scaled(100, 20)] * scaled(100, 8), FedAvg(aggregation="uniform")
    plain = _measured(record, "without", method, sizes)
    for name, privacy in {
        "of clients": PrivacyConfig(clip_norm=1.0, noise_multiplier=1.0),
        "of samples": PrivacyConfig(example_clip_norm=1.0, example_noise_multiplier=1.0),
    }.items():
        stacked = _measured(record, name, method, sizes, privacy=privacy)
        record.note(f"{name} / without", stacked / plain)
    looped = _measured(record, "of samples, one by one", method, sizes, "looped", privacy=privacy)
    record.note("of samples: one by one to stacked", looped / stacked)


def ragged_clients(record: Record) -> None:
    """Rounds of clients of 3 to 200 samples, stacked by 1,000 and by 32."""
    sizes = [int(size) for size in np.random.default_rng(0).integers(3, 201, scaled(1000, 20))]
    for width in (1000, 32):
        _measured(record, f"{width} at a time", FedAvg(), sizes, width=width)


def evaluation(record: Record) -> None:
    """An evaluation of 200 clients: one model, and SuPerFed's sweep over lambda."""
    methods: dict[str, Any] = {"fedavg": FedAvg(), "superfed": SuPerFed(start=0.0)}
    for name, method in methods.items():
        toy = federation(method, [scaled(100, 10)] * scaled(200, 6), TwoNN(), _DIGITS)
        play(toy)
        record.note(name, {"s": seconds(toy.scores, 1), **profiled(toy.scores)})


def states(record: Record) -> None:
    """Rounds of Ditto, whose clients keep a model each: states that stay, are brought ahead, or come in their turn."""
    sizes = [scaled(40, 20)] * scaled(1000, 8)
    width, state = len(sizes) // 4, 4 * TwoNN().network(_DIGITS).num_parameters
    without = _measured(record, "fedavg", FedAvg(), sizes, width=width)
    for name, kept in (("come in their turn", 0), ("are brought ahead", width), ("stay", 2 * len(sizes))):
        taken = _measured(record, f"ditto, states {name}", Ditto(), sizes, width=width, states=2 * kept * state)
        # Ditto makes two local updates.
        record.note(f"seconds for states that {name}", taken - 2 * without)


CHECKS = (
    Check("device_itself", 20, "What the device takes without rayfl", device_itself),
    Check("thousand_clients", 60, "A round of 1,000 TwoNN clients", thousand_clients),
    Check("methods_of_two_models", 100, "SuPerFed, Ditto, FLOCO and FedPHP against FedAvg", methods_of_two_models),
    Check("stacked_against_looped", 30, "100 clients stacked and one by one", stacked_against_looped),
    Check("private_clients", 60, "100 clients with privacy, and without", private_clients),
    Check("ragged_clients", 25, "Clients of 3 to 200 samples", ragged_clients),
    Check("evaluation", 30, "An evaluation of 200 clients", evaluation),
    Check("states", 60, "What states of clients cost", states),
)
