from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import ray

from algorithms.registry import Experiment
from cluster.sweep.resources import TrialPlan, plan_trial
from cluster.sweep.run import SweepOptions, run_sweep
from rayfl.config.cluster_section import ClusterConfig
from rayfl.errors import ConfigError, ResourceError
from rayfl.sweeps.space import parse_space
from rayfl.sweeps.trials import plan_sweep
from tests.support.experiments import small_experiment


def plan(config: dict[str, object], nodes: int = 1, at_most: int | None = None, **resources: float) -> TrialPlan:
    return plan_trial(ClusterConfig.model_validate(config), resources, nodes, 20, at_most)


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
        plan({"threads_per_actor": 4}, CPU=2)
    with pytest.raises(ConfigError, match="drop one of the two"):
        plan({"clients_per_actor": 1, "num_actors": 2}, CPU=64)


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
