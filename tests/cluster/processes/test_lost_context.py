"""An actor whose device is lost is replaced, and the run ends with the bits of an undisturbed one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import rayfl
from rayfl.diagnosis.host_memory import MemoryKills
from rayfl.errors import RunError
from tests.cluster.rounds.test_client_policy import SKIP, cohorts
from tests.support.experiments import assert_same, outcome, small_experiment

pytestmark = pytest.mark.usefixtures("local_ray")


class Watching(rayfl.Callback):
    """Notes why actors were replaced."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        self.reasons.append(reason)


@pytest.mark.parametrize("policy", [SKIP, {}], ids=["skip", "fail"])
@pytest.mark.slow
def test_a_lost_device_ends_its_actor_and_no_client_is_left_out(
    policy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = small_experiment(tmp_path, "calm", "scaffold", backend="inline")
    rayfl.run(calm)
    bad = cohorts(calm)[2][1]
    losing = {"name": "tests.support.faulty:Faulty", "failing": [[2, bad]], "how": "lose"}
    config = small_experiment(tmp_path, "lost", "scaffold", num_actors=2) | {"clients": policy}
    watching = Watching()
    result = rayfl.run(config | {"algorithm": losing | {"marker": str(tmp_path / "once")}}, callbacks=[watching])
    (reason,) = watching.reasons
    assert "can no longer compute on cpu: CUDA error: an illegal memory access was encountered" in reason
    assert "it had local_update of client" in reason  # of one or two: the actor may have answered for the other
    assert reason.count("can no longer compute") == 1
    assert not result.skipped.num_rows
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "lost"))
    # A kernel that has ended a process since: it may have been this one.
    counts = itertools.count()
    monkeypatch.setattr(MemoryKills, "_now", lambda self: next(counts))
    with pytest.raises(RunError, match=r"gave up after 1 .* can no longer compute on cpu.* for lack of memory"):
        rayfl.run(config | {"name": "always", "algorithm": losing, "max_failures": 0})
