"""Checks that a folder is the same place on every node: before a run starts, and on nodes that join it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.processes.labels import matches
from actors.processes.ray_errors import in_words
from rayfl.errors import ResourceError, RunError
from rayfl.storage.files import Storage

FIRST_WAIT_S = 5.0
"""Seconds in which a node that has just joined may answer: without an answer it waits for a whole round."""
_NOT_THERE = "does not see it: it is no shared folder there (mount it on all nodes, or use s3://, gs://)"


def check_shared_storage(
    storage: Storage, timeout_s: float, option: str = "storage_path", labels: Mapping[str, str] | None = None
) -> None:
    """Checks a folder on all nodes that there are; see :class:`SharedFolder`."""
    SharedFolder(storage, timeout_s, option, labels).check()


def all_ready(places: Sequence[SharedFolder]) -> bool:
    """Returns whether all nodes of now see all folders; raises as :meth:`SharedFolder.ready`.

    Nodes that have just joined are asked about all of them before any answer is waited for, so that several folders
    take no longer than one.
    """
    for place in places:
        place.ask()
    return all(place.ready() for place in places)


class SharedFolder:
    """A folder that must be one place for all nodes that a run uses.

    The driver writes a file, and has each node read it and write another one. A node that has shown that it sees the
    folder is not asked again. Where the driver's node is the only one, nothing is checked.

    Args:
        storage: folder of the run, or of its copies.
        timeout_s: seconds that the nodes may take.
        option: configuration option that names the folder.
        labels: selector of the nodes that are asked, see :func:`actors.processes.labels.matches`; None for all nodes.
    """

    def __init__(
        self,
        storage: Storage,
        timeout_s: float,
        option: str = "storage_path",
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._storage, self._timeout_s, self._option, self._labels = storage, timeout_s, option, labels or {}
        self._proven = set[str]()
        self._probe, self._since, self._waited_for = "", 0.0, False
        self._asked: dict[Any, str] = {}

    def check(self) -> None:
        """Waits for the answers of all nodes; raises as :meth:`ready`."""
        while not self.ready(self._timeout_s):
            pass

    def ready(self, patience_s: float | None = None) -> bool:
        """Returns whether all nodes of now see the folder; False while some have not answered yet.

        Args:
            patience_s: seconds to wait for answers; None: until a few seconds after nodes were asked, and not at all if
                they were waited for before.

        Raises:
            ResourceError: naming the folder and the nodes on which it is missing, another one or read-only, or which
                did not answer in time.
            RunError: when the folder cannot be written here.
        """
        if not self.ask():
            return True
        if patience_s is None:
            left_s = max(self._since + FIRST_WAIT_S - time.monotonic(), 0.0)
            patience_s = 0.0 if self._waited_for else left_s
        self._waited_for = True
        late = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=patience_s)[1]
        if late and time.monotonic() - self._since < self._timeout_s:
            return False
        try:
            self._judge(late)
        finally:
            self.close()
        return True

    def close(self) -> None:
        """Forgets the question that is open, and removes its file."""
        if self._asked:
            with suppress(RunError):  # it harms nobody, and whatever else is going on has more to say
                self._storage.delete(self._probe)
        self._asked = {}

    def ask(self) -> bool:
        """Asks the nodes that have not shown yet that they see the folder, unless they were asked before.

        Returns:
            Whether there are such nodes.

        Raises:
            RunError: when the folder cannot be written here.
        """
        if self._asked:
            return True
        ids = [node["NodeID"] for node in self._nodes() if node["NodeID"] not in self._proven]
        if set(ids) <= {ray.get_runtime_context().get_node_id()}:
            return False
        self._probe, self._since, self._waited_for = f".probe-{uuid.uuid4().hex}", time.monotonic(), False
        self._storage.write(self._probe, self._probe.encode())
        visit: Any = ray.remote(visit_storage)
        # No CPU: nodes that are full, or have none to give, are asked too.
        self._asked = {
            visit.options(
                num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote(self._storage.uri, self._probe, f"{self._probe}-{node}"): node
            for node in ids
        }
        return True

    def _judge(self, late: list[Any]) -> None:
        """Reads the answers, except for late ones; raises as :meth:`ready`."""
        silent = {self._asked[task]: f"has not answered within {self._timeout_s:g} s" for task in late}
        wrong: dict[str, str] = {}
        for task in late:
            ray.cancel(task, force=True)
        for task, node in self._asked.items():
            answer = f"{self._probe}-{node}"
            try:
                found = "" if node in silent else ray.get(task)
                if found or (node not in silent and not self._storage.exists(answer)):
                    wrong[node] = found or "wrote into a folder of the same name that is another one"
            except RayError as error:
                silent[node] = f"could not be asked: {in_words(error)}"
            self._storage.delete(answer)
        self._proven |= set(self._asked.values()) - wrong.keys() - silent.keys()
        problems = {
            f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})": (wrong | silent)[node["NodeID"]]
            for node in self._nodes()  # one that has left meanwhile needs no storage
            if node["NodeID"] in wrong.keys() | silent.keys()
        }
        if problems:
            listed = "; ".join(f"node {name} {problem}" for name, problem in problems.items())
            but = f"but of {self._storage.uri}" if wrong else f"which is not known of {self._storage.uri}:"
            raise ResourceError(f"{self._option} must be one place for all nodes, {but} {listed}")

    def _nodes(self) -> list[dict[str, Any]]:
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return [node for node in nodes if node["Alive"] and matches(node.get("Labels") or {}, self._labels)]


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
