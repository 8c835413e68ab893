"""The network with a channel for structure against plain arithmetic, and who shares which of its channels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.func import vmap

import rayfl
from algorithms.lg_fedavg import LGFedAvg
from algorithms.registry import Experiment
from rayfl.errors import ConfigError, ModelError
from rayfl.examples import InputSpec
from rayfl.models.networks.structural import STRUCTURE, StructuralGIN
from rayfl.runs.committed import CommittedModels
from rayfl.runs.folder import open_run
from tests.models.networks.test_graph_models import GRAPHS, NODES, doubled, spec
from tests.support.graphs import dense

torch.set_num_threads(1)
SMALL = StructuralGIN(hidden=5, layers=2, walks=3, degrees=2)
KINDS = (SMALL, StructuralGIN(hidden=4, walks=0, norm="layer"), StructuralGIN(hidden=4, degrees=0, walks=1, layers=1))


def walked(adjacency: np.ndarray, walks: int, degrees: int) -> np.ndarray:
    """Powers of A D^-1, as the authors take them; nodes without edges never come back."""
    degree = adjacency.sum(0)
    step = adjacency @ np.diag([1 / one if one else 0.0 for one in degree])
    back = [np.diag(np.linalg.matrix_power(step, length + 1)) for length in range(walks)]
    classes = np.clip(degree, 1, degrees).astype(int) - 1
    return np.column_stack([*back, np.eye(degrees)[classes]])


def test_it_is_the_formula_of_the_paper() -> None:
    network, tree = doubled(SMALL)
    found = network.logits(tree, dense(GRAPHS, NODES).double())
    own = {name: leaf.numpy() for name, leaf in tree.items()}

    def linear(name: str, rows: np.ndarray) -> np.ndarray:
        return rows @ own[f"{name}.weight"].T + own[f"{name}.bias"]

    for graph, logits in zip(GRAPHS, found, strict=True):
        adjacency = np.zeros((len(graph.numbers),) * 2)
        for one, other in graph.edges:
            adjacency[one, other] = adjacency[other, one] = 1
        looped = adjacency + np.eye(len(adjacency))
        roots = np.diag(looped.sum(1) ** -0.5)
        x = linear("first", np.concatenate([np.ones((len(adjacency), 1)), graph.numbers], 1))
        s = linear("structure.first", walked(adjacency, 3, 2))
        for layer in range(2):
            heard = (adjacency + np.eye(len(adjacency))) @ np.concatenate([x, s], 1)
            x = np.maximum(linear(f"layers.{layer}.3", np.maximum(linear(f"layers.{layer}.0", heard), 0)), 0)
            s = np.tanh(linear(f"structure.layers.{layer}", roots @ looped @ roots @ s))
        whole = linear("joined", np.concatenate([x, s], 1)).sum(0)
        wanted = linear("head", np.maximum(linear("last.0", whole), 0))
        np.testing.assert_allclose(logits.numpy(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("model", KINDS)
def test_padding_and_order_change_nothing(model: StructuralGIN) -> None:
    x, order = dense(GRAPHS, NODES).double(), torch.randperm(NODES, generator=torch.Generator().manual_seed(2))
    network, tree = doubled(model)
    expected = network.logits(tree, x)
    wider, same = doubled(model, NODES + 4)
    torch.testing.assert_close(wider.logits(same, dense(GRAPHS, NODES + 4).double()), expected, rtol=1e-11, atol=1e-11)
    moved = torch.cat([x[..., :NODES][:, order][:, :, order], x[:, order][..., NODES:]], -1)
    torch.testing.assert_close(network.logits(tree, moved), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("model", KINDS)
def test_stacked_models_are_those_alone_and_empty_arrays_have_slopes(model: StructuralGIN) -> None:
    network, x = model.network(spec()), dense(GRAPHS, NODES)
    trees = [network.initialize(seed) for seed in range(3)]
    stacked = {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}
    assert network.vectorizable
    found = vmap(lambda tree: network.logits(tree, x))(stacked)
    alone = torch.stack([network.logits(tree, x) for tree in trees])
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    tree = {name: leaf.requires_grad_() for name, leaf in trees[0].items()}
    logits = network.logits(tree, torch.zeros_like(x))
    slopes = torch.autograd.grad(logits.sum(), list(tree.values()), allow_unused=True)
    assert all(slope is None or slope.isfinite().all() for slope in slopes)


def test_numbers_of_nodes_do_not_reach_the_channel_of_structure() -> None:
    network, tree = doubled(SMALL)
    shared = network.groups[STRUCTURE]
    assert shared and all(name.startswith("structure.") for name in shared) and shared != network.parameter_names
    other_width = InputSpec("graph", (NODES, NODES + 20), 9)
    other = SMALL.network(other_width)
    sizes = {name: tree[name].shape for name in shared}
    assert {name: leaf.shape for name, leaf in other.initialize(0).items() if name in other.groups[STRUCTURE]} == sizes


def experiment(folder: Any, **more: Any) -> dict[str, Any]:
    return {
        "name": "run", "storage_path": str(folder), "dataset": {"name": "synthetic_graphs", "num_clients": 4},
        "model": {"name": "structural_gin", "hidden": 6, "layers": 1, "walks": 2, "degrees": 3},
        "algorithm": {"name": "lg_fedavg", "head_group": "structure"},
        "train": {"rounds": 2, "clients_per_round": "all", "local_epochs": 1, "batch_size": 10, "lr": 0.05},
        "evaluation": {"every": 2}, "tracking": {"tensorboard": False}, "cluster": {"backend": "inline"}, **more,
    }  # fmt: skip


def test_fedstar_shares_the_channel_of_structure_alone(tmp_path: Any) -> None:
    rayfl.run(experiment(tmp_path))
    models = CommittedModels(open_run(str(tmp_path / "run"), Experiment))
    shared = set(models.parts.task.network.groups[STRUCTURE])
    assert set(models.server["shared"]) == shared
    assert set(models.state(0)["personal"]) == set(models.parts.task.network.parameter_names) - shared
    assert isinstance(models.run.config.algorithm, LGFedAvg)


def test_what_has_no_structure_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"head_group=structure is for models .* set model=structural_gin"):
        rayfl.run(experiment(tmp_path, model={"name": "gcn"}))
    with pytest.raises(ModelError, match="structural_gin needs graphs, but the data set has vectors"):
        StructuralGIN().network(InputSpec("image", (4,), 2))
    with pytest.raises(ModelError, match="each node has a target of its own"):
        StructuralGIN().network(spec(target="nodes"))
    with pytest.raises(ModelError, match="walks=0 and degrees=0 describe no structure"):
        StructuralGIN(walks=0, degrees=0).network(spec())
    with pytest.raises(ValidationError):
        StructuralGIN(walks=-1)
