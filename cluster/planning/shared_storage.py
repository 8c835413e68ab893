"""Checks that a run's folder is the same place on every node, before the run starts."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.processes.labels import matches
from rayfl.errors import ResourceError, RunError
from rayfl.storage.files import Storage

WHILE_RUNNING_S = 10.0
"""Seconds that the nodes may take while a run waits for their answers, between two rounds."""
_NOT_THERE = "does not see it: it is no shared folder there (mount it on all nodes, or use s3://, gs://)"


def check_shared_storage(
    storage: Storage, timeout_s: float, option: str = "storage_path", labels: Mapping[str, str] | None = None
) -> None:
    """Writes a file here, and has every node of the cluster read it and write another one.

    Where the driver's node is the only one, nothing is checked.

    Args:
        storage: folder of the run, or of its copies.
        timeout_s: seconds that the nodes may take.
        option: configuration option that names the folder.
        labels: selector of the nodes that are asked, see :func:`actors.processes.labels.matches`; None for all nodes.

    Raises:
        ResourceError: naming the nodes on which the folder is missing, another one or read-only, and the folder.
        RunError: when the folder cannot be written here.
    """
    nodes = [node for node in _alive() if matches(node.get("Labels") or {}, labels or {})]
    if {node["NodeID"] for node in nodes} <= {ray.get_runtime_context().get_node_id()}:
        return
    probe = f".probe-{uuid.uuid4().hex}"
    storage.write(probe, probe.encode())
    try:
        problems = _ask(storage, probe, nodes, timeout_s)
        for node in nodes:
            answer = f"{probe}-{node['NodeID']}"
            if node["NodeID"] not in problems and not storage.exists(answer):
                problems[node["NodeID"]] = "wrote into a folder of the same name that is another one"
            storage.delete(answer)
    finally:
        storage.delete(probe)
    problems = {node["NodeID"]: problems[node["NodeID"]] for node in _alive() if node["NodeID"] in problems}
    if problems:
        names = {node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in nodes}
        listed = "; ".join(f"node {names[node]} {problem}" for node, problem in problems.items())
        raise ResourceError(f"{option} must be one place for all nodes, but of {storage.uri} {listed}")


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _ask(storage: Storage, probe: str, nodes: list[dict[str, Any]], timeout_s: float) -> dict[str, str]:
    """Has all nodes check the folder; returns problems by node id."""
    visit: Any = ray.remote(visit_storage)
    # No CPU: nodes that are full, or have none to give, are asked too.
    asked = {
        visit.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(storage.uri, probe, f"{probe}-{node['NodeID']}"): node["NodeID"]
        for node in nodes
    }
    late = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)[1]
    problems = {asked[task]: f"has not answered within {timeout_s:g} s" for task in late}
    for task in late:
        ray.cancel(task, force=True)
    for task, node in asked.items():
        if task not in late:
            try:
                found = ray.get(task)
            except RayError as error:
                found = f"could not be asked ({str(error).strip().splitlines()[0]})"
            if found:
                problems[node] = found
    return problems


def visit_storage(uri: str, probe: str, answer: str) -> str:
    """Checks the folder on the node where this runs; returns the problem, or an empty string.

    Args:
        uri: the folder.
        probe: name of a file that the driver wrote, with its name as content.
        answer: name of the file that is written in reply.
    """
    storage = Storage(uri)
    try:
        if storage.read(probe) != probe.encode():
            return "reads something else in its place"
        storage.write(answer, b"")
    except FileNotFoundError:
        return _NOT_THERE
    except RunError as error:
        return f"reports: {error}"
    return ""
