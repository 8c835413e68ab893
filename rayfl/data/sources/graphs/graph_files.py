"""Sets of graphs in the texts of TUDataset (Morris et al., 2020): edges, whose each node is, labels and attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from rayfl.data.sources.preparation.trees import FileTree, open_tree
from rayfl.data.sources.root import nor_here
from rayfl.errors import DataError

_LARGEST_FILE = 4 << 30
_LARGEST_WHOLE = 1 << 53
_EDGES = "_A.txt"
_UNREAD = ("edge_labels", "edge_attributes")


@dataclass(frozen=True)
class SetFiles:
    """Where the texts of a set are.

    Attributes:
        name: of the set, with which the names of its files begin.
        tree: a folder or zip file.
        folder: in the tree, with a slash at its end; empty for the tree itself.
    """

    name: str
    tree: FileTree
    folder: str

    def place(self, what: str) -> str:
        """Returns a file as messages name it."""
        return self.tree.place(self._path(what))

    def has(self, what: str) -> bool:
        """Returns whether there is such a file, for example ``node_labels``."""
        return self._path(what) in self.tree.names

    def numbers(self, what: str, columns: int | None = None, whole: bool = True) -> np.ndarray:
        """Reads a file.

        Args:
            what: which, for example ``graph_labels``.
            columns: how many numbers each line has; None: any number, the same in all.
            whole: whether they must be whole numbers.

        Returns:
            int64, or float64 if ``whole`` is false, of shape (lines, columns).

        Raises:
            DataError: the file is missing, or something else is in it; names the line.
        """
        if not self.has(what):
            raise DataError(f"{self.place(what)} is missing: put it there, as TUDataset has it")
        text = self.tree.read(self._path(what)).decode("utf-8-sig", errors="replace")
        lines = text.rstrip().splitlines()
        if not lines:
            return np.empty((0, columns or 1), dtype=np.int64 if whole else np.float64)
        try:
            found = np.loadtxt(lines, delimiter=",", ndmin=2, comments=None)
        except ValueError as error:
            raise DataError(
                f"{self.place(what)}, {_misfit(lines)}: lines are numbers with commas between them"
            ) from error
        if len(found) != len(lines):  # empty ones are passed over, and all others would have another number
            raise DataError(f"{self.place(what)}, {_misfit(lines)}: remove it, or put there what is missing")
        if columns is not None and found.shape[1] != columns:
            raise DataError(f"{self.place(what)}: lines have {found.shape[1]} numbers, and should have {columns}")
        large = ~(np.abs(found) <= (_LARGEST_WHOLE if whole else np.finfo(np.float32).max))  # also what is no number
        if (wrong := large | (found != np.rint(found)) if whole else large).any():
            row, column = (int(axis[0]) for axis in wrong.nonzero())
            value, kind = found[row, column], "whole" if whole else "finite"
            words = "too large" if np.isfinite(value) and large[row, column] else f"no {kind} number"
            raise DataError(f"{self.place(what)}, line {row + 1}: {value} is {words}")
        return found.astype(np.int64) if whole else found

    def _path(self, what: str) -> str:
        return f"{self.folder}{self.name}_{what}.txt"


def find_sets(path: Path) -> dict[str, SetFiles]:
    """Returns the sets in a folder, its folders and its zip files, or in one zip file, by name in ascending order.

    Where a set is in a zip file and in a folder beside it, it is read from the folder.

    Raises:
        DataError: there is no such place, or no set in it.
    """
    if not path.exists():
        raise DataError(f"dataset.path: {path} does not exist{nor_here(path)}; give the folder of the sets")
    outer = open_tree(path, _LARGEST_FILE)
    packed = [path / name for name in outer.names if name.endswith(".zip")] if path.is_dir() else []
    found: dict[str, SetFiles] = {}
    for tree in [*(open_tree(one, _LARGEST_FILE) for one in packed), outer]:
        for name in tree.names:
            folder, _, file = name.rpartition("/")
            if file.endswith(_EDGES) and not name.startswith("__MACOSX/"):
                found[file.removesuffix(_EDGES)] = SetFiles(file.removesuffix(_EDGES), tree, folder and f"{folder}/")
    if not found:
        raise DataError(
            f"dataset.path: {path} has no file whose name ends in {_EDGES}: give the folder of MUTAG_A.txt and the like"
        )
    return dict(sorted(found.items()))


@dataclass(frozen=True, eq=False)
class GraphSet:
    """A set as it was read; nodes are numbered from 0 on, graph after graph.

    Attributes:
        name: of the set.
        sizes: nodes by graph, int64 of shape (N,), each at least 1.
        edges: distinct pairs of nodes, the smaller number first, int64 of shape (E, 2).
        node_labels: int64 of shape (V, columns); None: there are none.
        attributes: float64 of shape (V, columns); None: there are none.
        remarks: what a user should be warned of.
    """

    name: str
    sizes: np.ndarray
    edges: np.ndarray
    node_labels: np.ndarray | None
    attributes: np.ndarray | None
    remarks: tuple[str, ...] = field(default=())

    @cached_property
    def degrees(self) -> np.ndarray:
        """Returns how many edges each node has, int64 of shape (V,); one to itself counts once."""
        loops = self.edges[:, 0] == self.edges[:, 1]
        count = np.bincount(self.edges[:, 0], minlength=self.sizes.sum())
        return count + np.bincount(self.edges[~loops, 1], minlength=self.sizes.sum())


def read_set(files: SetFiles, graphs: int, what: str) -> GraphSet:
    """Reads all of a set but its graphs' targets.

    Args:
        files: of the set.
        graphs: how many targets there are.
        what: the file of the targets, for messages.

    Raises:
        DataError: naming the file, the line and the fix.
    """
    whose = files.numbers("graph_indicator", 1)[:, 0] - 1
    place = files.place("graph_indicator")
    if not len(whose):
        raise DataError(f"{place} is empty: it has the graph of each node")
    if (outside := (whose < 0) | (whose >= graphs)).any():
        node = int(outside.argmax())
        raise DataError(
            f"{place}, line {node + 1}: node {node + 1} is of graph {whose[node] + 1}, but {files.place(what)} has "
            f"{graphs} lines, a target for each of the graphs from 1 on"
        )
    sizes = np.bincount(whose, minlength=graphs)
    if not sizes.all():
        raise DataError(
            f"{place}: graph {int(sizes.argmin()) + 1} has no node; remove its line from {files.place(what)}"
        )
    order = np.argsort(whose, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    edges, remarks = _edges(files, whose, number)
    by_node: Mapping[str, np.ndarray | None] = {
        kind: _of_nodes(files, kind, order, kind == "node_labels") for kind in ("node_labels", "node_attributes")
    }
    unread = [kind for kind in _UNREAD if files.has(kind)]
    if unread:
        remarks.append(f"{files.name}: {' and '.join(unread)} are not read: an edge is there, or it is not")
    return GraphSet(files.name, sizes, edges, by_node["node_labels"], by_node["node_attributes"], tuple(remarks))


def _edges(files: SetFiles, whose: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Returns the edges, and what is odd about them."""
    given, place, nodes = files.numbers("A", 2).reshape(-1, 2) - 1, files.place("A"), len(whose)
    if (outside := ((given < 0) | (given >= nodes)).any(1)).any():
        line = int(outside.argmax())
        one, other = (given[line] + 1).tolist()
        raise DataError(
            f"{place}, line {line + 1}: the edge ({one}, {other}) is of a node that is unknown: there are {nodes}, "
            "from 1 on, by graph_indicator"
        )
    if (across := whose[given[:, 0]] != whose[given[:, 1]]).any():
        line = int(across.argmax())
        one, other = (given[line] + 1).tolist()
        graphs = " and ".join(str(whose[node] + 1) for node in given[line])
        raise DataError(
            f"{place}, line {line + 1}: the edge ({one}, {other}) is between graphs {graphs}: edges are within a graph"
        )
    there = number[given]
    directed = np.unique(there, axis=0)
    edges = np.unique(np.sort(directed, 1), axis=0)
    loops = int((edges[:, 0] == edges[:, 1]).sum())
    remarks = []
    if alone := 2 * len(edges) - loops - len(directed):
        remarks.append(f"{files.name}: {alone} edges are given in one direction alone, and are taken for both")
    return edges, remarks


def _of_nodes(files: SetFiles, kind: str, order: np.ndarray, whole: bool) -> np.ndarray | None:
    if not files.has(kind):
        return None
    found = files.numbers(kind, None, whole)
    if len(found) != len(order):
        raise DataError(
            f"{files.place(kind)} has {len(found)} lines, but {files.place('graph_indicator')} has {len(order)}: each "
            "has one for each node"
        )
    ordered: np.ndarray = found[order]
    return ordered


def _misfit(lines: Sequence[str]) -> str:
    """Returns the first line that is empty, has something that is no number, or another count of numbers."""
    width = len(lines[0].split(","))
    for number, line in enumerate(lines, 1):
        if not line.strip():
            return f"line {number} is empty"
        parts = line.split(",")
        for part in parts:
            try:
                float(part)
            except ValueError:
                return f"line {number} has {part.strip()!r}"
        if len(parts) != width:
            return f"line {number} has {len(parts)} numbers, and the first has {width}"
    return "one of its lines"
