"""SuPerFed over what adapters add to the base: the line is straight there, and the angle is that of the models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.parts.products import ProductMixture, model_between, squared_cosine_of_updates
from algorithms.superfed import SuPerFed
from rayfl.config.added import ADDED
from rayfl.errors import ConfigError
from rayfl.models.pretrained.mixing import side_by_side, update_product
from rayfl.params import leaves
from rayfl.tasks.base import Batch
from tests.support.adapted import adapted_toy
from tests.support.bases import inputs, trained, vit
from tests.support.toy_networks import two_layers
from tests.support.toys import assert_close, assert_equal

MODES = pytest.mark.parametrize("mode", ["mm", "lm"])


def added(tree: Any, name: str) -> Tensor:
    """What a model adds to a layer, s B A."""
    return vit().scale * tree[f"{name}.lora_B.weight"] @ tree[f"{name}.lora_A.weight"]


def whole(tree: Any) -> Tensor:
    """What a model adds to the base, and its head, as one vector."""
    parts = [added(tree, name).flatten() for name in vit().sites] + [
        tree[name].flatten() for name in vit().groups["head"]
    ]
    return torch.cat(parts).double()


def test_inv_superfed_products_lie_on_a_line_and_factors_on_a_curve() -> None:
    one, other = trained(vit(), 1), trained(vit(), 2)
    for c in (0.0, 0.3, 1.0):
        between = model_between(one, other, c)
        factors = {name: (1 - c) * one[name] + c * other[name] for name in one}
        for name in vit().sites:
            straight = (1 - c) * added(one, name) + c * added(other, name)
            torch.testing.assert_close(added(between, name), straight, rtol=1e-5, atol=1e-6)
            assert (c in (0.0, 1.0)) == torch.allclose(added(factors, name), straight, atol=1e-3)
        for name in vit().groups["head"]:
            torch.testing.assert_close(between[name], factors[name])


def test_the_network_computes_the_model_between() -> None:
    one, other, x = trained(vit(), 1), trained(vit(), 2), inputs("vit", 5, 0)
    with torch.no_grad():
        expected = vit().logits(side_by_side([one, other], torch.tensor([[0.7, 0.3]])), x)
        torch.testing.assert_close(vit().logits(model_between(one, other, 0.3), x), expected, rtol=1e-5, atol=1e-5)


def test_every_layer_has_its_own_coefficient() -> None:
    one, other = trained(vit(), 1), trained(vit(), 2)
    coefficients = torch.linspace(0, 1, len(vit().layers))
    between = model_between(one, other, coefficients, vit().layers)
    for c, layer in zip(coefficients, vit().layers, strict=True):
        if ".lora_" in layer[0]:
            name = layer[0].partition(".lora_")[0]
            straight = (1 - c) * added(one, name) + c * added(other, name)
            torch.testing.assert_close(added(between, name), straight, rtol=1e-5, atol=1e-6)
        else:
            assert_close({n: between[n] for n in layer}, {n: (1 - c) * one[n] + c * other[n] for n in layer}, 1e-6)


def test_inner_products_are_those_of_dense_matrices_whatever_the_basis_of_the_factors() -> None:
    one, other = trained(vit(), 1, 0.5), trained(vit(), 2, 0.5)
    exact = float(whole(one) @ whole(other))
    assert float(update_product(one, other, vit().scale)) == pytest.approx(exact, rel=1e-4)
    turned = dict(other)
    basis = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    for name in vit().sites:
        a, b = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
        turned |= {a: basis @ other[a], b: other[b] @ torch.linalg.inv(basis)}
    assert float(update_product(one, turned, vit().scale)) == pytest.approx(exact, rel=1e-3)
    cosine = torch.cosine_similarity(whole(one), whole(other), dim=0)
    for model in (other, turned):
        found = squared_cosine_of_updates(one, model, vit())
        assert float(found) == pytest.approx(float(cosine) ** 2, rel=1e-3)
    nothing = {name: torch.zeros_like(leaf) for name, leaf in one.items()}
    assert float(squared_cosine_of_updates(one, nothing, vit())) == 0


def test_the_objective_is_the_loss_between_and_the_angle_of_what_is_added() -> None:
    method = SuPerFed(adapters="products", orthogonality_weight=0.7, proximal_weight=0.2)
    toy = adapted_toy(method)
    one, other, received = trained(vit(), 1), trained(vit(), 2), trained(vit(), 3)
    batch = Batch(inputs("vit", 4, 0), torch.arange(4))
    ends = {"federated": one, "local": other}
    found = method.objective(ends, batch, toy.task, {"received": received}, {"coefficient": torch.tensor(0.3)})
    distance = sum((one[name] - received[name]).square().sum() for name in one)
    cosine = torch.cosine_similarity(whole(one), whole(other), dim=0)
    expected = toy.task.loss(side_by_side([one, other], torch.tensor([[0.7, 0.3]])), batch)
    assert float(found) == pytest.approx(float(expected + 0.2 * distance + 0.7 * cosine**2), rel=1e-4)


def test_rows_at_the_ends_are_the_models_themselves() -> None:
    one, other = trained(vit(), 1), trained(vit(), 2)
    task = adapted_toy(SuPerFed()).task
    assert_equal(ProductMixture(one, other, 0.0, task)(), one)
    assert_equal(ProductMixture(one, other, 1.0, task)(), other)
    middle = ProductMixture(one, other, 0.5, task)()
    torch.testing.assert_close(whole(middle), (whole(one) + whole(other)) / 2, rtol=1e-4, atol=1e-6)


@MODES
@pytest.mark.first_case
def test_stacked_is_looped_and_what_travels_is_of_one_rank(mode: Any) -> None:
    method = SuPerFed(adapters="products", mode=mode, start=0.0)
    one, other = (adapted_toy(method, engine) for engine in ("looped", "vectorized"))
    assert_close(one.run(), other.run(), 1e-5)
    shapes = {name: leaf.shape for name, leaf in one.task.network.initialize(0).items()}
    assert {path.rpartition("/")[2]: leaf.shape for path, leaf in leaves(one.server)} == shapes
    for client, state in one.states().items():
        assert_close(state, other.states()[client], 1e-5)
        assert not state or {name: leaf.shape for name, leaf in state["local"].items()} == shapes
    scores = other.scores()
    for client, rows in one.scores().items():
        for row, found in rows.items():
            assert abs(found.loss - scores[client][row].loss) < 1e-4
    factors = adapted_toy(SuPerFed(mode=mode, start=0.0))
    with pytest.raises(AssertionError):
        assert_close(factors.run(), one.server, 1e-4)


def test_what_has_no_products_is_refused() -> None:
    method = SuPerFed(adapters="products")
    context = adapted_toy(method).context
    with pytest.raises(ConfigError, match=r"algorithm\.adapters=products is about adapters.*model=pretrained"):
        method.check(two_layers(), context)
    half = adapted_toy(method, model={"adapter": {"r": 3, "alpha": 6, "trains": ["b"]}})
    with pytest.raises(ConfigError, match=r"algorithm\.adapters=products needs model\.adapter\.trains=\[a,b\]"):
        method.check(half.task, context)
    assert ADDED["algorithm.adapters"] == SuPerFed().adapters
