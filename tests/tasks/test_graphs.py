"""Runs on graphs: looped and stacked, private, on own files and functions, and what is refused before the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.sources.base import Samples
from rayfl.errors import ConfigError, DataError, ModelError
from rayfl.examples import InputSpec
from rayfl.experiment.parts import Parts
from rayfl.models.base import Network
from rayfl.models.networks.graphs import GCNModel
from rayfl.results.schemas import metrics_of
from rayfl.runs.committed import CommittedModels
from rayfl.runs.folder import open_run
from rayfl.runs.membership import losses_of
from rayfl.runs.rows import where
from rayfl.tasks.base import Batch
from rayfl.tasks.nodes import NodeClassification
from tests.support.graphs import dense, drawn, written

torch.set_num_threads(1)
GRAPHS: dict[str, Any] = {"name": "synthetic_graphs", "num_clients": 4, "samples": 16, "nodes": 10, "dimension": 2}
NODES: dict[str, Any] = {"name": "synthetic_subgraphs", "num_clients": 4, "nodes": 20, "dimension": 3}


def sections(**changes: Any) -> dict[str, Any]:
    return {
        "dataset": GRAPHS,
        "model": {"name": "gin", "layers": 2, "hidden": 6, "norm": "layer"},
        "algorithm": "fedavg",
        "train": {"rounds": 2, "clients_per_round": 3, "local_epochs": 2, "batch_size": 5, "lr": 0.05},
        "evaluation": {"every": 2},
        "cluster": {"backend": "inline", "device": "cpu"},
        **changes,
    }


def of_nodes(**changes: Any) -> dict[str, Any]:
    given = {"dataset": NODES, "task": "node_classification", "model": {"name": "gcn", "hidden": 6, "dropout": 0.2}}
    return sections(**{**given, **changes})


def checked(content: dict[str, Any]) -> Parts:
    parts = Parts(load_config(Experiment, content, {}))
    parts.check()
    return parts


@pytest.mark.parametrize(
    ("nodes", "method"),
    [
        (False, "ditto"),
        (True, "fedbn"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((False, "fedavg"), (True, "fedavg"), (True, "ditto"))),
    ],
)
@pytest.mark.first_case
def test_runs_are_the_same_looped_and_stacked(nodes: bool, method: str, tmp_path: Path) -> None:
    content = of_nodes(algorithm=method) if nodes else sections(algorithm=method)
    if method == "fedbn":
        content["model"] = {**content["model"], "norm": "layer"}
    runs = {
        mode: rayfl.run(content, **{"engine.mode": mode, "storage_path": str(tmp_path), "name": mode})
        for mode in ("looped", "vectorized")
    }
    metrics = metrics_of(runs["looped"].rounds)
    assert metrics[0].name == ("node_accuracy" if nodes else "top1")
    kept = {mode: where(run.clients, round=2, cohort="all", split="test") for mode, run in runs.items()}
    for metric in metrics:
        values, others = (np.array(kept[mode][metric.name], dtype=float) for mode in runs)
        np.testing.assert_allclose(values, others, rtol=1e-4, atol=1e-5)


def test_training_may_be_private_by_sample(tmp_path: Path) -> None:
    private = {"example_clip_norm": 1, "example_noise_multiplier": 1}
    result = rayfl.run(sections(privacy=private), storage_path=str(tmp_path), name="run")
    assert np.isfinite(result.score()) and result.example_epsilons


def test_own_sets_are_divided_by_partitions_and_by_domains(tmp_path: Path) -> None:
    for name, seed in (("S", 0), ("R", 1)):
        graphs = drawn(24, 5, 0, seed)
        begins = np.cumsum([0, *(len(graph.numbers) for graph in graphs)])
        files = {
            "A": "".join(
                f"{u + b + 1}, {v + b + 1}\n" for g, b in zip(graphs, begins, strict=False) for u, v in g.edges
            ),
            "graph_indicator": "".join(f"{i + 1}\n" * len(graph.numbers) for i, graph in enumerate(graphs)),
            "graph_labels": "1\n-1\n" * 12,
            "graph_attributes": "0.5\n1.5\n" * 12,
        }
        written(tmp_path / "sets", name, files)
    data = {"name": "tu_graphs", "path": str(tmp_path / "sets"), "max_degree": 3}
    parts = checked(sections(dataset=data, partition="domains", train={"rounds": 1, "clients_per_round": "all"}))
    assert parts.dataset.names == ("R", "S") and parts.dataset.spec.num_classes == 4
    assert set(parts.dataset.labels(1)["train"].tolist()) == {2, 3}
    for task in ("classification", "regression"):
        one = {**data, "sets": ["S"]}
        content = sections(dataset=one, task=task, partition={"name": "iid", "num_clients": 3})
        content["model"] = {"name": "gin", "hidden": 6, "pooling": "mean"}
        result = rayfl.run(content, storage_path=str(tmp_path), name=task)
        assert np.isfinite(result.score())


def own_graphs(_: object) -> Samples:
    """A function of a user's own."""
    x = dense(drawn(40, 5, 1), 5).numpy()
    return Samples(x, np.arange(40) % 2, InputSpec("graph", x.shape[1:], 2), np.repeat(["a", "b"], 20))


