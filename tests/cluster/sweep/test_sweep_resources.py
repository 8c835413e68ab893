from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import ray
import ray.tune
from ray.util.placement_group import validate_placement_group

from actors.processes.placement import Node
from algorithms.registry import Experiment
from cluster.sweep.resources import TrialPlan, plan_trial
from cluster.sweep.run import SweepOptions, _placement, run_sweep
from rayfl.config.cluster_section import ClusterConfig
from rayfl.errors import ConfigError, ResourceError
from rayfl.sweeps.space import parse_space
from rayfl.sweeps.trials import plan_sweep
from tests.support.experiments import small_experiment


def plan(config: dict[str, object], nodes: int = 1, at_most: int | None = None, **resources: float) -> TrialPlan:
    """The plan of experiments on equal nodes, which have these resources together."""
    each = [resources.get(name, 0.0) / nodes for name in ("CPU", "GPU")]
    return plan_on(config, *[Node(str(number), *each) for number in range(nodes)], at_most=at_most)


def plan_on(config: dict[str, object], *nodes: Node, at_most: int | None = None) -> TrialPlan:
    return plan_trial(ClusterConfig.model_validate(config), nodes, 20, at_most)


def test_an_experiment_is_one_process_unless_actors_are_asked_for() -> None:
    found = plan({}, CPU=8)
    assert found.bundles == ({"CPU": 1.0},)
    assert (found.at_once, found.neighbours, found.cluster.backend) == (8, 8, "inline")
    assert plan({"threads_per_actor": 4}, CPU=8).at_once == 2
    assert plan({"cpus_per_actor": 0.5}, CPU=2).bundles == ({"CPU": 0.5},)


def test_gpus_are_shared_by_experiments() -> None:
    found = plan({"actors_per_gpu": 4}, CPU=64, GPU=2)
    assert found.bundles == ({"CPU": 1.0, "GPU": 0.25},)
    assert found.at_once == 8
    assert plan({"device": "cpu"}, CPU=4, GPU=2).bundles == ({"CPU": 1.0},)
    automatic = plan({"actors_per_gpu": "auto"}, CPU=64, GPU=2)
    assert (automatic.bundles, automatic.cluster.actors_per_gpu) == (({"CPU": 1.0, "GPU": 1.0},), 1)
    actors = plan({"actors_per_gpu": "auto", "num_actors": 5}, CPU=64, GPU=2)
    assert (actors.bundles[1:], actors.cluster.actors_per_gpu) == (({"CPU": 1.0, "GPU": 0.3333},) * 5, 3)


def test_actors_of_one_experiment_are_one_placement_group() -> None:
    found = plan({"num_actors": 3}, CPU=8)
    assert found.bundles == ({"CPU": 0.0}, {"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 1.0})
    assert (found.at_once, found.cluster.backend) == (2, "ray")
    assert len(plan({"clients_per_actor": 1}, CPU=2).bundles) == 21


def test_a_limit_and_several_machines() -> None:
    assert plan({}, at_most=3, CPU=8).at_once == 3
    found = plan({}, nodes=4, CPU=8)
    assert (found.at_once, found.neighbours) == (8, 2)


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(ResourceError, match=r"9 actors.*8 CPUs.*room for 8"):
        plan({"num_actors": 9}, CPU=8)
    with pytest.raises(ResourceError, match="room for 0"):
        plan({"actors_per_gpu": 2, "device": "cuda"}, CPU=0, GPU=2)
    with pytest.raises(ConfigError, match="drop one of the two"):
        plan({"clients_per_actor": 1, "num_actors": 2}, CPU=64)


@pytest.mark.parametrize(
    ("option", "further"),
    [
        ("threads_per_actor", {}),
        ("cpus_per_actor", {}),
        ("cpus_per_actor", {"num_actors": 1}),
        ("cpus_per_actor", {"num_actors": "1:4"}),
    ],
)
def test_a_process_that_no_node_has_the_cpus_for_is_refused_by_name(option: str, further: dict[str, object]) -> None:
    with pytest.raises(ResourceError, match=rf"cluster\.{option}=3: .*none has more than 2 CPUs"):
        plan({option: 3, **further}, nodes=2, CPU=4)
    with pytest.raises(ResourceError, match=r"none with cluster\.label_selector has"):
        plan({option: 3, "label_selector": {"kind": "small"}, **further}, nodes=2, CPU=4)


def test_experiments_at_a_time_are_counted_by_node() -> None:
    """No process is spread over nodes; the actors of an experiment are."""
    head, small, large = Node("head", 0, 0), Node("small", 3, 0), Node("large", 8, 0)
    found = plan_on({"threads_per_actor": 2}, head, small, large)
    assert (found.at_once, found.neighbours) == (5, 4)
    assert plan_on({"threads_per_actor": 2}, head, small, large, at_most=2).neighbours == 2
    assert plan_on({"num_actors": 2, "cpus_per_actor": 2}, small, small, large).at_once == 3
    with pytest.raises(ResourceError, match=r"2 actors with 2 CPUs .* room for 1"):
        plan_on({"num_actors": 2, "cpus_per_actor": 2}, small, Node("tiny", 1, 0))
    gpus = Node("cpus", 8, 0), Node("gpus", 2, 4)
    assert plan_on({"actors_per_gpu": 2}, *gpus).at_once == 2
    assert plan_on({"cpus_per_actor": 0}, small, large).at_once == 2


@pytest.mark.parametrize(
    "config", [{}, {"num_actors": 3}, {"cpus_per_actor": 0}, {"num_actors": 2, "cpus_per_actor": 0}]
)
def test_ray_accepts_the_placement_group_of_an_experiment(config: dict[str, object]) -> None:
    for labels in ({}, {"kind": "large"}):
        found = plan({**config, "label_selector": labels}, CPU=8)
        request = _placement(ray.tune, found)
        options = request._bound
        validate_placement_group(*options.args, **options.kwargs)  # raises for what Ray refuses
        assert len(options.kwargs.get("bundle_label_selector", [])) == bool(labels) * len(request.bundles)


def test_nodes_that_join_later_have_neighbours_of_their_own_number() -> None:
    found = plan({"threads_per_actor": 2}, CPU=4)
    assert (found.neighbours, found.reserves) == (2, True)
    assert [found.neighbours_on(Node("x", cpus, 0), None) for cpus in (2, 4, 16)] == [2, 2, 8]
    assert found.neighbours_on(Node("x", 16, 0), 3) == 3
    nothing = plan({"cpus_per_actor": 0}, CPU=4)
    assert (nothing.neighbours_on(Node("x", 16, 0), None), nothing.reserves) == (nothing.neighbours, False)


@pytest.mark.parametrize(
    ("tune", "problem"),
    [(None, "need more of Ray than rayfl does"), (ModuleType("ray.tune"), f"need a newer Ray than {ray.__version__}")],
    ids=["missing", "old"],
)
def test_a_ray_without_such_a_tune_is_said_before_anything_is_written(
    tune: ModuleType | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray.tune", tune)  # type: ignore[arg-type]
    content = small_experiment(tmp_path, "sweep", "fedavg")
    planned = plan_sweep(Experiment, content, parse_space(["seed=0:2"]), None, 0)
    with pytest.raises(ResourceError, match=problem + r": pip install 'rayfl\[sweep\]'"):
        run_sweep(planned, SweepOptions(), print)
    assert not list(tmp_path.iterdir())
