"""Overrides by which a run makes an autoscaled cluster grow."""

from __future__ import annotations

import math

from rayfl.config.cluster_section import ClusterConfig

_NODES_TIMEOUT_S = 1800
"""Seconds that a run waits for nodes: a cloud may have to find machines with GPUs, and pull an image of gigabytes."""


def growing_options(
    cluster: ClusterConfig, num_clients: int | None, nodes: int, cpus: int, gpus: int
) -> dict[str, str]:
    """Returns the overrides by which a run asks an autoscaler for nodes and waits for them.

    Ray adds nodes for what waits for them. A run with ``num_actors=auto`` takes what is there and waits for nothing, so
    it gets the number of actors for which all nodes are needed. It still goes on with fewer when nodes leave.

    Args:
        cluster: section of the run's configuration; what it decides itself is left alone.
        num_clients: K, the most actors that are of use; None if it is unknown.
        nodes: the most nodes that the cluster may have.
        cpus: CPUs of each node.
        gpus: GPUs of each node.
    """
    options = {}
    if not cluster.resources_timeout_s:
        options["cluster.resources_timeout_s"] = str(_NODES_TIMEOUT_S)
    if cluster.device == "auto" and gpus:
        # Without nodes there are no GPUs yet, and auto would ask for CPUs.
        options["cluster.device"] = "cuda"
    if cluster.num_actors == "auto" and cluster.clients_per_actor == "auto":
        actors = nodes * _actors_on_a_node(cluster, cpus, gpus if cluster.device != "cpu" else 0)
        if actors:
            options["cluster.num_actors"] = str(min(actors, num_clients or actors))
    return options


def _actors_on_a_node(cluster: ClusterConfig, cpus: int, gpus: int) -> int:
    """Returns the number of actors that fill a node's GPUs or, without GPUs, its CPUs; 0 if it must be measured.

    With ``actors_per_gpu=auto``, it is one actor for each GPU: nothing can be measured on nodes that are not there yet.
    """
    share = 1.0 if cluster.cpus_per_actor == "auto" else cluster.cpus_per_actor
    if not gpus:
        return math.floor(cpus / share + 1e-9) if share else 0
    per_gpu = 1 if cluster.actors_per_gpu == "auto" else cluster.actors_per_gpu
    # A GPU is asked for with the CPUs of all its actors.
    beside = math.floor(cpus / (share * per_gpu) + 1e-9) if share else gpus
    return min(gpus, beside) * per_gpu
