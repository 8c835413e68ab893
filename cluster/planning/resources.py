"""Decides the number of actors and their share of the cluster, and waits for a cluster that is growing."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from actors.processes.placement import PARTS, ActorOptions, Node, room, share_of_gpu
from rayfl.config.cluster_section import ClusterConfig
from rayfl.errors import ConfigError, ResourceError

T = TypeVar("T")

_log = logging.getLogger("rayfl")
_ASK_EVERY_S = 2.0
_SAY_EVERY_S = 30.0


def wait_for_room(
    config: ClusterConfig,
    planned: Callable[[ClusterConfig], T],
    sleep: Callable[[float], None] = time.sleep,
    ask: Callable[[], None] = lambda: None,
) -> T:
    """Waits until the cluster is large enough for a plan, and returns the plan.

    With ``actors_per_gpu=auto`` and a number of actors, it waits for a GPU for each; when the time is over, they share.

    Args:
        config: cluster section; ``resources_timeout_s`` is the maximum time to wait.
        planned: makes the plan of the cluster as it is now; raises a ResourceError as long as it is too small.
        sleep: waits for a number of seconds.
        ask: called while waiting, to ask for what is missing.

    Raises:
        ConfigError: when options contradict each other.
        ResourceError: when the cluster still has too little after the time, with numbers.
    """
    waited, shares = 0.0, config.actors_per_gpu == "auto" and config.clients_per_actor != 1
    alone = config.model_copy(update={"actors_per_gpu": 1}) if shares else config
    while True:
        try:
            return planned(alone if waited < config.resources_timeout_s else config)
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
        config: cluster section; ``actors_per_gpu=auto`` stands for the smallest number that has room for all actors.
        resources: resources of the whole cluster (``CPU``, ``GPU``), as Ray reports them.
        num_clients: K, the number of clients.
        nodes: resources of each node, since no actor is spread over two; None: the cluster counts as one machine.

    Raises:
        ConfigError: when options contradict each other.
        ResourceError: when the cluster has too little, with numbers.
    """
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    if config.device == "cuda" and not gpus:
        where = f"no node with {_in_words(config.label_selector)}" if config.label_selector else "the cluster"
        has = "has a GPU" if config.label_selector else "has no GPU"
        raise ResourceError(f"cluster.device is cuda, but {where} {has}; set cluster.device=auto or cpu")
    device = "cuda" if gpus and config.device != "cpu" else "cpu"
    per_gpu = _per_gpu(config, gpus, num_clients) if device == "cuda" else 0
    gpu_share = share_of_gpu(per_gpu) if per_gpu else 0.0
    pinned, (least, most) = config.clients_per_actor == 1, actors_between(config, num_clients)
    if pinned and config.num_actors not in ("auto", num_clients):
        raise ConfigError(
            f"cluster.num_actors is {config.num_actors}, but cluster.clients_per_actor=1 needs one per client "
            f"({num_clients}); drop one of the two"
        )
    cpu_share = _cpu_share(config, cpus, num_clients if pinned else 0)
    unbounded = math.inf if cpu_share or per_gpu else most
    slots = room(nodes or [Node("", cpus, gpus)], cpu_share, per_gpu, unbounded)
    wanted = max(min(slots, most), least)
    if wanted > slots:
        where = (
            f"the nodes with {_in_words(config.label_selector)} have" if config.label_selector else "the cluster has"
        )
        raise ResourceError(
            f"{wanted} actors with {cpu_share:g} CPUs and {gpu_share:g} GPUs each do not fit: {where} "
            f"{cpus:g} CPUs and {gpus:g} GPUs, room for {slots}; lower cluster.num_actors or cluster.cpus_per_actor"
            f"{', raise cluster.actors_per_gpu, or train on CPUs (cluster.device=cpu)' if per_gpu else ''}"
        )
    # A run with a fixed number may go on with fewer actors when nodes leave; one with a range keeps to its minimum.
    goes_on_with = 1 if isinstance(config.num_actors, int) and not pinned else least
    return ActorOptions(
        wanted,
        cpu_share,
        gpu_share,
        device,
        config.startup_timeout_s,
        per_gpu,
        goes_on_with,
        most,
        config.shared_memory,
        config.label_selector,
        nodes_timeout_s=config.resources_timeout_s,
    )


def actors_between(config: ClusterConfig, num_clients: int) -> tuple[int, int]:
    """Returns the minimum and maximum number of actors that a run may begin with."""
    if config.clients_per_actor == 1:
        return num_clients, num_clients
    if config.num_actors == "auto":
        return 1, num_clients
    if isinstance(config.num_actors, int):
        return config.num_actors, config.num_actors
    least, most = map(int, config.num_actors.split(":"))
    return least, max(least, min(most, num_clients))


def _in_words(labels: Mapping[str, str]) -> str:
    return "cluster.label_selector={" + ", ".join(f"{key}: {value}" for key, value in labels.items()) + "}"


def asks_for(config: ClusterConfig, num_clients: int) -> int | None:
    """Returns the minimum number of actors by the configuration; None if it is free."""
    insists = config.clients_per_actor == 1 or config.num_actors != "auto"
    return actors_between(config, num_clients)[0] if insists else None


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
