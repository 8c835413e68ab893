"""What an optimizer keeps is part of what a client is measured to take, and of what its state weighs."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from actors.hosting.building import build_host
from actors.probing.measure import measure
from actors.probing.memory import ProcessMemory
from actors.probing.probe_calls import probe_calls
from algorithms.fedavg import FedAvg
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.engine.updates.settings import TrainConfig
from rayfl.experiment.parts import Parts
from rayfl.params import num_bytes
from tests.support.experiments import small_experiment
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, random_clients

OPTIMIZERS: list[tuple[dict[str, Any], int]] = [
    ({"momentum": 0.0}, 0),
    ({"momentum": 0.5}, 1),
    ({"momentum": 0.0, "optimizer": "adam"}, 2),
    ({"momentum": 0.0, "optimizer": "adamw"}, 2),
]
MEASURED = [OPTIMIZERS[0], OPTIMIZERS[0], OPTIMIZERS[2]]
"""The first is measured for nothing: what a process does once would count."""


def measured(folder: Path) -> tuple[list[int], int]:
    """Returns the bytes that a client is measured to take with each optimizer, and those of the model."""
    taken, sizes = [], set()
    for train, _ in MEASURED:
        content = small_experiment(folder, "run", "fedavg")
        content |= {"engine": {"mode": "looped"}, "model": {"name": "two_nn", "hidden": [1400, 1400]}}
        content["train"] = {**content["train"], **train}
        config = load_config(Experiment, content, {})
        parts = Parts(config)
        found = measure(
            build_host(config, 0, "cpu"), config.engine, probe_calls(parts, parts.check()), ProcessMemory(), ""
        )
        taken.append(found.client_bytes)
        sizes.add(num_bytes(parts.initial_server()["model"]))
    (model,) = sizes
    return taken, model


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory need /proc")
def test_a_probe_counts_the_slots_of_the_optimizer(tmp_path: Path) -> None:
    """Of a model of 8 MB, within half of that; in a process of its own, since peaks are those of a whole process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        taken, model = process.submit(measured, tmp_path).result()
    _, plain, with_slots = taken
    assert abs(with_slots - plain - OPTIMIZERS[2][1] * model) < model / 2, (taken, model)


@pytest.mark.parametrize(("train", "slots"), OPTIMIZERS[1:])
def test_a_state_weighs_as_much_as_the_optimizer_keeps(train: dict[str, Any], slots: int) -> None:
    section = TrainConfig(rounds=1, local_epochs=1, persist_optimizer=True, **train)
    toy = Toy(FedAvg(), random_clients([8]), two_layers(), section)
    toy.step([0])
    assert num_bytes(toy.states()[0]["optimizer"]) - slots * num_bytes(toy.server["model"]) in (0, 8)
