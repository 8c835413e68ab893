"""The models of graphs against the papers' formulas: padding and the order of nodes change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.func import vmap

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.architecture import Architecture
from rayfl.models.networks.bags import AttentionPooling
from rayfl.models.networks.graphs import GCNModel, GINModel
from rayfl.models.networks.perceptron import TabularMLP, TwoNN
from rayfl.models.networks.unet import UNetModel
from tests.support.graphs import dense, drawn

torch.set_num_threads(1)
NODES, WIDTH, OUTPUTS = 7, 3, 4
GRAPHS = drawn(6, NODES, WIDTH)
KINDS: list[Architecture] = [
    GCNModel(hidden=5),
    GCNModel(hidden=5, pooling="max", norm="layer"),
    GCNModel(hidden=5, pooling="sum", layers=3),
    GINModel(hidden=5),
    GINModel(hidden=5, pooling="mean", jumping=False, norm="layer"),
    GINModel(hidden=5, pooling="max", learn_eps=False, layers=1),
]


def spec(nodes: int = NODES, target: Any = "class") -> InputSpec:
    return InputSpec("graph", (nodes, nodes + 1 + WIDTH), OUTPUTS, target=target)


def doubled(model: Architecture, nodes: int = NODES, target: Any = "class") -> tuple[Any, dict[str, torch.Tensor]]:
    """A network, and a tree in float64 whose leaves are all drawn."""
    network, generator = model.network(spec(nodes, target)), torch.Generator().manual_seed(1)
    tree = network.initialize(0)
    return network, {n: torch.randn(t.shape, dtype=torch.float64, generator=generator) for n, t in tree.items()}


@pytest.mark.parametrize("target", ["class", "nodes"])
@pytest.mark.parametrize("model", KINDS)
def test_padding_changes_no_output(model: Architecture, target: str) -> None:
    if target == "nodes":
        model = model.model_copy(update={"pooling": type(model).model_fields["pooling"].default})
    outputs = []
    for nodes in (NODES, NODES + 4):
        network, tree = doubled(model, nodes, target)
        found = network.logits(tree, dense(GRAPHS, nodes).double())
        outputs.append(found if target == "class" else found[:, :NODES])
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", KINDS)
def test_the_order_of_nodes_changes_no_graph_and_moves_the_nodes(model: Architecture) -> None:
    x, order = dense(GRAPHS, NODES).double(), torch.randperm(NODES, generator=torch.Generator().manual_seed(2))
    moved = torch.cat([x[..., :NODES][:, order][:, :, order], x[:, order][..., NODES:]], -1)
    network, tree = doubled(model)
    torch.testing.assert_close(network.logits(tree, moved), network.logits(tree, x), rtol=1e-11, atol=1e-11)
    of_nodes = model.model_copy(update={"pooling": type(model).model_fields["pooling"].default})
    network, tree = doubled(of_nodes, target="nodes")
    there = network.logits(tree, x)
    assert there.shape == (len(x), NODES, OUTPUTS)
    torch.testing.assert_close(network.logits(tree, moved), there[:, order], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("model", KINDS)
def test_stacked_models_and_their_gradients_are_those_alone(model: Architecture) -> None:
    network, x = model.network(spec()), dense(GRAPHS, NODES)
    trees = [network.initialize(seed) for seed in range(3)]
    stacked = {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}

    def slopes(tree: dict[str, torch.Tensor], inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return torch.func.grad(lambda leaves: network.logits(leaves, inputs, training=True).square().mean())(tree)

    inputs = torch.stack([x, x.flip(0), x])
    assert network.vectorizable
    torch.testing.assert_close(
        vmap(lambda tree, one: network.logits(tree, one))(stacked, inputs),
        torch.stack([network.logits(tree, one) for tree, one in zip(trees, inputs, strict=True)]),
        rtol=1e-5,
        atol=1e-5,
    )
    found = vmap(slopes)(stacked, inputs)
    for place, tree in enumerate(trees):
        for name, slope in slopes(tree, inputs[place]).items():
            torch.testing.assert_close(found[name][place], slope, rtol=1e-4, atol=1e-5)


def test_gcn_is_the_papers_formula() -> None:
    network, tree = doubled(GCNModel(hidden=5, layers=2))
    found = network.logits(tree, dense(GRAPHS, NODES).double())
    own = {name: leaf.numpy() for name, leaf in tree.items()}
    for graph, logits in zip(GRAPHS, found, strict=True):
        nodes = len(graph.numbers)
        adjacency = np.eye(nodes)
        for one, other in graph.edges:
            adjacency[one, other] = adjacency[other, one] = 1
        roots = np.diag(adjacency.sum(1) ** -0.5)
        numbers = np.concatenate([np.ones((nodes, 1)), graph.numbers], 1)
        for layer in range(2):
            weight, bias = own[f"layers.{layer}.linear.weight"].T, own[f"layers.{layer}.bias"]
            numbers = np.maximum(roots @ adjacency @ roots @ numbers @ weight + bias, 0)
        wanted = own["head.weight"] @ numbers.mean(0) + own["head.bias"]
        np.testing.assert_allclose(logits.numpy(), wanted, rtol=1e-10)


def test_gin_is_the_papers_formula() -> None:
    network, tree = doubled(GINModel(hidden=5, layers=2))
    found = network.logits(tree, dense(GRAPHS, NODES).double())
    own = {name: leaf.numpy() for name, leaf in tree.items()}
    for graph, logits in zip(GRAPHS, found, strict=True):
        numbers = np.concatenate([np.ones((len(graph.numbers), 1)), graph.numbers], 1)
        pairs = {pair for one, other in graph.edges.tolist() for pair in ((one, other), (other, one))}
        read = [numbers.sum(0)]
        for layer in range(2):
            heard = (1 + own[f"layers.{layer}.eps"]) * numbers
            for one, other in pairs:
                heard[one] += numbers[other]
            for part in ("first", "second"):
                weight, bias = (own[f"layers.{layer}.{part}.{what}"] for what in ("weight", "bias"))
                heard = np.maximum(heard @ weight.T + bias, 0)
            numbers = heard
            read.append(numbers.sum(0))
        wanted = own["head.weight"] @ np.concatenate(read) + own["head.bias"]
        np.testing.assert_allclose(logits.numpy(), wanted, rtol=1e-10)


def test_weights_of_edges_count_and_edges_to_oneself_add_to_those_of_the_formula() -> None:
    network, tree = doubled(GCNModel(hidden=5, layers=1), 2)
    x = torch.zeros(1, 2, 3 + WIDTH, dtype=torch.float64)
    x[0, :, 2:] = torch.tensor([[1.0, 1, 2, 3], [1, 0, -1, 1]])
    x[0, :, :2] = torch.tensor([[2.0, 0.5], [0.5, 0]])
    whole = np.array([[3, 0.5], [0.5, 1]])
    roots = np.diag(whole.sum(1) ** -0.5)
    numbers = roots @ whole @ roots @ x[0, :, 2:].numpy() @ tree["layers.0.linear.weight"].numpy().T
    wanted = np.maximum(numbers + tree["layers.0.bias"].numpy(), 0).mean(0)
    np.testing.assert_allclose(network.features(tree, x)[0].numpy(), wanted, rtol=1e-12)


@pytest.mark.parametrize("model", KINDS)
def test_an_array_without_nodes_as_in_padded_mini_batches_has_finite_outputs_and_slopes(model: Architecture) -> None:
    network = model.network(spec())
    tree = {name: leaf.requires_grad_() for name, leaf in network.initialize(0).items()}
    logits = network.logits(tree, torch.zeros(2, NODES, NODES + 1 + WIDTH))
    slopes = torch.autograd.grad(logits.sum(), list(tree.values()), allow_unused=True)
    assert logits.isfinite().all() and all(slope is None or slope.isfinite().all() for slope in slopes)


def test_dropout_and_factors_are_those_of_other_models() -> None:
    network = GCNModel(hidden=8, dropout=0.5, init="xavier_normal").network(spec())
    tree, x = network.initialize(0), dense(GRAPHS, NODES)
    assert network.stochastic and network.vectorizable
    assert not torch.equal(network.logits(tree, x, training=True), network.logits(tree, x))
    assert not tree["head.bias"].any()
    composed = GINModel(hidden=40, factorize={"name": "low_rank", "gamma": 0.1}).network(spec())
    assert composed.num_parameters < GINModel(hidden=40).network(spec()).num_parameters


@pytest.mark.parametrize("model", [TwoNN(), TabularMLP(), AttentionPooling(), UNetModel()])
def test_other_models_refuse_graphs(model: Architecture) -> None:
    with pytest.raises(ModelError, match=r"graphs of at most 7 nodes with 3 numbers each, with one of 4 classes each"):
        model.network(spec())


def test_they_refuse_other_data_and_options_that_are_not_read() -> None:
    with pytest.raises(ModelError, match="model gcn needs graphs, but the data set has vectors of 4 numbers"):
        GCNModel().network(InputSpec("image", (4,), 2))
    with pytest.raises(ModelError, match=r"model\.pooling=max makes one vector .* set model\.pooling=sum"):
        GINModel(pooling="max").network(spec(target="nodes"))
    for wrong in ({"layers": 0}, {"hidden": 0}, {"dropout": 1}, {"pooling": "median"}, {"norm": "batch"}):
        with pytest.raises(ValidationError):
            GCNModel(**wrong)
