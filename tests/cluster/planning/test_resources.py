from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actors.processes.placement import ActorOptions, Node
from cluster.planning.resources import plan_actors, wait_for_room
from cluster.sweep.resources import plan_trial
from rayfl.config.cluster_section import ClusterConfig
from rayfl.config.overrides import parse_override
from rayfl.errors import ConfigError, ResourceError


def plan(config: dict[str, object], clients: int = 20, **resources: float) -> tuple[int, float, float, str]:
    options = plan_actors(ClusterConfig.model_validate(config), resources, clients)
    return options.count, options.num_cpus, options.num_gpus, options.device


def test_as_many_actors_as_cpus_but_no_more_than_clients() -> None:
    assert plan({}, CPU=8) == (8, 1.0, 0.0, "cpu")
    assert plan({}, clients=3, CPU=8) == (3, 1.0, 0.0, "cpu")
    assert plan({"cpus_per_actor": 2}, CPU=8) == (4, 2.0, 0.0, "cpu")
    assert plan({"cpus_per_actor": 0.5}, CPU=2) == (4, 0.5, 0.0, "cpu")


def test_gpus_are_shared_in_equal_parts() -> None:
    assert plan({}, CPU=16, GPU=2) == (2, 1.0, 1.0, "cuda")
    assert plan({"actors_per_gpu": 4}, CPU=16, GPU=2) == (8, 1.0, 0.25, "cuda")
    assert plan({"actors_per_gpu": 4}, CPU=3, GPU=2) == (3, 1.0, 0.25, "cuda")
    assert plan({"device": "cpu"}, CPU=4, GPU=2) == (4, 1.0, 0.0, "cpu")


def test_one_actor_per_client_shares_the_cpus() -> None:
    count, cpus, _, _ = plan({"clients_per_actor": 1}, clients=30, CPU=2)
    assert count == 30
    assert 0 < cpus * 30 <= 2
    assert plan({"clients_per_actor": 1}, clients=3, CPU=8) == (3, 1.0, 0.0, "cpu")


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(ResourceError, match=r"9 actors with 1 CPUs.*8 CPUs and 0 GPUs, room for 8"):
        plan({"num_actors": 9}, CPU=8)
    with pytest.raises(ResourceError, match="no GPU"):
        plan({"device": "cuda"}, CPU=8)
    with pytest.raises(ResourceError, match="room for 0"):
        plan({"cpus_per_actor": 4}, CPU=2)
    with pytest.raises(ResourceError, match=r"20 actors.*room for 8"):
        plan({"clients_per_actor": 1, "actors_per_gpu": 4}, CPU=64, GPU=2)
    with pytest.raises(ConfigError, match="drop one of the two"):
        plan({"clients_per_actor": 1, "num_actors": 2}, CPU=8)


def test_nodes_are_filled_one_by_one() -> None:
    config = ClusterConfig.model_validate({"cpus_per_actor": 2, "actors_per_gpu": 6})
    nodes = [Node("a", 3, 0), Node("b", 3, 0)]
    assert plan_actors(config, {"CPU": 6}, 20, nodes).count == 2
    mixed = [Node("a", 32, 0), Node("b", 4, 2)]
    options = plan_actors(config, {"CPU": 36, "GPU": 2}, 20, mixed)
    assert (options.count, options.num_gpus, options.per_gpu) == (2, 0.1666, 6)


def test_how_far_a_run_may_shrink_and_grow() -> None:
    def bounds(**config: object) -> tuple[int, int]:
        options = plan_actors(ClusterConfig.model_validate(config), {"CPU": 8}, 20)
        return options.at_least, options.at_most

    assert bounds() == (1, 20)
    assert bounds(num_actors=3) == (1, 3)
    assert bounds(clients_per_actor=1) == (20, 20)


def grow(*sizes: float) -> tuple[list[float], Callable[[], dict[str, float]]]:
    """A cluster with another number of CPUs at each question, the last number from then on."""
    asked: list[float] = []

    def resources() -> dict[str, float]:
        asked.append(sizes[min(len(asked), len(sizes) - 1)])
        return {"CPU": asked[-1]}

    return asked, resources


def waited(config: ClusterConfig, resources: Callable[[], dict[str, float]], slept: list[float]) -> ActorOptions:
    return wait_for_room(config, lambda wanted: plan_actors(wanted, resources(), 20), slept.append)


def test_a_cluster_that_grows_is_waited_for() -> None:
    config = ClusterConfig.model_validate({"num_actors": 4, "resources_timeout_s": 60})
    asked, resources = grow(0, 2, 2, 8)
    slept: list[float] = []
    options = waited(config, resources, slept)
    assert (options.count, options.nodes_timeout_s) == (4, 60)
    assert asked == [0, 2, 2, 8]
    assert sum(slept) <= 60


