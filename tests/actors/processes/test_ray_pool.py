"""Pools of actors: which of them start, which are replaced, and which are given up."""

from __future__ import annotations

import logging

import pytest

from actors.processes.pool import HostDiedError
from actors.processes.ray_pool import RayPool
from rayfl.errors import ResourceError
from tests.actors.processes.fake_ray import FakeCluster, in_place_of_ray


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Two nodes with two CPUs each."""
    return in_place_of_ray(FakeCluster({"x": 2.0, "y": 2.0}), monkeypatch)


def machines(pool: RayPool) -> list[str | None]:
    return [pool.machine(host) for host in range(pool.size)]


def test_hosts_that_started_while_another_one_died_are_started_again(cluster: FakeCluster) -> None:
    pool = cluster.pool(3)
    for actor in cluster.actors[:2]:
        cluster.kill(actor)
    cluster.fates = ["dies", "lives"]
    with pytest.raises(HostDiedError):
        pool.revive()
    assert len(pool.revive()) == 2
    assert machines(pool) == ["x"] * 3
    assert len(list(cluster.living())) == 3  # nobody is left over


def test_nobody_waits_for_actors_where_the_own_node_has_died(cluster: FakeCluster) -> None:
    pool = cluster.pool(2)
    for actor in cluster.actors:
        actor.fate = "dies"
    cluster.fates = ["waits", "waits"]
    cluster.dead = ("driver",)
    began = cluster.now
    with pytest.raises(ResourceError, match=r"the raylet.* has died.*run the same command again"):
        pool.revive()
    assert cluster.now - began < 60  # of the 300 s that actors have to start


def test_actors_that_commit_for_long_are_not_ended(cluster: FakeCluster) -> None:
    pool = cluster.pool(3)
    cluster.kill(cluster.actors[0])
    for actor in cluster.actors[1:]:
        actor.silent = {"describe", "commit"}  # one thread for both
    assert pool.revive() == [2]
    assert [actor.number for actor in cluster.living()] == [1, 2, 0]


def test_actors_that_hang_are_waited_for_together(cluster: FakeCluster) -> None:
    pool, before = cluster.pool(4), cluster.now
    for actor in cluster.actors[:3]:
        actor.silent = {"describe", "abandon"}
    assert len(pool.revive()) == 3
    assert cluster.now - before == 60


def test_a_run_begins_with_the_actors_that_have_room(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """A number that is free: auto, or a range."""
    cluster.fates = ["lives", "waits", "lives", "waits"]
    pool = cluster.pool(4, begins_with=2)
    assert pool.size == 2
    assert machines(pool) == ["x"] * 2
    assert "goes on with 2 actors instead of 4" in caplog.text
    assert [actor.fate for actor in cluster.actors] == ["lives", "dies", "lives", "dies"]
    for least in (3, None):
        cluster.fates = ["lives", "waits", "lives", "waits"]
        with pytest.raises(ResourceError, match="2 of 4 actors did not start within 300 s"):
            cluster.pool(4, begins_with=least)


def test_it_grows_once_others_have_ended(cluster: FakeCluster) -> None:
    cluster.taken = {"x": 2.0, "y": 1.0}
    pool = cluster.pool(1, begins_with=1)
    cluster.taken = {"x": 2.0, "y": 2.0}
    cluster.now += 5
    assert pool.grow() == []
    cluster.taken = {"x": 0.0, "y": 1.0}
    cluster.now += 5
    pool.grow()  # starts them
    assert pool.grow() == [1, 2, 3]


def test_nodes_that_were_refused_are_tried_again_later(cluster: FakeCluster) -> None:
    pool = cluster.pool(1, begins_with=1)
    cluster.fates = ["dies", "dies", "dies", "dies"]
    cluster.now += 5
    pool.grow()
    pool.grow()
    refused = list(cluster.actors)
    cluster.now += 100
    pool.grow()
    assert cluster.actors == refused
    cluster.now += 300
    pool.grow()
    assert len(cluster.actors) > len(refused)


def test_a_node_with_another_release_is_refused_by_name(cluster: FakeCluster) -> None:
    own = cluster.description(0)["versions"]
    cluster.described = {"node": "old-node", "versions": own | {"torch": "2.1.0+cpu", "numpy": "1.0"}}
    expected = r"old-node has numpy 1\.0, the driver .*; old-node has torch 2\.1\.0\+cpu, the driver .*same environment"
    with pytest.raises(ResourceError, match=expected):
        cluster.pool(2)


def test_a_node_with_another_release_does_not_join(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    pool = cluster.pool(1)
    cluster.described = {"node": "old-node", "versions": cluster.description(0)["versions"] | {"rayfl": "0.0.9"}}
    cluster.now += 5
    pool.grow()
    assert pool.grow() == []
    assert "old-node has rayfl 0.0.9" in caplog.text
    assert pool.size == len(list(cluster.living())) == 1


def test_another_build_of_the_same_release_is_said(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    own = cluster.description(0)["versions"]
    built = own["torch"].partition("+")[0] + "+elsewhere"
    with caplog.at_level(logging.WARNING, "rayfl"):
        cluster.pool(2)
        assert not caplog.records
        cluster.described = {"versions": own | {"torch": built}}
        cluster.pool(2)
    assert [record.getMessage().count(built) for record in caplog.records] == [1]  # one line for a node
