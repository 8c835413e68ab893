"""What a stack is planned to take of a device's memory, and what it takes of a pretended one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.hosting.job import Job
from actors.probing.measure import measure
from actors.probing.memory import Room
from actors.probing.probe_calls import ProbeCall
from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from algorithms.superfed import SuPerFed
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import InputSpec
from rayfl.models.architecture import Architecture
from rayfl.models.zoo import TFCNN, CharLSTM, TwoNN
from rayfl.params import to_numpy
from rayfl.tasks.classification import Classification
from tests.support.elsewhere import PRETENDED, context, elsewhere
from tests.support.problems import examples
from tests.support.toys import ListDataset, Toy

CLIENTS = 40
IMAGE, TEXT = InputSpec("image", (1, 28, 28), 10), InputSpec("tokens", (12,), 20, vocabulary=20)
WORKS: dict[str, tuple[Any, Architecture, InputSpec, int, dict[str, Any]]] = {
    "fedavg": (FedAvg, TwoNN(hidden=(50,)), IMAGE, 40, {"momentum": 0.9}),
    "fedavg, many steps": (FedAvg, TwoNN(hidden=(5,)), IMAGE, 60, {"local_epochs": 30}),
    "fedavg, adam": (FedAvg, TwoNN(hidden=(50,)), IMAGE, 40, {"optimizer": "adam"}),
    "superfed": (lambda: SuPerFed(start=0.0), TwoNN(hidden=(50,)), IMAGE, 40, {}),
    "superfed, many samples": (lambda: SuPerFed(start=0.0), TwoNN(hidden=(5,)), IMAGE, 200, {}),
    "ditto": (Ditto, TwoNN(hidden=(50,)), IMAGE, 40, {}),
    "convolutions": (FedAvg, TFCNN(), InputSpec("image", (3, 12, 12), 5), 20, {}),
    "lstm": (FedAvg, CharLSTM(hidden=16), TEXT, 20, {}),
}


class Meter:
    """The memory of the pretended device."""

    def mark(self) -> None:
        self._before = context().most = context().live

    def peak(self) -> int:
        return context().most - self._before

    def room(self) -> Room:
        return Room(0, 1 << 30, 1 << 30)


def toy(name: str, device: torch.device) -> Toy:
    """One host with all clients in one stack."""
    method, architecture, spec, size, train = WORKS[name]
    data = [examples(size, spec, client) for client in range(CLIENTS)]
    dataset = ListDataset([(one.x, one.y) for one in data], spec.num_classes)
    dataset.spec = spec
    task = Classification(architecture.network(spec))
    section = {"rounds": 9, "clients_per_round": "all", "local_epochs": 1, "batch_size": 10, "lr": 0.01, **train}
    made = Toy(method(), dataset, task, TrainConfig(**section), device=device)
    made.client_hosts[0].engine = Engine(task, device, EngineConfig(mode="vectorized", width=CLIENTS))
    return made


def play(own: Toy) -> None:
    """A round in which all clients take part, and nobody is scored."""
    own.federation.begin_round(own.round, ())
    own.server = {**own.server, **own.algorithm.round(own.server, list(range(CLIENTS)), own.federation)}
    own.round += 1


@PRETENDED
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "superfed" else pytest.mark.slow) for name in WORKS],
)
def test_a_stack_takes_what_was_planned_within_a_tenth(name: str) -> None:
    found = []
    for splits in ((), ("test",)):
        with elsewhere() as device:
            own = toy(name, device)
            model = next(iter(own.server))
            job = Job("local_update", "mean", 0, tuple(range(12)), splits=splits)
            call = ProbeCall(job, to_numpy({model: own.server[model]}))
            config = EngineConfig(mode="vectorized", width=CLIENTS)
            found.append(measure(own.client_hosts[0], config, [call], Meter(), "this device"))
    with elsewhere() as device:
        own, meter = toy(name, device), Meter()
        play(own)  # samples stay from here on: they are planned for apart
        meter.mark()
        play(own)
        taken = meter.peak()
    plain, scored = found
    assert plain.base_bytes + CLIENTS * plain.client_bytes == pytest.approx(taken, rel=0.1)
    # A sweep of scores is made in pieces: it takes no more of the device for each further client.
    assert scored.client_bytes == pytest.approx(plain.client_bytes, rel=0.01)
