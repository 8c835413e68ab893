"""Two hosts with a network between them, which fails: each is a network namespace of this machine."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import rayfl
from tests.support.experiments import assert_same, outcome, small_experiment
from tests.support.many_nodes_running import Running, long_rounds
from tests.support.namespaces_hosts import Host, NoNamespacesError, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = {
    # A node that is cut off is given up after (timeout + period) x threshold: by default more than a minute.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
    # On a busy machine a node's processes take longer to start than Ray waits for them.
    "RAY_agent_register_timeout_ms": "120000",
    # Without it, a token of this user's would be asked for by the head, and not given by the worker.
    "RAY_AUTH_MODE": "token",
}
PORT = 6379
LOCAL_EPOCHS = 600
"""Rounds of seconds: a cable pulled a moment after one has begun is missed in it."""


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Host, Host]]:
    """A head and a worker of one Ray, one CPU each."""
    for name, value in {**SETTINGS, "RAY_AUTH_TOKEN": secrets.token_hex(32)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    try:
        with two_hosts() as (head, worker):
            head.start_ray("--head", f"--port={PORT}", "--num-cpus=1", "--include-dashboard=false")
            worker.start_ray(f"--address={head.address}:{PORT}", "--num-cpus=1")
            yield head, worker
    except NoNamespacesError as error:
        pytest.skip(f"no network namespaces here: {error}")


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_worker_that_is_cut_off_in_the_midst_of_a_round(
    comes_back: bool, hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    head, worker = hosts
    rayfl.run(long_rounds(small_experiment(tmp_path, "calm", "scaffold", backend="inline"), LOCAL_EPOCHS))
    config = long_rounds(small_experiment(tmp_path, "cut", "scaffold"), LOCAL_EPOCHS)
    running = Running(tmp_path, f"{head.address}:{PORT}", config, within=head.within)
    try:
        assert len({host["node_id"] for host in running.wait_for("after-0")}) == 2
        running.wait_for("after-1")
        running.go(1)
        time.sleep(0.2)
        worker.set_link("down")
        assert not running.has_said("after-2")
        assert "died" in running.wait_for("failure")
        assert worker.pids(), "it should live on, unseen"
        if comes_back:
            worker.set_link("up")
        running.finish()
    finally:
        running.end()
    assert "goes on with 1 actors instead of 2" in running.log.read_text()
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "cut"))
