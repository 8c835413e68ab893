"""A user's own sets of graphs, in the texts of TUDataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rayfl.data.graphs import Graph, GraphRows
from rayfl.data.sources.base import Samples, Source
from rayfl.data.sources.graphs.graph_files import GraphSet, SetFiles, find_sets, read_set
from rayfl.data.sources.remarks import Remark
from rayfl.data.sources.rows.parquet import located
from rayfl.errors import DataError
from rayfl.examples import InputSpec, Target
from rayfl.naming.lists import EACH_ONCE
from rayfl.naming.spelling import nearest
from rayfl.randomness import RandomStreams

NodeFeature = Literal["labels", "attributes", "degree"]
_MAX_DEGREE = 10
_SCALED = 10.0
_WASTED = 4
"""How many times as large as of 95 % of the graphs arrays may be before that is said."""


class TuGraphsSource(Source):
    """Configuration of your own graphs in the texts of TUDataset (Morris et al., 2020): one set, or several.

    Graphs of one set are divided by a partition. Several sets are domains: with ``partition=domains`` each is a client
    (or several), as in the settings of GCFL (Xie et al., NeurIPS 2021). What is learned is ``graph_labels`` (a class,
    numbered by rank in its set; or several columns of 0 and 1 for task=multilabel), or ``graph_attributes`` for
    task=regression. Edges have no direction and no weight.
    """

    name: Literal["tu_graphs"] = Field(default="tu_graphs", description="Your own graphs in the form of TUDataset.")
    path: Path = Field(
        description="The folder of the texts, or of folders or zip files with them, or a zip file; a relative path is "
        "also looked up in RAYFL_DATA."
    )
    sets: Annotated[tuple[str, ...], EACH_ONCE] = Field(
        default=(), description="Names of the sets, with which their files begin; none: all that are there."
    )
    features: Annotated[tuple[NodeFeature, ...] | None, EACH_ONCE] = Field(
        default=None,
        description="Numbers of a node, in this order: labels (columns of 0 and 1), attributes (as they are), degree "
        "(columns of 0 and 1); []: none, so that structure alone tells; null: labels if all sets have them, else "
        "degree.",
    )
    max_degree: int = Field(
        default=_MAX_DEGREE, ge=1, le=10_000, description="Degrees above it count as this one (features: degree)."
    )
    max_nodes: int | None = Field(default=None, ge=1, description="Most nodes of a graph; null: the largest decides.")
    larger: Literal["refuse", "drop"] = Field(
        default="refuse", description="What becomes of graphs with more than max_nodes nodes."
    )
    numbered: Literal["apart", "by_rank"] = Field(
        default="apart",
        description="Of several sets: apart, each has classes, labels and attributes of its own; by_rank, the k-th of "
        "each is one and the same, which suits methods whose head and first layer stay at the client.",
    )
    target: Literal["auto", "class", "labels", "values"] = Field(
        default="auto", description="What is learned of a graph; auto: what the task learns from."
    )

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> Self:
        if self.larger == "drop" and self.max_nodes is None:
            raise ValueError("larger=drop is for max_nodes: give it, or leave larger out")
        if self.max_degree != _MAX_DEGREE and self.features is not None and "degree" not in self.features:
            raise ValueError("max_degree is for the feature degree: add it to features, or leave max_degree out")
        return self

    def aimed_at(self, target: Target) -> Self:
        """See the base class."""
        if self.target != "auto" or target not in ("class", "labels", "values"):
            return self
        return self.model_copy(update={"target": target})

    def open(self, streams: RandomStreams) -> Samples:
        """Reads the sets.

        Raises:
            DataError: naming the file, the line or the graph, and the fix.
        """
        known = find_sets(located(self.path.expanduser()))
        if wrong := [name for name in self.sets if name not in known]:
            listed = ", ".join(known)
            raise DataError(f"dataset.sets: there is no set {wrong[0]!r}{nearest(wrong[0], known)}, only {listed}")
        files = [known[name] for name in self.sets or known]
        targets = [self._targets(one) for one in files]
        sets = [read_set(one, len(y), self._file) for one, y in zip(files, targets, strict=True)]
        kept, remarks = self._kept(sets)
        y, outputs = self._numbered([y[which] for y, which in zip(targets, kept, strict=True)], files)
        numbers, further = self._features(sets)
        graphs = [graph for found in zip(sets, numbers, kept, strict=True) for graph in _graphs(*found)]
        x = GraphRows(graphs)
        remarks += [*(text for one in sets for text in one.remarks), *further, *self._wasted(graphs)]
        learned: Target = "class" if self.target == "auto" else self.target
        names = tuple(one.name for one in sets) if len(sets) > 1 else ()
        return Samples(
            x,
            y,
            InputSpec("graph", x.shape[1:], outputs, target=learned),
            remarks=lambda: [Remark(text) for text in remarks],
            domains=names,
            domain=np.repeat(np.arange(len(sets)), [len(one) for one in kept]) if names else None,
            content=lambda: x.checksum(y),
        )

    @property
    def _file(self) -> str:
        return "graph_attributes" if self.target == "values" else "graph_labels"

    def _targets(self, files: SetFiles) -> np.ndarray:
        """The targets as they are in the file, of shape (N, columns)."""
        found = files.numbers(self._file, None if self.target in ("labels", "values") else 1, self.target != "values")
        if not len(found):
            raise DataError(f"{files.place(self._file)} is empty: it has what is learned of each graph")
        if self.target == "labels" and (wrong := (found != 0) & (found != 1)).any():
            line = int(wrong.any(1).argmax())
            raise DataError(f"{files.place(self._file)}, line {line + 1}: labels are 0 or 1 for task=multilabel")
        return found

    def _kept(self, sets: Sequence[GraphSet]) -> tuple[list[np.ndarray], list[str]]:
        """By set the places of the graphs that are not too large, and what to say of others."""
        kept, remarks = [], []
        for one in sets:
            fits = np.ones(len(one.sizes), dtype=bool) if self.max_nodes is None else one.sizes <= self.max_nodes
            if not fits.all():
                count, most = int((~fits).sum()), int(one.sizes.max())
                words = f"{count} of {len(fits)} graphs of {one.name} have more than dataset.max_nodes={self.max_nodes}"
                if self.larger == "refuse":
                    raise DataError(
                        f"{words} nodes, the first graph {int(fits.argmin()) + 1}, the largest has {most}: raise it, "
                        "or leave them out with dataset.larger=drop"
                    )
                if not fits.any():
                    raise DataError(f"{words} nodes, and none is left: raise it")
                remarks.append(f"{words} nodes, and are left out")
            kept.append(np.flatnonzero(fits))
        return kept, remarks

    def _numbered(self, targets: Sequence[np.ndarray], files: Sequence[SetFiles]) -> tuple[np.ndarray, int]:
        """All targets in one array, and the number of outputs."""
        if self.target in ("labels", "values"):
            widths = [found.shape[1] for found in targets]
            if len(set(widths)) > 1:
                shown = ", ".join(f"{one.name} {width}" for one, width in zip(files, widths, strict=True))
                raise DataError(
                    f"dataset.sets: {self._file} has other numbers of columns ({shown}): take sets with one"
                )
            return np.concatenate(targets).astype(np.float32), widths[0]
        ranks = [np.unique(found[:, 0], return_inverse=True) for found in targets]
        counts = [len(labels) for labels, _ in ranks]
        if self.numbered == "by_rank":
            return np.concatenate([rank for _, rank in ranks]), max(counts)
        begins = np.cumsum([0, *counts[:-1]])
        return np.concatenate([rank + begin for (_, rank), begin in zip(ranks, begins, strict=True)]), sum(counts)

    def _features(self, sets: Sequence[GraphSet]) -> tuple[list[np.ndarray], list[str]]:
        """By set the numbers of its nodes, float32 of shape (V, d), and what to say of them."""
        labelled = all(one.node_labels is not None for one in sets)
        usual: tuple[NodeFeature, ...] = ("labels",) if labelled else ("degree",)
        kinds = usual if self.features is None else self.features
        if self.max_degree != _MAX_DEGREE and "degree" not in kinds:
            raise DataError(
                f"dataset.max_degree is {self.max_degree}, but nodes have labels, and these are their numbers: leave "
                "it out, or set dataset.features=[labels, degree]"
            )
        columns, remarks = [[np.empty((one.sizes.sum(), 0))] for one in sets], list[str]()
        for kind in kinds:
            if kind == "degree":
                wide = [_one_hot(np.minimum(one.degrees, self.max_degree), self.max_degree + 1) for one in sets]
            else:
                found = [self._of_files(one, kind) for one in sets]
                wide = _side_by_side(found, self.numbered == "apart")
                most = max(float(np.abs(part).max(initial=0)) for part in found)
                if kind == "attributes" and most > _SCALED:
                    remarks.append(f"attributes of nodes reach {most:.6g}: models learn better from numbers around 1")
            for parts, part in zip(columns, wide, strict=True):
                parts.append(part)
        return [np.concatenate(parts, 1).astype(np.float32) for parts in columns], remarks

    def _of_files(self, one: GraphSet, kind: NodeFeature) -> np.ndarray:
        """Labels as columns of 0 and 1, or attributes; raises DataError for a set that has none."""
        found = one.node_labels if kind == "labels" else one.attributes
        if found is None:
            raise DataError(f"dataset.features: {one.name} has no {one.name}_node_{kind}.txt: leave {kind} out")
        if kind == "attributes":
            return found
        ranks = [np.unique(column, return_inverse=True) for column in found.T]
        return np.concatenate([_one_hot(rank, len(labels)) for labels, rank in ranks], 1)

    def _wasted(self, graphs: Sequence[Graph]) -> list[str]:
        sizes = np.array([len(graph.numbers) for graph in graphs])
        most, usual = int(sizes.max()), int(np.ceil(np.quantile(sizes, 0.95)))
        if most**2 < _WASTED * usual**2:
            return []
        return [
            f"the largest graph has {most} nodes, and 95 % have {usual} at most: an array of each graph is as large as "
            f"that of the largest; with dataset.max_nodes={usual} dataset.larger=drop arrays would be "
            f"{most**2 / usual**2:.0f} times smaller"
        ]


def _one_hot(numbers: np.ndarray, count: int) -> np.ndarray:
    found: np.ndarray = numbers[:, np.newaxis] == np.arange(count)
    return found


def _side_by_side(parts: Sequence[np.ndarray], apart: bool) -> list[np.ndarray]:
    """Arrays of equal width: each with columns of its own, or all from the first column on; zeros fill them up."""
    widths = [part.shape[1] for part in parts]
    begins = np.cumsum([0, *widths[:-1]]) if apart else np.zeros(len(widths), dtype=np.int64)
    total = sum(widths) if apart else max(widths)
    return [
        np.pad(part, ((0, 0), (begin, total - begin - part.shape[1])))
        for part, begin in zip(parts, begins.tolist(), strict=True)
    ]


def _graphs(one: GraphSet, numbers: np.ndarray, kept: np.ndarray) -> list[Graph]:
    """Some graphs of a set."""
    begins = np.concatenate([[0], np.cumsum(one.sizes)])
    edges = np.searchsorted(one.edges[:, 0], begins)  # edges are in the order of their first node
    return [
        Graph(
            (one.edges[edges[graph] : edges[graph + 1]] - begins[graph]).astype(np.int32),
            numbers[begins[graph] : begins[graph + 1]],
        )
        for graph in kept.tolist()
    ]
