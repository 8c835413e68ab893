"""Reserves resources for each experiment of a sweep, and counts how many fit at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actors.processes.placement import PARTS, ActorOptions, Node, resources_of, room
from cluster.planning.resources import asks_for, plan_actors
from rayfl.config.cluster_section import ClusterConfig
from rayfl.errors import ResourceError

_NEXT_TO_NOTHING = {"CPU": 1 / PARTS}
"""What a process reserves that is to reserve nothing: Ray Tune knows no empty placement group."""


@dataclass(frozen=True)
class TrialPlan:
    """The resources of one experiment.

    Attributes:
        bundles: bundles of its placement group: one for the experiment's own process, then one for each actor.
        at_once: number of experiments that fit into the cluster at a time.
        neighbours: number of experiments that share a machine of now, at most.
        cluster: cluster section that the experiment runs with.
        actors: number of its actors, the CPUs of each, and how many of them share a GPU (0: none).
    """

    bundles: tuple[dict[str, float], ...]
    at_once: int
    neighbours: int
    cluster: ClusterConfig
    actors: tuple[int, float, int]

    @property
    def reserves(self) -> bool:
        """Whether what it reserves limits how many experiments run at a time."""
        return _NEXT_TO_NOTHING not in self.bundles

    def neighbours_on(self, node: Node, at_most: int | None) -> int:
        """Returns the number of experiments that share a machine, which may have joined since the plan was made."""
        count, num_cpus, per_gpu = self.actors
        fitting = math.ceil(room([node], num_cpus, per_gpu, math.inf) / count) if self.reserves else 0
        return max(self.neighbours, fitting if at_most is None else min(fitting, at_most))


def plan_trial(config: ClusterConfig, nodes: Sequence[Node], num_clients: int, at_most: int | None) -> TrialPlan:
    """Divides a cluster among the experiments of a sweep.

    An experiment runs all its clients in one process, unless its configuration asks for actors: by a number
    (``num_actors``) or one per client (``clients_per_actor=1``).

    Args:
        config: the cluster section, the same for all experiments.
        nodes: nodes of the cluster, with all their resources. Each process is on one, and an experiment's actors may
            be on several.
        num_clients: K.
        at_most: experiments at a time; None: as many as fit.

    Raises:
        ConfigError: when options contradict each other.
        ResourceError: when not even one experiment fits, with numbers.
    """
    alone = config.backend == "inline" or (config.num_actors == "auto" and config.clients_per_actor == "auto")
    if alone or config.cpus_per_actor != "auto":
        _check_one_fits(config, nodes)
    if alone:
        cpus = float(config.threads_per_actor) if config.cpus_per_actor == "auto" else config.cpus_per_actor
        cluster = config.model_copy(update={"backend": "inline", "num_actors": 1, "cpus_per_actor": cpus})
        options = plan_actors(cluster, resources_of(nodes), num_clients, nodes)
        bundles = [_bundle(options.num_cpus, options.num_gpus)]
    else:
        cluster = config
        if isinstance(config.num_actors, str) and config.num_actors != "auto":
            # The minimum of a range: results are the same, and more experiments run at a time.
            cluster = config.model_copy(update={"num_actors": asks_for(config, num_clients)})
        options = plan_actors(cluster, resources_of(nodes), num_clients, nodes)
        # Its process only coordinates, as the driver of a run does, which reserves nothing either.
        bundles = [{"CPU": 0.0}, *[_bundle(options.num_cpus, options.num_gpus)] * options.count]
    if cluster.actors_per_gpu == "auto":
        # Its actors get what is reserved here, so that nothing needs to be measured.
        cluster = cluster.model_copy(update={"actors_per_gpu": max(options.per_gpu, 1)})
    at_once, neighbours = _at_a_time(options, nodes, at_most)
    actors = options.count, options.num_cpus, options.per_gpu
    return TrialPlan(tuple(bundles), at_once, neighbours, cluster, actors)


def _at_a_time(options: ActorOptions, nodes: Sequence[Node], at_most: int | None) -> tuple[int, int]:
    """Returns how many experiments fit at a time: on all nodes, and on the node with the most room."""
    if not options.num_cpus and not options.per_gpu:  # they reserve nothing
        at_once = at_most or max(len(nodes), 1)
        return at_once, math.ceil(at_once / max(len(nodes), 1))
    slots = [room([node], options.num_cpus, options.per_gpu, math.inf) for node in nodes]
    fitting = sum(slots) // options.count
    at_once = fitting if at_most is None else min(fitting, at_most)
    return at_once, min(at_once, math.ceil(max(slots) / options.count))


def _check_one_fits(config: ClusterConfig, nodes: Sequence[Node]) -> None:
    """Checks that a node has the CPUs of one process. Ray would wait for such a node without a word.

    Raises:
        ResourceError: naming the option and what the largest node has.
    """
    option = "threads_per_actor" if config.cpus_per_actor == "auto" else "cpus_per_actor"
    wanted, largest = float(getattr(config, option)), max((node.cpus for node in nodes), default=0.0)
    if 0 < largest < wanted:
        labelled = " with cluster.label_selector" if config.label_selector else ""
        raise ResourceError(
            f"cluster.{option}={wanted:g}: a process is on one node, and none{labelled} has more than {largest:g} "
            f"CPUs; lower cluster.{option}"
        )


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount} or _NEXT_TO_NOTHING
