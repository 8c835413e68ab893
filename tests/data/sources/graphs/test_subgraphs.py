"""Graphs with a class of each node, one for each client: from tables and made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError

from rayfl.data.graphs import check_graphs
from rayfl.data.partitions.stats import dataset_stats
from rayfl.data.soundness import check_examples
from rayfl.data.sources.graphs.subgraphs import NodeGraphSource, SyntheticSubgraphsSource
from rayfl.data.subgraphs import SubgraphDataset
from rayfl.errors import DataError
from rayfl.examples import SPLITS
from rayfl.plots.partition import label_matrix
from rayfl.randomness import RandomStreams

NODES: dict[str, list[Any]] = {
    "id": ["a", "b", "c", "d", "e", "f"],
    "label": ["10", "9", "10", "9", None, "10"],
    "client": ["x", "x", "y", "x", "y", "y"],
    "split": ["train", "test", "train", "none", "test", "validation"],
    "one": [1.0, 2, 3, 4, 5, 6],
    "two": [True, False, True, True, False, False],
}
EDGES = {"source": ["a", "b", "c", "a", "e"], "target": ["b", "a", "e", "c", "f"]}


def folder_of(path: Path, nodes: dict[str, Any] = NODES, edges: dict[str, Any] = EDGES, kind: str = "csv") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, table in (("nodes", pa.table(nodes)), ("edges", pa.table(edges))):
        if kind == "csv":
            pa.csv.write_csv(table, path / f"{name}.csv")
        else:
            pq.write_table(table, path / f"{name}.parquet")
    return path


def without(*names: str) -> dict[str, Any]:
    return {name: column for name, column in NODES.items() if name not in names}


def opened(path: Path, seed: int = 0, **options: Any) -> SubgraphDataset:
    found = NodeGraphSource(path=path, **options).open(RandomStreams(seed))
    sound(found)
    return found


def sound(found: SubgraphDataset) -> None:
    for client in range(found.num_clients):
        splits = found.load(client)
        assert [len(splits[split]) for split in SPLITS] == found.sizes()[client].tolist()
        for split in SPLITS:
            check_examples(splits[split], found.spec, "here")
            check_graphs(splits[split].x, "here")
            assert np.array_equal(splits[split].y.numpy(), found.labels(client)[split])


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_clients_and_splits_are_those_of_the_tables(kind: str, tmp_path: Path) -> None:
    found = opened(folder_of(tmp_path, kind=kind))
    assert found.names == ("x", "y") and found.spec.shape == (3, 3 + 1 + 2)
    assert found.spec.num_classes == 2 and found.spec.target == "nodes"
    x, y = found.load(0)["train"].x[0], found.load(1)["train"].x[0]
    assert x[:, :3].tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert x[:, 3:].tolist() == [[1, 1, 1], [1, 2, 0], [1, 4, 1]]
    assert y[:, :3].tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    # Classes 9 and 10 are in the order of numbers; e has none, and d is of no split.
    assert {split: part.tolist() for split, part in found.labels(0).items()} == {
        "train": [[1, -100, -100]],
        "validation": [],
        "test": [[-100, 0, -100]],
    }
    assert found.labels(1)["validation"].tolist() == [[-100, -100, 1]] and not len(found.labels(1)["test"])
    assert list(found.remarks()) == [
        "1 of 6 nodes have no value in column 'label', and never count",
        "1 of 4 edges are between nodes of two clients, and are lost",
    ]
    assert label_matrix(found).tolist() == [[1, 1], [0, 2]]
    assert dataset_stats(found).label_counts is not None


def test_without_clients_the_graph_is_divided_and_splits_are_drawn(tmp_path: Path) -> None:
    count = 40
    nodes = {"name": list(range(count)), "y": [node // 20 for node in range(count)]}
    edges = {
        "source": [n for n in range(count) if n != 19],
        "target": [(n + 1) % count for n in range(count) if n != 19],
    }
    edges = {name: [*column, 3] for name, column in edges.items()} | {"weight": [1.0] * count}
    folder = folder_of(tmp_path, nodes, edges)
    options = {"node": "name", "label": "y", "num_clients": 2}
    found = opened(folder, **options)
    assert found.spec.shape == (20, 21) and found.names == ("0", "1")
    unread, lost = found.remarks()
    assert unread.endswith("it is not: weight") and "1 of 40 edges" in lost
    counts = [[int((y >= 0).sum()) for y in found.labels(client).values()] for client in range(2)]
    assert counts == [[8, 6, 6]] * 2
    drawn = opened(folder, division="random", **options)
    assert drawn.content_hash() != found.content_hash() == opened(folder, **options).content_hash()
    more = opened(folder, test=0.5, validation=0.0, **options)
    assert [int((y >= 0).sum()) for y in more.labels(0).values()] == [10, 0, 10]
    assert opened(folder, seed=1, **options).content_hash() != found.content_hash()


@pytest.mark.parametrize(
    ("nodes", "edges", "options", "message"),
    [
        (without("id"), EDGES, {}, r"nodes\.csv has no column 'id'"),
        (NODES | {"id": ["a", "b", "c", "d", "a", "f"]}, EDGES, {}, r"row 4: node 'a' is there a second time"),
        (NODES | {"id": ["a", None, "c", "d", "e", "f"]}, EDGES, {}, r"column 'id', row 1: no value"),
        (NODES | {"label": [None] * 6}, EDGES, {}, r"column 'label': no node has a class"),
        (NODES | {"split": ["train"] * 5 + ["dev"]}, EDGES, {}, r"column 'split', row 5: 'dev' is none of train,"),
        (NODES | {"one": [1.0, None, 3, 4, 5, 6]}, EDGES, {}, r"column 'one', row 1: no finite number"),
        (NODES | {"one": [1e300, 2, 3, 4, 5, 6]}, EDGES, {}, r"column 'one', row 0: no finite number of float32"),
        (NODES | {"one": list("uvwxyz")}, EDGES, {}, r"column 'one' has the type string; all columns but"),
        (NODES, {"source": ["a"], "target": ["g"]}, {}, r"edges\.csv, row 0: node 'g' is unknown"),
        (NODES, {"source": ["a"], "to": ["b"]}, {}, r"edges\.csv has no column 'target', only source, to"),
        (NODES, EDGES, {"num_clients": 2}, r"a column 'client' of clients: leave dataset\.num_clients out"),
        (NODES, EDGES, {"division": "random"}, r"dataset\.division: .* has a column 'client'"),
        (NODES, EDGES, {"test": 0.1}, r"dataset\.test and dataset\.validation: .* has a column 'split'"),
        (without("client"), EDGES, {}, r"no column 'client' of clients: set dataset\.num_clients"),
        (without("client"), EDGES, {"num_clients": 7}, r"dataset\.num_clients is 7, but there are 6 nodes"),
        (NODES | {"split": ["test"] * 3 + ["train"] * 3}, EDGES, {}, None),
        (NODES | {"split": ["test"] * 4 + ["train"] * 2}, EDGES, {}, r"client 'x' has no node with .*split=train"),
    ],
)
def test_what_is_wrong_is_named(
    nodes: dict[str, Any], edges: dict[str, Any], options: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, nodes, edges)
    if message is None:
        opened(folder, **options)
        return
    with pytest.raises(DataError, match=message):
        opened(folder, **options)


def test_columns_and_classes_that_cannot_be_told_apart(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, NODES | {"label": ["1", "01", "2", "1", "--3", "2"]})
    assert opened(folder).spec.num_classes == 4  # --3 is no number, and so all are texts
    folder = folder_of(tmp_path, NODES | {"label": ["1", "01", "10", "1", "-3", "2"]})
    # -3, 01, 1, 2, 10: what is equal as a number is in the order of its texts, whatever Python's hashes are
    assert opened(folder).labels(0)["train"].tolist() == [[2, -100, -100]]
    assert opened(folder).labels(0)["test"].tolist() == [[-100, 1, -100]]
    table = folder / "nodes.csv"
    table.write_text(table.read_text().replace('"two"', '"one"'))
    with pytest.raises(DataError, match=r"nodes\.csv has the column 'one' more than once: rename or remove"):
        opened(folder)


def test_files_must_be_there_once_and_options_leave_something_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must have nodes\.csv or nodes\.parquet, one of them: neither is there"):
        opened(tmp_path)
    folder_of(tmp_path)
    with pytest.raises(DataError, match="both are there"):
        opened(folder_of(tmp_path, kind="parquet"))
    with pytest.raises(ValidationError, match="together they must be less than 1"):
        NodeGraphSource(path=tmp_path, test=0.5, validation=0.5)


def test_made_up_graphs_have_classes_that_neighbours_share() -> None:
    options: dict[str, Any] = {"num_clients": 3, "nodes": 200, "classes": 3, "alpha": 100.0, "homophily": 1.0}
    found = SyntheticSubgraphsSource(**options).open(RandomStreams(0))
    sound(found)
    for client in range(3):
        x = found.load(client)["train"].x[0]
        count = int(x[:, 200].sum())
        y = np.max(list(found.labels(client).values()), 0)[0]
        assert 100 <= count <= 200 and (y[:count] >= 0).all() and (y[count:] < 0).all()
        one, other = torch.nonzero(x[:, :200], as_tuple=True)
        assert (y[one] == y[other]).all() and abs(len(one) / count - 4) < 0.7
    assert SyntheticSubgraphsSource(**options).open(RandomStreams(0)).content_hash() == found.content_hash()
    alone = SyntheticSubgraphsSource(**{**options, "num_clients": 1}).open(RandomStreams(0))
    assert torch.equal(alone.load(0)["test"].x, found.load(0)["test"].x)


def test_large_arrays_are_said() -> None:
    found = SyntheticSubgraphsSource(num_clients=1, nodes=9000, degree=0.1).open(RandomStreams(0))
    (said,) = found.remarks()
    assert said.startswith("each client's graph is an array of 9000 x 9009 numbers, 309 MiB")
