"""Waiting for hosts that are Ray actors: whose time counts from when, and what is kept of answers."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import ray

from actors.hosting.running_clients import Report
from actors.processes import waiting
from actors.processes.pool import HostDiedError
from actors.processes.ray_host import RayHost
from actors.processes.waiting import collected

pytestmark = pytest.mark.usefixtures("local_ray")
DEADLINE_S = 2.5


class Slow:
    """A host at no clients, which takes its time."""

    def describe(self) -> dict[str, Any]:
        return {"node_id": ""}

    def doing(self) -> Report:
        return Report((), 0.0, ())

    def answer(self, after_s: float) -> str:
        time.sleep(after_s)
        return "here"


@pytest.fixture
def host() -> RayHost:
    """A host that has started."""
    actor: Any = ray.remote(num_cpus=1, concurrency_groups={"report": 1})(Slow)  # type: ignore[call-overload]
    found = RayHost(0, actor.remote())
    ray.get(found.started)
    return found


@pytest.mark.slow
def test_the_time_of_a_host_that_is_asked_again_counts_from_its_beginning(host: RayHost) -> None:
    handles = {host.submit("answer", 0.0): 0}
    arriving = collected([host], handles, DEADLINE_S, of_clients=True)
    assert next(arriving) == (0, "here")
    assert not handles
    time.sleep(DEADLINE_S + 0.2)  # the driver adds sums; the host has nothing to do
    handles[host.submit("answer", 1.3)] = 0
    assert list(arriving) == [(0, "here")]


@pytest.mark.slow
def test_a_host_that_says_nothing_after_it_was_asked_again_is_ended(host: RayHost) -> None:
    handles = {host.submit("answer", 0.0): 0}
    arriving = collected([host], handles, 0.5, of_clients=False)
    next(arriving)
    handles[host.submit("answer", 60.0)] = 0
    with pytest.raises(HostDiedError, match=r"no answer within clients\.deadline_s=0\.5 s"):
        next(arriving)


@pytest.mark.slow
@pytest.mark.parametrize("deadline_s", [None, 60.0])
def test_the_log_says_who_is_waited_for(
    host: RayHost, deadline_s: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "REMIND_S", 0.2)
    host.description = {"node": "node-7"}
    handles = {host.submit("answer", 1.0): 0}
    with caplog.at_level("WARNING", "rayfl"):
        assert list(collected([host], handles, deadline_s, of_clients=True)) == [(0, "here")]
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("no answer from rayfl-host-00 on node-7 for 0 s: it ")
    assert 1 <= len(said) <= 3  # after 0.2, 0.6 and 1.4 s


@pytest.mark.slow
def test_an_answer_that_was_taken_is_not_kept(host: RayHost) -> None:
    """Pieces of a sum would stay in memory otherwise while they are added."""
    handles = {host.submit("answer", 0.0): 0}
    (handle,), unrelated = handles, object()
    arriving = collected([host], handles, None, of_clients=True)
    assert next(arriving) == (0, "here")
    assert sys.getrefcount(handle) == sys.getrefcount(unrelated)
