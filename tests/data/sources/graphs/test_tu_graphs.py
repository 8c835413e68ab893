"""Graphs in the texts of TUDataset, and made up: what is read, dropped and refused."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rayfl.data.graphs import Graph, GraphRows, check_graphs
from rayfl.data.sources.base import Samples
from rayfl.data.sources.graphs.tu_graphs import TuGraphsSource
from rayfl.data.sources.made_up.graphs import SyntheticGraphsSource
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams
from tests.support.graphs import dense, drawn, written

# A triangle, a path of two nodes with a third one alone, and a star of four: labels -1, 1, -1.
FILES = {
    "A": "1, 2\n2, 1\n2, 3\n3, 2\n1, 3\n3, 1\n4, 5\n5, 4\n7, 8\n8, 7\n7, 9\n9, 7\n7, 10\n10, 7\n",
    "graph_indicator": "1\n1\n1\n2\n2\n2\n3\n3\n3\n3\n",
    "graph_labels": "-1\n1\n-1\n",
}
NODE_LABELS = "5\n5\n9\n5\n9\n9\n9\n5\n5\n5\n"
OTHER = {"A": "1, 2\n2, 1\n", "graph_indicator": "1\n1\n2\n", "graph_labels": "0\n3\n", "node_labels": "1\n2\n2\n"}


def opened(path: Path, aim: Any = "class", **options: Any) -> Samples:
    found = TuGraphsSource(path=path, **options).aimed_at(aim).open(RandomStreams(0))
    check_graphs(torch.from_numpy(found.x[:]), "graphs")
    return found


def texts(found: Samples) -> list[str]:
    return [remark.text for remark in found.remarks()]


def test_graphs_are_those_of_the_texts(tmp_path: Path) -> None:
    found = opened(written(tmp_path, "S", FILES | {"node_labels": NODE_LABELS}))
    assert found.spec.kind == "graph" and found.spec.shape == (4, 4 + 1 + 2) and found.spec.num_classes == 2
    assert found.y.tolist() == [0, 1, 0] and not found.domains and not texts(found)
    x = found.x[:]
    triangle = [[0, 1, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert x[0, :, :4].tolist() == triangle
    assert x[0, :, 4:].tolist() == [[1, 1, 0], [1, 1, 0], [1, 0, 1], [0, 0, 0]]
    assert x[1, :, :4].sum() == 2 and x[1, :, 4].tolist() == [1, 1, 1, 0]
    assert x[2, 0, :4].tolist() == [0, 1, 1, 1] and x[2, 0, 4:].tolist() == [1, 0, 1]
    assert found.x[np.array([2, 0])].tolist() == x[[2, 0]].tolist()


def test_features_are_labels_attributes_and_degrees_in_the_order_that_is_said(tmp_path: Path) -> None:
    attributes = "".join(f"{node}.5, {-node}\n" for node in range(10))
    folder = written(tmp_path, "S", FILES | {"node_attributes": attributes})
    degrees = opened(folder, max_degree=2).x[:]
    assert degrees.shape[2] == 4 + 1 + 3 and degrees[2, :, 5:].argmax(-1).tolist() == [2, 1, 1, 1]
    assert degrees[1, 2, 5:].tolist() == [1, 0, 0]
    both = opened(folder, features=("attributes", "degree"))
    assert both.x[:][1, 0, 5:7].tolist() == [3.5, -3] and both.x.shape[2] == 4 + 1 + 2 + 11
    written(tmp_path, "S", {"node_labels": NODE_LABELS, "node_attributes": "".join(f"{7 * n}\n" for n in range(10))})
    assert opened(folder, features=()).spec.shape == (4, 5)
    assert opened(folder, features=("labels",)).spec.shape == (4, 7)
    assert texts(opened(folder, features=("attributes",))) == [
        "attributes of nodes reach 63: models learn better from numbers around 1"
    ]
    with pytest.raises(DataError, match=r"dataset\.max_degree is 3, but nodes have labels"):
        opened(folder, max_degree=3)


def test_targets_may_be_numbers_or_several_labels(tmp_path: Path) -> None:
    folder = written(
        tmp_path, "S", FILES | {"graph_attributes": "0.5, 1\n2, -3\n1e3, 0\n", "graph_labels": "1, 0\n" * 3}
    )
    values = opened(folder, "values")
    assert values.y.dtype == np.float32 and values.y.tolist() == [[0.5, 1], [2, -3], [1000, 0]]
    assert values.spec.target == "values" and values.spec.num_classes == 2
    labels = opened(folder, "labels")
    assert labels.spec.target == "labels" and labels.y.tolist() == [[1, 0]] * 3
    written(tmp_path, "S", {"graph_labels": "1, 0\n1, 2\n0, 0\n"})
    with pytest.raises(DataError, match=r"S_graph_labels\.txt, line 2: labels are 0 or 1"):
        opened(folder, "labels")
    assert opened(folder, "class", target="values").spec.target == "values"


def test_several_sets_are_domains_and_numbered_apart_or_by_rank(tmp_path: Path) -> None:
    written(tmp_path / "S", "S", FILES | {"node_labels": NODE_LABELS})
    written(tmp_path / "R", "R", OTHER)
    apart = opened(tmp_path)
    assert apart.domains == ("R", "S") and apart.domain is not None and apart.domain.tolist() == [0, 0, 1, 1, 1]
    assert apart.y.tolist() == [0, 1, 2, 3, 2] and apart.spec.num_classes == 4
    assert apart.spec.shape == (4, 4 + 1 + 4)
    assert not apart.x[:][:2, :, 7:].any() and not apart.x[:][2:, :, 5:7].any()
    ranked = opened(tmp_path, numbered="by_rank")
    assert ranked.y.tolist() == [0, 1, 0, 1, 0] and ranked.spec.num_classes == 2 and ranked.spec.shape == (4, 7)
    assert opened(tmp_path, sets=("S",)).y.tolist() == [0, 1, 0]
    with pytest.raises(DataError, match=r"dataset\.sets: there is no set 'T'.*only R, S"):
        opened(tmp_path, sets=("T",))
    with pytest.raises(DataError, match=r"dataset\.features: R has no R_node_attributes\.txt"):
        opened(tmp_path, features=("attributes",))
    written(tmp_path / "S", "S", {"graph_attributes": "1\n2\n3\n"})
    written(tmp_path / "R", "R", {"graph_attributes": "1, 2\n" * 2})
    with pytest.raises(DataError, match=r"other numbers of columns \(R 2, S 1\)"):
        opened(tmp_path, "values")


def test_zip_files_are_read_as_folders_are(tmp_path: Path) -> None:
    written(tmp_path / "plain", "S", FILES)
    (tmp_path / "packed").mkdir()
    with zipfile.ZipFile(tmp_path / "packed" / "S.zip", "w") as archive:
        for file in (tmp_path / "plain").iterdir():
            archive.write(file, f"S/{file.name}")
    wanted = opened(tmp_path / "plain")
    for path in (tmp_path / "packed", tmp_path / "packed" / "S.zip"):
        found = opened(path)
        assert np.array_equal(found.x[:], wanted.x[:]) and found.content() == wanted.content()
    assert opened(tmp_path / "plain", features=()).content() != wanted.content()


def test_graphs_that_are_too_large_are_refused_or_dropped_and_counted(tmp_path: Path) -> None:
    folder = written(tmp_path, "S", FILES)
    with pytest.raises(DataError, match=r"1 of 3 graphs of S have more .*max_nodes=3 nodes, the first graph 3,.* 4:"):
        opened(folder, max_nodes=3)
    found = opened(folder, max_nodes=3, larger="drop")
    assert found.y.tolist() == [0, 1] and found.spec.shape[0] == 3
    assert texts(found) == ["1 of 3 graphs of S have more than dataset.max_nodes=3 nodes, and are left out"]
    with pytest.raises(DataError, match="none is left"):
        opened(folder, max_nodes=2, larger="drop")


def test_what_is_odd_is_said(tmp_path: Path) -> None:
    one_way = FILES["A"].replace("2, 1\n", "")
    found = opened(written(tmp_path, "S", FILES | {"A": one_way, "edge_labels": "1\n" * 13}))
    assert texts(found) == [
        "S: 1 edges are given in one direction alone, and are taken for both",
        "S: edge_labels are not read: an edge is there, or it is not",
    ]
    assert np.array_equal(found.x[:], opened(written(tmp_path, "S", FILES)).x[:])
    many = "".join(f"{graph}\n{graph}\n" for graph in range(1, 41)) + "41\n" * 30
    files = {"A": "1, 2\n2, 1\n", "graph_indicator": many, "graph_labels": "1\n" * 41}
    (said,) = texts(opened(written(tmp_path / "wide", "W", files), features=()))
    assert said.startswith("the largest graph has 30 nodes, and 95 % have 2 at most") and "225 times smaller" in said


def test_files_of_other_editors_are_read(tmp_path: Path) -> None:
    wanted = opened(written(tmp_path / "S", "S", FILES | {"node_labels": NODE_LABELS}))
    for file in (tmp_path / "S").iterdir():
        text = file.read_text()
        file.write_bytes(("\ufeff" + text + "\n\n").replace("\n", "\r\n").encode())
    found = opened(tmp_path / "S")
    assert found.content is not None and wanted.content is not None and found.content() == wanted.content()


def test_nodes_of_a_graph_need_not_follow_each_other(tmp_path: Path) -> None:
    files = {"A": "1, 3\n3, 1\n", "graph_indicator": "1\n2\n1\n", "graph_labels": "0\n1\n", "node_labels": "0\n1\n2\n"}
    x = opened(written(tmp_path, "S", files)).x[:]
    assert x[0, :, :2].tolist() == [[0, 1], [1, 0]] and x[0, :, 3:].tolist() == [[1, 0, 0], [0, 0, 1]]
    assert x[1, :, 2:].tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"A": "1, 2\n1, 11\n"}, r"S_A\.txt, line 2: the edge \(1, 11\) is of a node that is unknown: there are 10"),
        ({"A": "0, 2\n"}, r"S_A\.txt, line 1: the edge \(0, 2\) is of a node that is unknown"),
        ({"A": "1, 2\n3, 4\n"}, r"S_A\.txt, line 2: the edge \(3, 4\) is between graphs 1 and 2"),
        ({"A": "1, 2, 3\n"}, r"S_A\.txt: lines have 3 numbers, and should have 2"),
        ({"A": "1, 2\n1, b\n"}, r"S_A\.txt, line 2 has 'b': lines are numbers with commas between them"),
        ({"A": "1, 2\n2, 1, 3\n"}, r"S_A\.txt, line 2 has 3 numbers, and the first has 2: lines are"),
        ({"A": "1 2\n"}, r"S_A\.txt, line 1 has '1 2': lines are numbers with commas"),
        ({"graph_labels": "1\n\n1\n"}, r"S_graph_labels\.txt, line 2 is empty: remove it, or put there"),
        ({"graph_labels": "1\n1e30\n1\n"}, r"S_graph_labels\.txt, line 2: 1e\+30 is too large"),
        ({"node_attributes": "1e300\n" + "1\n" * 9}, r"S_node_attributes\.txt, line 1: 1e\+300 is too large"),
        ({"A": "1, 2.5\n"}, r"S_A\.txt, line 1: 2\.5 is no whole number"),
        ({"graph_labels": "1\n1\n"}, r"indicator\.txt, line 7: node 7 is of graph 3, but .*_labels\.txt has 2 lines"),
        ({"graph_labels": "1\n1\n1\n2\n"}, r"S_graph_indicator\.txt: graph 4 has no node; remove its line from"),
        ({"graph_labels": "1, 2\n" * 3}, r"S_graph_labels\.txt: lines have 2 numbers, and should have 1"),
        ({"graph_labels": ""}, r"S_graph_labels\.txt is empty"),
        ({"graph_labels": None}, r"S_graph_labels\.txt is missing: put it there"),
        ({"graph_indicator": None}, r"S_graph_indicator\.txt is missing"),
        ({"graph_indicator": ""}, r"S_graph_indicator\.txt is empty"),
        ({"node_labels": "1\n2\n"}, r"S_node_labels\.txt has 2 lines, but .*S_graph_indicator\.txt has 10"),
        ({"node_attributes": "1\nnan\n" + "1\n" * 8}, r"S_node_attributes\.txt, line 2: nan is no finite number"),
        ({"A": None}, r"has no file whose name ends in _A\.txt"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(wrong: dict[str, str | None], message: str, tmp_path: Path) -> None:
    written(tmp_path, "S", {what: text for what, text in (FILES | wrong).items() if text is not None})
    with pytest.raises(DataError, match=message):
        opened(tmp_path)


def test_what_is_not_there_or_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        opened(tmp_path / "nowhere")
    for given in ({"larger": "drop"}, {"max_degree": 3, "features": ("labels",)}, {"sets": ("S", "S")}):
        with pytest.raises(ValidationError):
            TuGraphsSource(path=tmp_path, **given)


def test_made_up_graphs_have_the_pattern_of_their_class_and_numbers_of_their_client() -> None:
    options = {"num_clients": 3, "samples": 12, "nodes": 12, "edges": 0.0, "dimension": 2}
    found = SyntheticGraphsSource(**options).open(RandomStreams(1))
    x = torch.from_numpy(found.x[:])
    check_graphs(x, "graphs")
    assert x.shape == (36, 12, 15) and found.clients is not None and found.clients.tolist()[11:13] == ["0", "1"]
    sizes = x[..., 12].sum(1)
    assert sizes.min() >= 6 and sizes.max() <= 12
    edges = x[..., :12].sum((1, 2)) / 2
    further = [(edges - sizes + 1)[torch.from_numpy(found.y) == label].max().item() for label in range(4)]
    assert all(most <= limit for most, limit in zip(further, (5, 10, 4, 6), strict=True))
    alone = SyntheticGraphsSource(**{**options, "num_clients": 1}).open(RandomStreams(1))
    assert np.array_equal(alone.x[:], found.x[:12]) and np.array_equal(alone.y, found.y[:12])
    more = torch.from_numpy(SyntheticGraphsSource(**options, patterns=3).open(RandomStreams(1)).x[:])
    assert more[..., :12].sum() > 1.3 * x[..., :12].sum()
    other = SyntheticGraphsSource(**options).open(RandomStreams(2))
    assert not np.array_equal(other.x[:], found.x[:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[1, 0].__setitem__(4, 0.5), r"node 0 of graph 11: column 4 is neither 1"),
        (lambda x: x[1, 0].__setitem__(1, 3.0), r"node 0 of graph 11: its edges are not those of its column"),
        (lambda x: x[0, :, :2].__setitem__((slice(0, 2), slice(None)), -1.0), r"weight below 0"),
        (lambda x: (x[0, 3].__setitem__(0, 1.0), x[0, 0].__setitem__(3, 1.0)), r"a node that does not exist"),
        (lambda x: x[0, 3].__setitem__(5, 1.0), r"node 3 of graph 10: it does not exist, and has numbers"),
        (lambda x: x[1].zero_(), r"graph 11: the graph has no node at all"),
    ],
)
def test_arrays_that_are_no_graphs_are_refused(change: Any, message: str) -> None:
    numbers = np.ones((2, 1), np.float32)
    graphs = [Graph(np.array([[0, 1]]), numbers), Graph(np.empty((0, 2), int), np.ones((4, 1), np.float32))]
    x = torch.from_numpy(GraphRows(graphs)[:])
    check_graphs(x, "mine", 10)
    change(x)
    with pytest.raises(DataError, match=f"mine: .*{message}|mine: {message}"):
        check_graphs(x, "mine", 10)


def test_rows_are_read_by_places_and_slices() -> None:
    graphs = drawn(5, 6, 2)
    rows = GraphRows(graphs, 8)
    assert rows.shape == (5, 8, 11) and len(rows) == 5 and rows.dtype == np.float32
    assert torch.equal(torch.from_numpy(rows[np.array([4, 1])]), dense(graphs, 8)[[4, 1]])
    assert rows[1:3].shape == (2, 8, 11) and rows[np.array([], int)].shape == (0, 8, 11)
    weighted = Graph(np.array([[0, 1], [1, 2]]), np.zeros((3, 0), np.float32), np.array([0.5, 2], np.float32))
    assert weighted.dense(3)[:, :3].tolist() == [[0, 0.5, 0], [0.5, 0, 2], [0, 2, 0]]
