"""Made-up samples for which a machine's memory does not suffice: each process of it makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rayfl
from rayfl.data.sources.made_up.synthetic import SyntheticSource
from rayfl.errors import ResourceError

SOURCE = SyntheticSource(num_clients=20, dimension=40)


def experiment(folder: Path) -> dict[str, Any]:
    return {
        "dataset": SOURCE.model_dump(),
        "partition": "natural",
        "model": "two_nn",
        "algorithm": "fedavg",
        "train": {"rounds": 1, "clients_per_round": 2},
        "storage_path": str(folder),
        "cluster": {"backend": "inline"},
    }


def test_driver_and_host_of_one_process_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayfl.data.sources.made_up.making.machine_memory", lambda: 2 * SOURCE.least_bytes - 1)
    with pytest.raises(ResourceError, match="2 times"):
        rayfl.run(experiment(tmp_path))


def test_what_may_not_fit_while_it_is_made_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rayfl.data.sources.made_up.making.machine_memory", lambda: 3 * SOURCE.least_bytes)
    rayfl.run(experiment(tmp_path))
    assert any("dataset=synthetic may need" in line and "num_actors" not in line for line in caplog.messages)


def test_actors_are_counted_and_named() -> None:
    memory = 3 * SOURCE.least_bytes
    SOURCE.check_room(3, memory)
    assert SOURCE.room_warning(3, 2 * memory) is None
    with pytest.raises(ResourceError, match=r"lower cluster\.num_actors"):
        SOURCE.check_room(4, memory)