def no_graphs(streams: object) -> Samples:
    """Arrays that are none: an edge in one direction."""
    made = own_graphs(streams)
    x = np.array(made.x[:])
    x[:, 0, 0], x[:, 0, 1], x[:, 1, 0] = 0, 1, 0
    return Samples(x, made.y, made.spec, made.clients)


def test_functions_of_ones_own_may_return_graphs(tmp_path: Path) -> None:
    content = sections(dataset="tests.tasks.test_graphs:own_graphs")
    content["train"] |= {"clients_per_round": "all"}
    assert np.isfinite(rayfl.run(content, storage_path=str(tmp_path), name="own").score())
    with pytest.raises(DataError, match=r"node \d of graph 0: its edges are not those of its column|does not exist"):
        checked(sections(dataset="tests.tasks.test_graphs:no_graphs"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (sections(transform={"resize": 8}), "transform: the inputs are graphs, which cannot be resized or normalized"),
        (sections(transform={"normalize": "dataset"}), "transform: the inputs are graphs"),
        (sections(augment={"flip": True}), r"augment: only images .* but the inputs are graphs"),
        (sections(model="two_nn"), "model two_nn needs images, but the data set has graphs of at most 10 nodes with 2"),
        (sections(algorithm={"name": "fedfed"}), "fedfed cannot learn task=classification from graphs"),
        (sections(algorithm={"name": "pacfl"}), "pacfl cannot learn task=classification from graphs"),
        (sections(attack={"clients": [0], "backdoor": {"target": 0}}), r"attack\.backdoor"),
        (sections(task="node_classification"), "node_classification learns from a class of each node, but dataset"),
        (sections(dataset=NODES), r"a class of each node: set task=node_classification"),
        (of_nodes(holdout={"test": 0.5}), r"holdout: dataset 'synthetic_subgraphs', which has clients and splits"),
        (of_nodes(partition={"name": "iid", "num_clients": 2}), "cannot divide dataset 'synthetic_subgraphs'"),
        (of_nodes(model={"name": "gcn", "pooling": "max"}), r"model\.pooling=max makes one vector"),
        (
            of_nodes(dataset={**NODES, "test": 0}),
            r"test sample.*splits are those of dataset .*: hold more out .*dataset\.test",
        ),
        (
            sections(dataset=GRAPHS | {"num_clients": 300, "samples": 1}, holdout={"test": 0.5}),
            r"300 clients of at most 1 samples.*raise holdout\.test",
        ),
        (
            of_nodes(algorithm={"name": "fltrust"}),
            r"holdout\.public=100; but dataset=synthetic_subgraphs comes divided, and none of its samples can",
        ),
        (of_nodes(algorithm={"name": "fedproto"}), "fedproto cannot learn task=node_classification"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_start(content: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ModelError, DataError), match=message):
        checked(content)


def test_one_set_is_no_domain(tmp_path: Path) -> None:
    files = {"A": "1, 2\n", "graph_indicator": "1\n1\n2\n", "graph_labels": "0\n1\n"}
    data = {"name": "tu_graphs", "path": str(written(tmp_path / "S", "S", files))}
    with pytest.raises(ConfigError, match=r"have none: choose .*tu_graphs with several sets"):
        checked(sections(dataset=data, partition="domains"))


def test_a_graph_that_all_splits_share_is_no_member(tmp_path: Path) -> None:
    rayfl.run(of_nodes(), storage_path=str(tmp_path), name="run")
    models = CommittedModels(open_run(str(tmp_path / "run"), Experiment))
    with pytest.raises(ConfigError, match="a client's sample is its whole graph, which is read in training and in"):
        list(losses_of(models))


def test_the_loss_is_a_mean_over_nodes_that_count_and_models_vote_by_probabilities() -> None:
    spec = InputSpec("graph", (6, 6 + 1 + 2), 3, target="nodes")
    network: Network = GCNModel(hidden=4).network(spec)
    task, x = NodeClassification(network, spec=spec), dense(drawn(2, 6, 2), 6)
    y = torch.tensor([[0, -100, 2, -100, -100, -100], [1, -100, -100, -100, -100, -100]])
    trees = [network.initialize(seed) for seed in (0, 1)]
    logs = network.logits(trees[0], x).log_softmax(-1)
    wanted = -((logs[0, 0, 0] + logs[0, 2, 2]) / 2 + logs[1, 0, 1]) / 2
    torch.testing.assert_close(task.loss(trees[0], Batch(x, y)), wanted)
    mask = torch.tensor([1.0, 0.0])
    torch.testing.assert_close(task.loss(trees[0], Batch(x, y, mask)), -(logs[0, 0, 0] + logs[0, 2, 2]) / 2)
    mean = torch.stack([network.logits(tree, x).softmax(-1) for tree in trees]).mean(0).log()
    torch.testing.assert_close(task.predictions(trees, x), mean)
