"""Decides on the number of actors, their share of the cluster, and how long to wait for a cluster that is growing."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from actors.processes.placement import PARTS, ActorOptions, Node, room, share_of_gpu
from rayfl.config.schema import ClusterConfig
from rayfl.errors import ConfigError, ResourceError

_log = logging.getLogger("rayfl")
_ASK_EVERY_S = 2.0
_SAY_EVERY_S = 30.0


def wait_for_room(
    config: ClusterConfig,
    resources: Callable[[], Mapping[str, float]],
    num_clients: int,
    sleep: Callable[[float], None] = time.sleep,
    nodes: Callable[[], Sequence[Node]] | None = None,
    ask: Callable[[], None] = lambda: None,
) -> ActorOptions:
    """The plan of :func:`plan_actors`, as soon as the cluster is large enough for it.

    Args:
        config: the cluster section; ``resources_timeout_s`` is how long to wait.
        resources: asks what the whole cluster has now.
        num_clients: K.
        sleep: how to let time pass.
        nodes: asks what each of its nodes has; None: it counts as one machine.
        ask: called while it waits; asks for what is missing.

    Raises:
        ConfigError: when options contradict each other.
        ResourceError: when the cluster still has too little after the time, with numbers.
    """
    waited = 0.0
    while True:
        try:
            return plan_actors(config, resources(), num_clients, None if nodes is None else nodes())
        except ResourceError as error:
            if waited >= config.resources_timeout_s:
                after = f" (waited {waited:g} s: cluster.resources_timeout_s)" if waited else ""
                raise ResourceError(f"{error}{after}") from None
            if waited % _SAY_EVERY_S == 0:
                _log.warning("waiting for nodes: %s", error)
        ask()
        sleep(_ASK_EVERY_S)
        waited += _ASK_EVERY_S


def plan_actors(
    config: ClusterConfig, resources: Mapping[str, float], num_clients: int, nodes: Sequence[Node] | None = None
) -> ActorOptions:
    """Divides a cluster among actors.

    Args:
        config: the cluster section; ``actors_per_gpu=auto`` stands for as few as the number of actors asked for needs.
        resources: what the whole cluster has (``CPU``, ``GPU``), as Ray reports it.
        num_clients: K.
        nodes: what each of its nodes has: an actor is never spread over two; None: the cluster counts as one machine.

    Raises:
        ConfigError: when options contradict each other.
        ResourceError: when the cluster has too little, with numbers.
    """
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    if config.device == "cuda" and not gpus:
        raise ResourceError("cluster.device is cuda, but the cluster has no GPU; set cluster.device=auto or cpu")
    device = "cuda" if gpus and config.device != "cpu" else "cpu"
    per_gpu = _per_gpu(config, gpus, num_clients) if device == "cuda" else 0
    gpu_share = share_of_gpu(per_gpu) if per_gpu else 0.0
    pinned = config.clients_per_actor == 1
    if pinned and config.num_actors not in ("auto", num_clients):
        raise ConfigError(
            f"cluster.num_actors is {config.num_actors}, but cluster.clients_per_actor=1 needs one per client "
            f"({num_clients}); drop one of the two"
        )
    cpu_share = _cpu_share(config, cpus, num_clients if pinned else 0)
    most = math.inf if cpu_share or per_gpu else num_clients
    slots = room(nodes or [Node("", cpus, gpus)], cpu_share, per_gpu, most)
    automatic = num_clients if pinned else min(slots, num_clients)
    wanted = automatic if config.num_actors == "auto" else config.num_actors
    if wanted < 1 or wanted > slots:
        raise ResourceError(
            f"{max(wanted, 1)} actors with {cpu_share:g} CPUs and {gpu_share:g} GPUs each do not fit: the cluster has "
            f"{cpus:g} CPUs and {gpus:g} GPUs, room for {slots}; lower cluster.num_actors or "
            "cluster.cpus_per_actor, or raise cluster.actors_per_gpu"
        )
    at_least, at_most = (wanted if pinned else 1), (num_clients if config.num_actors == "auto" else wanted)
    return ActorOptions(
        wanted,
        cpu_share,
        gpu_share,
        device,
        config.startup_timeout_s,
        per_gpu,
        at_least,
        at_most,
        config.shared_memory,
    )


def asks_for(config: ClusterConfig, num_clients: int) -> int | None:
    """The number of actors that the configuration insists on; None for as many as there is room for."""
    if config.clients_per_actor == 1:
        return num_clients
    return None if config.num_actors == "auto" else config.num_actors


def _per_gpu(config: ClusterConfig, gpus: float, num_clients: int) -> int:
    if config.actors_per_gpu != "auto":
        return config.actors_per_gpu
    return math.ceil((asks_for(config, num_clients) or 1) / max(math.floor(gpus), 1))


def _cpu_share(config: ClusterConfig, cpus: float, pinned_actors: int) -> float:
    if config.cpus_per_actor != "auto":
        return config.cpus_per_actor
    if pinned_actors <= cpus:
        return 1.0
    # Rounded down, so that the last actor fits too.
    return max(math.floor(cpus / pinned_actors * PARTS) / PARTS, 1 / PARTS)
