"""Part b: workloads that others have published, with made-up samples of the same shape, in seconds a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from algorithms.base import Algorithm
from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from algorithms.fedrep import FedRep
from algorithms.pfedme import PFedMe
from checks.bench import REHEARSAL, federation, peak_bytes, play, seconds
from checks.running import Check, Record
from rayfl.examples import InputSpec
from rayfl.models.architecture import Architecture
from rayfl.models.zoo import CharLSTM, ReddiCNN, ResNet18, TwoCNN, TwoNN

_DIGITS, _CIFAR = InputSpec("image", (1, 28, 28), 10), InputSpec("image", (3, 32, 32), 10)


@dataclass(frozen=True)
class Workload:
    """A federated training task.

    Attributes:
        title: what it is, and where it was published.
        architecture: the network.
        spec: of the inputs.
        clients: how many take part in a round.
        samples: training samples of each.
        methods: what trains it, by name.
        train: of the training section.
        cut: samples are divided by it, and measured seconds multiplied, which makes an estimate of them.
    """

    title: str
    architecture: Architecture
    spec: InputSpec
    clients: int
    samples: int
    train: dict[str, Any]
    methods: dict[str, Algorithm]
    cut: int = 1


_MOMENTUM = {"lr": 0.01, "momentum": 0.9}
_AVERAGE: dict[str, Algorithm] = {"fedavg": FedAvg()}
WORKLOADS = {
    "W1": Workload("10 TwoNN clients of 400", TwoNN(), _DIGITS, 10, 400, _MOMENTUM, _AVERAGE),
    "W2": Workload("10 TwoCNN clients of 100", TwoCNN(), _CIFAR, 10, 100, _MOMENTUM, _AVERAGE),
    "W3": Workload(
        "100 TwoNN clients of 50, Ditto", TwoNN(), _DIGITS, 100, 50, _MOMENTUM, {"ditto": Ditto()},
    ),
    "W4": Workload(
        "5 LSTM clients of 100", CharLSTM(), InputSpec("tokens", (80,), 80, vocabulary=80), 5, 100,
        {**_MOMENTUM, "batch_size": 50}, _AVERAGE,
    ),
    "P1": Workload(
        "pfl-research's CIFAR-10 IID: 50 of 1,000 clients of 50, E = 1, B = 10, lr 0.1, 1,626,442 parameters",
        ReddiCNN(layers=2), _CIFAR, 50, 50, {"lr": 0.1}, _AVERAGE,
    ),
    "B1": Workload(
        "BlazeFL's CIFAR-10: 100 clients of 500, all take part, E = 5, B = 50, lr 0.1", TwoCNN(), _CIFAR, 100, 500,
        {"lr": 0.1, "local_epochs": 5, "batch_size": 50}, _AVERAGE, 5,
    ),
    "L1": Workload(
        "PFLlib's TinyImageNet: 20 clients of 5,000, all take part, ResNet-18, E = 1, B = 10",
        ResNet18(), InputSpec("image", (3, 64, 64), 200), 20, 5000, {"lr": 0.005},
        {"fedavg": FedAvg(), "fedrep": FedRep(), "ditto": Ditto(), "pfedme": PFedMe()}, 100,
    ),
}  # fmt: skip


def _of(name: str) -> Callable[[Record], None]:
    def measure(record: Record) -> None:
        work = WORKLOADS[name]
        clients, samples, cut = work.clients, work.samples, work.cut
        if REHEARSAL:
            clients, samples, cut = 2, 10, 1
        record.note("workload", f"{work.title}; the samples are made up")
        for method, algorithm in work.methods.items():
            sizes = [samples // cut] * clients
            toy = federation(algorithm, sizes, work.architecture, work.spec, **work.train)
            engine = toy.client_hosts[0].engine
            taken = seconds(lambda toy=toy: play(toy), 1)  # type: ignore[misc]
            found = {
                "clients": "stacked" if engine.vectorized else f"one by one: {engine.note}",
                f"s a round{' (estimated)' if cut > 1 else ''}": taken * cut,
                "peak bytes": peak_bytes(lambda toy=toy: play(toy)),  # type: ignore[misc]
            }
            if cut > 1:
                found["measured with"] = f"{samples // cut} samples a client, in {taken:.4g} s"
            record.note(method, found)

    return measure


CHECKS = tuple(
    Check(f"workload_{name}", limit, WORKLOADS[name].title, _of(name))
    for name, limit in (("W1", 12), ("W2", 12), ("W3", 14), ("W4", 12), ("P1", 14), ("B1", 20), ("L1", 40))
)
