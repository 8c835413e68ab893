"""Counts the actors that fit on nodes and GPUs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private import state

from actors.processes.labels import matches
from rayfl.errors import ResourceError

PARTS = 10_000
"""Ray counts resources in ten-thousandths."""


@dataclass(frozen=True)
class ActorOptions:
    """The actors of a run, and what Ray reserves for each.

    Attributes:
        count: initial number of actors.
        num_cpus: CPUs of each.
        num_gpus: GPU share of each, 1/k rounded down to Ray's resolution; 0 without GPUs.
        device: ``cpu`` or ``cuda``.
        timeout_s: seconds in which they must start.
        per_gpu: k, the number of actors that may share a GPU; 0 without GPUs.
        at_least: minimum number of actors after nodes have left.
        at_most: maximum number of actors after nodes have joined.
        shared_memory: bytes that the driver may use for messages to actors on its machine.
        labels: selector of their nodes' labels, see :func:`actors.processes.labels.matches`; empty for any node.
        begins_with: minimum number of actors that must start in time; None: all of them.
        nodes_timeout_s: seconds in which replacements must start, where that is longer than ``timeout_s``: a cloud may
            have to find nodes for them.
    """

    count: int
    num_cpus: float
    num_gpus: float
    device: str
    timeout_s: float
    per_gpu: int
    at_least: int
    at_most: int
    shared_memory: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    begins_with: int | None = None
    nodes_timeout_s: float = 0.0


@dataclass(frozen=True)
class Node:
    """The resources of a node, all or those that are free.

    Attributes:
        id: Ray's id of the node, hexadecimal.
        cpus: number of CPUs.
        gpus: number of GPUs.
    """

    id: str
    cpus: float
    gpus: float

    def slots(self, num_cpus: float, per_gpu: int) -> float:
        """Returns the number of actors with ``num_cpus`` each that fit, ``per_gpu`` on each whole GPU (0: no GPUs)."""
        beside = math.floor(self.cpus / num_cpus + 1e-9) if num_cpus else math.inf
        return min(beside, math.floor(self.gpus) * per_gpu) if per_gpu else beside


def room(nodes: Sequence[Node], num_cpus: float, per_gpu: int, at_most: float) -> int:
    """Returns the number of actors that fit on some nodes, at most ``at_most``; none is spread over two nodes."""
    return int(min(sum(node.slots(num_cpus, per_gpu) for node in nodes), at_most))


def most_together(nodes: Sequence[Node], num_cpus: float, per_gpu: int, count: int) -> int:
    """Returns how many of ``count`` actors may have to share a node's memory: Ray fills nodes unevenly."""
    return int(min(count, max((node.slots(num_cpus, per_gpu) for node in nodes), default=count))) or 1


def lay_out(nodes: Sequence[Node], count: int, num_cpus: float, per_gpu: int) -> list[tuple[str, int]]:
    """Spreads actors evenly over whole GPUs.

    Args:
        nodes: available resources.
        count: number of actors.
        num_cpus: CPUs of each actor.
        per_gpu: k, the number of actors that may share a GPU.

    Returns:
        (node id, actors) for each used GPU, fullest first; fewer than ``count`` actors if no more fit.
    """
    left = {node.id: node.slots(num_cpus, per_gpu) for node in nodes}
    gpus = [(node.id, index) for node in nodes for index in range(math.floor(node.gpus))]
    taken = dict.fromkeys(gpus, 0)
    for _ in range(count):
        open_ones = [gpu for gpu in gpus if taken[gpu] < per_gpu and left[gpu[0]] >= 1]
        if not open_ones:
            break
        emptiest = min(open_ones, key=taken.__getitem__)
        taken[emptiest] += 1
        left[emptiest[0]] -= 1
    return sorted(((gpu[0], actors) for gpu, actors in taken.items() if actors), key=lambda seat: -seat[1])


def share_of_gpu(per_gpu: int) -> float:
    """Returns 1/k, rounded down so that k shares are at most one GPU in Ray's arithmetic."""
    return PARTS // per_gpu / PARTS


def whole_nodes(labels: Mapping[str, str]) -> list[Node]:
    """Returns the living nodes with the labels, with all their resources."""
    return [_node(str(node["NodeID"]), node["Resources"]) for node in _living(labels)]


def check_own_node() -> None:
    """Raises ResourceError where the node of this process has died: no actor is started for it any more.

    Ray ends a process whose node's raylet has died, but not always.
    """
    own = ray.get_runtime_context().get_node_id()
    if any(node["NodeID"] == own and not node["Alive"] for node in ray.nodes()):  # type: ignore[no-untyped-call]
        raise ResourceError(
            "Ray's own process on the driver's node (the raylet) has died, without which no actor can be started: run "
            "the same command again, which continues from the last commit"
        )


def free_nodes(labels: Mapping[str, str]) -> list[Node]:
    """Returns the living nodes with the labels, with their free resources."""
    able = {str(node["NodeID"]) for node in _living(labels)} if labels else None
    free = state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return [_node(id, left) for id, left in free.items() if able is None or id in able]


def resources_of(nodes: Sequence[Node]) -> dict[str, float]:
    """Returns the total resources of nodes, as Ray reports them for a cluster."""
    return {"CPU": sum(node.cpus for node in nodes), "GPU": sum(node.gpus for node in nodes)}


def free_in_words() -> str:
    """Returns what is free in the cluster, for messages."""
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs"


def busy_in_words() -> str:
    """Says that this machine has other work, which Ray's processes wait for; nothing where it has not."""
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cpus:
        return ""
    return (
        f"; this machine is busy (load {load:.1f} on {cpus} CPUs), and Ray lets its workers wait for other programs "
        "(RAY_worker_niceness, by default 15)"
    )


def _living(labels: Mapping[str, str]) -> list[dict[str, object]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"] and matches(node.get("Labels") or {}, labels)]


def _node(id: str, resources: object) -> Node:
    assert isinstance(resources, dict)
    return Node(id, float(resources.get("CPU", 0.0)), float(resources.get("GPU", 0.0)))
