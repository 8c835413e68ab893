"""The models that score items against the papers' formulas, and what they do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.architecture import Architecture
from rayfl.models.networks.perceptron import TwoNN
from rayfl.models.networks.recommenders import MatrixFactorization, NeuralCF
from rayfl.models.networks.recurrent import CharLSTM
from rayfl.models.networks.tokens import FastText, WindowModel

torch.set_num_threads(1)
SPEC = InputSpec("tokens", (5,), 1, 9, "ranking")
X = torch.tensor([[3, 0, 8, 1, 1], [2, 7, 4, 5, 6]])


def doubled(model: Any, seed: int = 1) -> tuple[Any, dict[str, torch.Tensor]]:
    """A network, and a tree in float64 whose leaves are all drawn."""
    network, generator = model.network(SPEC), torch.Generator().manual_seed(seed)
    tree = network.initialize(0)
    return network, {n: torch.randn(t.shape, dtype=torch.float64, generator=generator) for n, t in tree.items()}


def test_matrix_factorization_is_a_product_of_vectors() -> None:
    network, tree = doubled(MatrixFactorization(embedding=3))
    assert set(tree) == {"items.weight", "user.weight"} and network.head_names == ("user.weight",)
    found = network.logits(tree, X)
    assert found.shape == (2, 5, 1)
    torch.testing.assert_close(found[..., 0], tree["items.weight"][X] @ tree["user.weight"][0], rtol=1e-12, atol=0)


def test_biases_are_the_items_and_the_users() -> None:
    network, tree = doubled(MatrixFactorization(embedding=3, biases=True))
    wanted = tree["items.weight"][X] @ tree["user.weight"][0] + tree["item_biases.weight"][X][..., 0]
    torch.testing.assert_close(network.logits(tree, X)[..., 0], wanted + tree["user.bias"], rtol=1e-12, atol=0)
    assert network.groups["user"] == ("user.weight", "user.bias") == network.head_names
    begun = network.initialize(0)
    assert not begun["item_biases.weight"].any() and not begun["user.bias"].any()


@pytest.mark.parametrize(("factors", "hidden"), [(4, (6, 5)), (4, ()), (0, (6,))])
def test_neural_cf_is_neumf_and_its_two_parts(factors: int, hidden: tuple[int, ...]) -> None:
    network, tree = doubled(NeuralCF(factors=factors, hidden=hidden, **({"embedding": 3} if hidden else {})))
    parts = []
    if factors:
        parts.append(tree["user.factors"] * tree["factors.weight"][X])
    if hidden:
        items = tree["embedding.weight"][X]
        read = torch.cat([tree["user.embedding"].expand(2, 5, 3), items], -1)
        for layer in range(len(hidden)):
            read = (read @ tree[f"hidden.{2 * layer}.weight"].T + tree[f"hidden.{2 * layer}.bias"]).relu()
        parts.append(read)
    wanted = torch.cat(parts, -1) @ tree["head.weight"][0] + tree["head.bias"]
    torch.testing.assert_close(network.logits(tree, X)[..., 0], wanted, rtol=1e-12, atol=1e-12)
    own = (*(("user.factors",) if factors else ()), *(("user.embedding",) if hidden else ()))
    assert network.groups["user"] == own


@pytest.mark.parametrize("model", [MatrixFactorization(init_std=0.5), NeuralCF(init_std=0.5)])
def test_initial_vectors_have_the_standard_deviation_that_is_asked_for(model: Architecture) -> None:
    tree = model.network(InputSpec("tokens", (5,), 1, 4000, "ranking")).initialize(0)
    for name, leaf in tree.items():
        if leaf.shape[:1] == (4000,):
            assert leaf.std().item() == pytest.approx(0.5, rel=0.05), name


def test_a_network_of_factors_keeps_the_group_of_the_user() -> None:
    network = NeuralCF(hidden=(32, 32), factorize="pfedpara").network(SPEC)
    assert network.groups["user"] == ("user.factors", "user.embedding") and network.groups["own_factors"]


@pytest.mark.parametrize(
    "given", [{"factors": 0, "hidden": ()}, {"hidden": (), "embedding": 3}, {"init_std": 0}, {"factors": -1}]
)
def test_options_that_leave_nothing_or_are_not_read_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        NeuralCF(**given)


@pytest.mark.parametrize("model", [FastText(), WindowModel(), CharLSTM(), TwoNN()])
def test_other_models_refuse_items(model: Architecture) -> None:
    with pytest.raises(ModelError, match=r"rows of 5 items, of 9 distinct ones, with the first one chosen by a user"):
        model.network(SPEC)


@pytest.mark.parametrize("model", [MatrixFactorization(), NeuralCF()])
def test_they_refuse_other_data(model: Architecture) -> None:
    with pytest.raises(ModelError, match=r"needs items of which a user chose one \(task=recommendation\)"):
        model.network(InputSpec("tokens", (5,), 9, 9, "tokens"))
