"""A run on a cluster that grows asks for its nodes, and waits for them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster.jobs.scaling import growing_options
from cluster.planning.autoscaling import Bundle, demand
from rayfl.cli.entry import app
from rayfl.config.cluster_section import ClusterConfig

WAITS = {"cluster.resources_timeout_s": "1800"}
CUDA = {"cluster.device": "cuda"}


def nodes_for(bundles: list[Bundle], cpus: int, gpus: int) -> int:
    """Returns the number of equal nodes on which an autoscaler that packs in order would place bundles."""
    nodes: list[dict[str, float]] = []
    for bundle in bundles:
        for node in nodes:
            if all(node[name] >= amount for name, amount in bundle.items()):
                break
        else:
            nodes.append(node := {"CPU": cpus, "GPU": gpus})
        for name, amount in bundle.items():
            node[name] -= amount
            assert node[name] >= 0, "no node has so much"
    return len(nodes)


@pytest.mark.parametrize(
    ("section", "gpus", "expected"),
    [
        ({}, 0, {"cluster.num_actors": "32"}),
        ({"cpus_per_actor": 3}, 0, {"cluster.num_actors": "8"}),
        ({}, 2, CUDA | {"cluster.num_actors": "8"}),
        ({"device": "cuda"}, 2, {"cluster.num_actors": "8"}),
        ({"device": "cpu"}, 2, {"cluster.num_actors": "32"}),
        ({"actors_per_gpu": 4}, 2, CUDA | {"cluster.num_actors": "32"}),
        ({"actors_per_gpu": 1}, 2, CUDA | {"cluster.num_actors": "8"}),
        ({"actors_per_gpu": 3}, 4, CUDA | {"cluster.num_actors": "24"}),
    ],
)
def test_as_many_actors_are_asked_for_as_all_nodes_have_room_for(
    section: dict[str, Any], gpus: int, expected: dict[str, str]
) -> None:
    """The demand of such a run, on a cluster that has no nodes yet, is all of them."""
    options = growing_options(ClusterConfig.model_validate(section), None, 4, 8, gpus)
    assert options == WAITS | expected
    given = {key.removeprefix("cluster."): value for key, value in options.items()}
    run = ClusterConfig.model_validate(section | given | {"num_actors": int(given["num_actors"])})
    assert nodes_for(demand(run, {}, 100), 8, gpus) == 4


def test_there_are_no_more_actors_than_clients() -> None:
    assert growing_options(ClusterConfig(), 20, 4, 8, 0) == WAITS | {"cluster.num_actors": "20"}


@pytest.mark.parametrize(
    ("section", "gpus", "expected"),
    [
        ({"num_actors": 3}, 0, WAITS),
        ({"num_actors": "2:16"}, 0, WAITS),
        ({"clients_per_actor": 1}, 0, WAITS),
        ({"cpus_per_actor": 0}, 0, WAITS),
        ({"cpus_per_actor": 9}, 0, WAITS),
        ({"num_actors": 3, "resources_timeout_s": 60}, 0, {}),
    ],
)
def test_what_the_configuration_says_itself_is_left(
    section: dict[str, Any], gpus: int, expected: dict[str, str]
) -> None:
    assert growing_options(ClusterConfig.model_validate(section), None, 4, 8, gpus) == expected


def entrypoint(*words: str) -> str:
    done = CliRunner().invoke(app, ["cluster", "template", "kuberay", *words], catch_exceptions=False)
    found: str = yaml.safe_load(done.stdout)["spec"]["entrypoint"]
    return found


def test_a_file_with_fewer_nodes_at_first_starts_a_run_that_waits_for_more() -> None:
    grows = ["--nodes", "2", "--min-nodes", "0"]
    added = "cluster.resources_timeout_s=1800 cluster.num_actors=16"
    assert entrypoint(*grows) == f"rayfl run quickstart name=rayfl storage_path=/shared/runs {added}"
    assert entrypoint("quickstart", *grows, "--cpus-per-node", "16").endswith(" cluster.num_actors=20")  # its clients
    assert entrypoint("quickstart", "cluster.num_actors=auto", *grows).endswith(" cluster.resources_timeout_s=1800")
    given = "cluster.resources_timeout_s=60"
    assert entrypoint("quickstart", given, "cluster.num_actors=9", *grows).count("cluster.") == 2
    for fixed in (["--nodes", "2"], ["--nodes", "2", "--min-nodes", "2"]):
        assert "cluster." not in entrypoint("quickstart", *fixed)


def test_the_file_of_a_cluster_that_stays_says_how_a_run_makes_it_grow() -> None:
    grows = ["kuberay-cluster", "--nodes", "2", "--min-nodes", "1", "--gpus-per-node", "4"]
    text = CliRunner().invoke(app, ["cluster", "template", *grows], catch_exceptions=False).stdout
    assert "cluster.resources_timeout_s=1800 cluster.device=cuda cluster.num_actors=8 --address" in text
    assert "cluster.num_actors=" not in CliRunner().invoke(app, ["cluster", "template", grows[0]]).stdout
