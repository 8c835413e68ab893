"""Counts the actors that fit on nodes and GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private import state

from actors.processes.labels import matches

PARTS = 10_000
"""Ray counts resources in ten-thousandths."""


@dataclass(frozen=True)
class ActorOptions:
    """The actors of a run, and what Ray reserves for each.

    Attributes:
        count: number of actors to begin with.
        num_cpus: CPUs each.
        num_gpus: GPU share each, 1/k rounded down to what Ray can count; 0 without GPUs.
        device: ``cpu`` or ``cuda``.
        timeout_s: how long all of them may take to start.
        per_gpu: k, how many actors may share a GPU; 0 without GPUs.
        at_least: with how few the run may go on when nodes have left.
        at_most: how many there may be when nodes have joined.
        shared_memory: bytes that the driver may use for messages to actors on its machine.
        labels: what the labels of their nodes must be, see :func:`actors.processes.labels.matches`; empty for any.
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


@dataclass(frozen=True)
class Node:
    """The resources of a machine of the cluster, all or those that are free.

    Attributes:
        id: Ray's id of the node, hexadecimal.
        cpus: CPUs.
        gpus: GPUs.
    """

    id: str
    cpus: float
    gpus: float

    def slots(self, num_cpus: float, per_gpu: int) -> float:
        """Returns how many actors with ``num_cpus`` each fit here, ``per_gpu`` on each whole GPU (0: without GPUs)."""
        beside = math.floor(self.cpus / num_cpus + 1e-9) if num_cpus else math.inf
        return min(beside, math.floor(self.gpus) * per_gpu) if per_gpu else beside


def room(nodes: Sequence[Node], num_cpus: float, per_gpu: int, at_most: float) -> int:
    """Returns how many actors fit on these nodes, ``at_most`` at most; none is spread over two nodes."""
    return int(min(sum(node.slots(num_cpus, per_gpu) for node in nodes), at_most))


def lay_out(nodes: Sequence[Node], count: int, num_cpus: float, per_gpu: int) -> list[tuple[str, int]]:
    """Spreads actors evenly over whole GPUs.

    Args:
        nodes: what they have to give.
        count: number of actors.
        num_cpus: CPUs that each takes of its node.
        per_gpu: k, how many may share a GPU.

    Returns:
        (node id, actors) for each GPU that has any, fullest first; fewer actors than ``count`` where no more fit.
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
    """1/k, rounded down so that k shares are no more than one GPU for Ray too."""
    return PARTS // per_gpu / PARTS


def whole_nodes(labels: Mapping[str, str]) -> list[Node]:
    """The nodes of the cluster that are alive and have the labels, with all they have."""
    return [_node(str(node["NodeID"]), node["Resources"]) for node in _living(labels)]


def free_nodes(labels: Mapping[str, str]) -> list[Node]:
    """The nodes of the cluster that are alive and have the labels, with what nobody has reserved."""
    able = {str(node["NodeID"]) for node in _living(labels)} if labels else None
    free = state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return [_node(id, left) for id, left in free.items() if able is None or id in able]


def resources_of(nodes: Sequence[Node]) -> dict[str, float]:
    """Returns what nodes have together, as Ray reports it for a cluster."""
    return {"CPU": sum(node.cpus for node in nodes), "GPU": sum(node.gpus for node in nodes)}


def _living(labels: Mapping[str, str]) -> list[dict[str, object]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"] and matches(node.get("Labels") or {}, labels)]


def _node(id: str, resources: object) -> Node:
    assert isinstance(resources, dict)
    return Node(id, float(resources.get("CPU", 0.0)), float(resources.get("GPU", 0.0)))
