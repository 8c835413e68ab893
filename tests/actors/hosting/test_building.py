"""How much of a machine's or a GPU's memory a host may fill, and whose samples it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.hosting import building
from actors.hosting.building import automatic_memory, build_host, data_memory_of
from algorithms.registry import Experiment
from cluster.sweep.trial import with_memory_of_trial
from rayfl.config.cluster_section import ClusterConfig
from rayfl.config.loading import load_config
from rayfl.errors import DataError
from rayfl.experiment.parts import Parts
from tests.support.experiments import small_experiment

GIB = 1 << 30
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 512 GiB with a GPU of 80 GiB, of which 64 GiB are free."""
    monkeypatch.setattr(building, "machine_memory", lambda: 512 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 * GIB, 80 * GIB))


@pytest.mark.parametrize(
    ("device", "cluster", "expected"),
    [
        (CPU, {}, 0.3 * (0.7 * 512 * GIB - 4 * GIB / 2) / 4),
        (CPU, {"data_memory": 5 * GIB}, 5 * GIB),
        (GPU, {}, 0.3 * 64 * GIB),
        (GPU, {"actors_per_gpu": 3}, 0.1 * 64 * GIB),
        (GPU, {"actors_per_gpu": "auto"}, 0.3 * 64 * GIB),
        (GPU, {"data_memory": 5 * GIB}, 5 * GIB),
    ],
)
def test_samples_are_counted_where_they_lie(device: torch.device, cluster: dict[str, Any], expected: float) -> None:
    assert data_memory_of(ClusterConfig(**cluster), device, neighbours=4) == int(expected)


@pytest.mark.parametrize("actors", [1, 8, 64, 512])
def test_what_is_filled_automatically_leaves_room_for_the_object_store_and_the_actors_themselves(actors: int) -> None:
    filled = actors * sum(automatic_memory(field, actors) for field in ("state_memory", "data_memory"))
    left = 512 * GIB * 0.7 - actors * GIB / 2
    assert filled == pytest.approx(0.7 * max(left, 0.1 * 512 * GIB))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_experiments_of_a_sweep_share_the_machine_but_have_their_gpu(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    cluster = with_memory_of_trial(ClusterConfig(backend="inline"), 4)
    assert cluster.state_memory == automatic_memory("state_memory", 4)
    assert cluster.data_memory == ("auto" if on_gpu else automatic_memory("data_memory", 4))


def test_other_samples_than_those_of_the_driver_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node may have its own copy of the files: an old one would give other results without a word."""
    for place, first in (("driver", 0), ("node", 1)):
        (tmp_path / place).mkdir()
        rows = (f"site{row % 2},{row % 5 + first},{row % 3}" for row in range(60))
        (tmp_path / place / "rows.csv").write_text("\n".join(["site,x,y", *rows]))
    source = {"name": "parquet", "path": "rows.csv", "client": "site", "x": ["x"], "y": "y"}
    content = {"dataset": source, "partition": "natural", "model": "tabular_mlp"}
    config = load_config(Experiment, small_experiment(tmp_path, "run", "fedavg") | content, {})
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "driver"))
    found = Parts(config).dataset.content_hash()
    assert found
    build_host(config, 0, "cpu", content=found)
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "node"))
    with pytest.raises(DataError, match=r"dataset parquet: node .* has other samples than the driver.*RAYFL_DATA"):
        build_host(config, 0, "cpu", content=found)
