"""Reserves resources for each experiment of a sweep, and counts how many fit at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.planning.resources import asks_for, plan_actors
from rayfl.config.cluster_section import ClusterConfig


@dataclass(frozen=True)
class TrialPlan:
    """The resources of one experiment.

    Attributes:
        bundles: bundles of its placement group: one for the experiment's own process, then one for each actor.
        at_once: number of experiments that fit into the cluster at a time.
        neighbours: number of experiments that share a machine.
        cluster: cluster section that the experiment runs with.
    """

    bundles: tuple[dict[str, float], ...]
    at_once: int
    neighbours: int
    cluster: ClusterConfig


def plan_trial(
    config: ClusterConfig, resources: Mapping[str, float], nodes: int, num_clients: int, at_most: int | None
) -> TrialPlan:
    """Divides a cluster among the experiments of a sweep.

    An experiment runs all its clients in one process, unless its configuration asks for actors: by a number
    (``num_actors``) or one per client (``clients_per_actor=1``).

    Args:
        config: the cluster section, the same for all experiments.
        resources: what the whole cluster has, as Ray reports it.
        nodes: machines in the cluster.
        num_clients: K.
        at_most: experiments at a time; None: as many as fit.

    Raises:
        ConfigError: when options contradict each other.
        ResourceError: when not even one experiment fits, with numbers.
    """
    alone = config.backend == "inline" or (config.num_actors == "auto" and config.clients_per_actor == "auto")
    if alone:
        cpus = float(config.threads_per_actor) if config.cpus_per_actor == "auto" else config.cpus_per_actor
        cluster = config.model_copy(update={"backend": "inline", "num_actors": 1, "cpus_per_actor": cpus})
        options = plan_actors(cluster, resources, num_clients)
        bundles = [_bundle(options.num_cpus, options.num_gpus)]
    else:
        cluster = config
        if isinstance(config.num_actors, str) and config.num_actors != "auto":
            # The minimum of a range: results are the same, and more experiments run at a time.
            cluster = config.model_copy(update={"num_actors": asks_for(config, num_clients)})
        options = plan_actors(cluster, resources, num_clients)
        # Its process only coordinates, as the driver of a run does, which reserves nothing either.
        bundles = [{"CPU": 0.0}, *[_bundle(options.num_cpus, options.num_gpus)] * options.count]
    if cluster.actors_per_gpu == "auto":
        # Its actors get what is reserved here, so that nothing needs to be measured.
        cluster = cluster.model_copy(update={"actors_per_gpu": max(options.per_gpu, 1)})
    cpus, gpus = options.num_cpus * options.count, options.num_gpus * options.count
    room = [math.floor(resources.get("CPU", 0) / cpus + 1e-9)] if cpus else []
    room += [math.floor(resources.get("GPU", 0) / gpus + 1e-9)] if gpus else []
    fitting = max(min([*room, at_most or math.inf]), 1) if room or at_most else nodes
    return TrialPlan(tuple(bundles), int(fitting), math.ceil(fitting / nodes), cluster)


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