def test_one_that_does_not_grow_is_given_up_with_what_is_missing() -> None:
    config = ClusterConfig.model_validate({"num_actors": 4, "resources_timeout_s": 6})
    slept: list[float] = []
    with pytest.raises(ResourceError, match=r"4 actors with 1 CPUs.*2 CPUs.*waited 6 s: cluster.resources_timeout_s"):
        waited(config, grow(2)[1], slept)
    assert sum(slept) == 6
    with pytest.raises(ResourceError, match="room for 2"):
        waited(ClusterConfig(num_actors=4), grow(2)[1], slept)
    assert sum(slept) == 6


def test_actors_share_gpus_once_more_of_them_were_waited_for() -> None:
    def found(*gpus: float, **cluster: Any) -> tuple[int, int, float]:
        left, slept = list(gpus), list[float]()

        def resources() -> dict[str, float]:
            return {"CPU": 16.0, "GPU": left.pop(0) if len(left) > 1 else left[0]}

        config = ClusterConfig.model_validate({"resources_timeout_s": 6, **cluster})
        options = waited(config, resources, slept)
        return options.count, options.per_gpu, sum(slept)

    assert found(1, 2, 4, num_actors=4) == (4, 1, 4)
    assert found(2, num_actors=4) == (4, 2, 6)
    assert found(2, num_actors="4:8") == (4, 2, 6)
    assert found(2, num_actors=4, resources_timeout_s=0) == (4, 2, 0)
    assert found(2, num_actors=4, actors_per_gpu=2) == (4, 2, 0)
    assert found(2, clients_per_actor=1, cpus_per_actor=0.5) == (20, 10, 0)
    assert found(2) == (2, 1, 0)


def test_contradictions_are_not_waited_for() -> None:
    config = ClusterConfig.model_validate({"clients_per_actor": 1, "num_actors": 2, "resources_timeout_s": 60})
    with pytest.raises(ConfigError, match="drop one of the two"):
        waited(config, grow(8)[1], [])


def test_a_range_of_actors_is_what_there_is_room_for_between_its_ends() -> None:
    def options(actors: str, cpus: float, clients: int = 20) -> tuple[int, int, int]:
        found = plan_actors(ClusterConfig.model_validate({"num_actors": actors}), {"CPU": cpus}, clients)
        return found.count, found.at_least, found.at_most

    assert options("2:16", 8) == (8, 2, 16)
    assert options("2:16", 64) == (16, 2, 16)
    assert options("2:16", 64, clients=5) == (5, 2, 5)
    assert options("4:16", 64, clients=3) == (4, 4, 4)
    with pytest.raises(ResourceError, match=r"2 actors with 1 CPUs .* the cluster has 1 CPUs"):
        options("2:16", 1)
    with pytest.raises(ConfigError, match="drop one of the two"):
        plan({"clients_per_actor": 1, "num_actors": "2:16"}, CPU=64)
    with pytest.raises(ValueError, match="the first number is the least"):
        ClusterConfig.model_validate({"num_actors": "16:2"})


def test_a_range_in_a_sweep_is_its_least() -> None:
    config = ClusterConfig.model_validate({"num_actors": "2:16"})
    found = plan_trial(config, [Node("a", 8, 0)], 20, None)
    assert (len(found.bundles), found.at_once, found.cluster.num_actors) == (3, 4, 2)


def test_what_does_not_fit_names_the_nodes_that_were_meant() -> None:
    labels = {"label_selector": {"ray.io/accelerator-type": "H100"}}
    with pytest.raises(
        ResourceError, match=r"the nodes with cluster\.label_selector=\{ray\.io/accelerator-type: H100\}"
    ):
        plan({**labels, "num_actors": 3}, CPU=2)
    with pytest.raises(ResourceError, match=r"no node with cluster\.label_selector=.* has a GPU"):
        plan({**labels, "device": "cuda"}, CPU=2)
    text = "cluster.label_selector={ray.io/accelerator-type: 'in(H100, H200)', zone: '!far'}"
    _, written = parse_override(text)
    found = ClusterConfig.model_validate({"label_selector": written}).label_selector
    assert found == {"ray.io/accelerator-type": "in(H100,H200)", "zone": "!far"}
    for unquoted in ({"kind": "in(H100", "H200)": None}, {"a/b/c": "x"}):
        with pytest.raises(ValueError, match="label_selector"):
            ClusterConfig.model_validate({"label_selector": unquoted})
    for wrong in ("", "a b", "in(", "in()", "!!a"):
        with pytest.raises(ValueError, match="label_selector"):
            ClusterConfig.model_validate({"label_selector": {"kind": wrong}})
