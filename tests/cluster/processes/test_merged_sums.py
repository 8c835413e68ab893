"""Actors of one machine merge their sums before the driver reads them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import rayfl
from actors.processes.ray_host import RayHost
from tests.support import merging_run
from tests.support.experiments import assert_same, outcome, small_experiment, with_large_model

pytestmark = pytest.mark.usefixtures("local_ray")


def counted(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What the driver of a run receives."""
    merging_run.received.clear()
    monkeypatch.setattr(RayHost, "submit_apart", merging_run.submit_apart)
    monkeypatch.setattr(RayHost, "result", merging_run.result)
    rayfl.run(config)
    monkeypatch.undo()
    return Counter(merging_run.received)


@pytest.mark.slow
def test_actors_of_one_machine_send_one_sum(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = with_large_model(small_experiment(tmp_path, "merged", "fedavg", num_actors=3, shared_memory=0))
    rayfl.run(config | {"name": "calm", "cluster": {"backend": "inline"}})
    # Of three sums two are merged, and then the third.
    assert counted(config, monkeypatch) == {"run_apart": 3 * 2, "merged": 2 * 2, "sums": 2}
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "merged"))
    # What finds room in shared memory is read there: nobody merges it before.
    near = config | {"name": "near", "cluster": {"num_actors": 3}}
    assert counted(near, monkeypatch) == {"run_apart": 3 * 2, "sums": 3 * 2}
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "near"))
