"""Adapters side by side add what their shares say, alone and folded, and leave no trace in the next call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from rayfl.errors import ModelError
from rayfl.models.pretrained.mixing import merged, mixed_by_rows, side_by_side
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.models.pretrained.sites import Site
from tests.models.pretrained.test_network import check_gradients, reference
from tests.support.bases import inputs, network, trained

FAMILIES = ["vit", "gpt2", "llama", "roberta"]


def mixers(net: AdaptedNetwork, seed: int) -> dict[str, Tensor]:
    """One for each layer."""
    generator = torch.Generator().manual_seed(seed)
    return {site: torch.randn(2, inputs, generator=generator) for site, inputs in net.sites.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_the_sum_of_products_in_the_weights_computes(family: str) -> None:
    net = network(family)
    one, other, x = trained(net, 1), trained(net, 2), inputs(family, 5, 0)
    summed = {name: 0.3 * one[name] + 0.7 * other[name] for name in net.groups["head"]}
    for site in net.sites:
        a, b = f"{site}.lora_A.weight", f"{site}.lora_B.weight"
        summed |= {a: torch.cat([one[a], other[a]]), b: torch.cat([0.3 * one[b], 0.7 * other[b]], 1)}
    with torch.no_grad():
        model = reference(family, net, summed)
        expected = model(pixel_values=x) if family == "vit" else model(input_ids=x)
        found = net.logits(side_by_side([one, other], torch.tensor([[0.3, 0.7]])), x)
    torch.testing.assert_close(found, expected.logits, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_sample_has_its_own_shares(family: str) -> None:
    net = network(family)
    one, other, x = trained(net, 1), trained(net, 2), inputs(family, 4, 0)
    shares = torch.rand(4, 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = net.logits(side_by_side([one, other], shares), x)
        alone = [net.logits(side_by_side([one, other], shares[i : i + 1]), x[i : i + 1]) for i in range(4)]
        torch.testing.assert_close(found, torch.cat(alone), rtol=1e-5, atol=1e-5)
        # and clients that have shares of their own, folded
        stack = {name: torch.stack([leaf, 2 * leaf]) for name, leaf in side_by_side([one, other], shares).items()}
        folded = vmap(net.logits, in_dims=(0, None))(stack, x)
        torch.testing.assert_close(folded[0], found, rtol=1e-5, atol=1e-5)
        doubled = {name: leaf[1] for name, leaf in stack.items()}
        torch.testing.assert_close(folded[1], net.logits(doubled, x), rtol=1e-5, atol=1e-5)


def test_a_layer_mixes_every_row_by_its_mixer() -> None:
    """y = W x + s p_1 B_1 A_1 x + s p_2 B_2 A_2 x with p = softmax(G x), row by row of two clients."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    site = Site(nn.Linear(6, 5), 3, 0.5, ("a", "b"))
    a, b, g, x = draw(2, 2, 3, 6), draw(2, 2, 5, 3), draw(2, 2, 6), draw(2 * 4, 7, 6)
    del site.lora_A.weight, site.lora_B.weight
    site.lora_A.weight, site.lora_B.weight = a.flatten(1, 2), torch.cat([b[:, 0], b[:, 1]], 2)
    site.mixer = g
    with torch.no_grad():
        found = site(x)
        for sample in range(8):
            k = sample // 4
            for row in range(7):
                v = x[sample, row]
                shares = (g[k] @ v).softmax(0)
                added = sum(shares[m] * (b[k, m] @ (a[k, m] @ v)) for m in range(2))
                torch.testing.assert_close(found[sample, row], site.base(v) + 0.5 * added, rtol=1e-5, atol=1e-5)


def test_a_mixer_without_a_preference_shares_evenly_and_the_head_is_the_models_own() -> None:
    net = network("vit")
    one, other, x = trained(net, 1), trained(net, 2), inputs("vit", 3, 0)
    adapters = [{name: tree[name] for name in net.groups["adapters"]} for tree in (one, other)]
    even = {**one, **side_by_side(adapters, torch.tensor([[0.5, 0.5]]))}
    with torch.no_grad():
        expected = net.logits(even, x)
        for rest in (other, adapters[1]):
            found = net.logits(mixed_by_rows(one, rest, {site: torch.zeros(2, i) for site, i in net.sites.items()}), x)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["vit", "llama"])
def test_folded_gradients_through_mixed_and_plain_passes(family: str, checkpointing: bool) -> None:
    """Layers that are computed again in the backward pass have the shares and mixers that they had."""
    net = network(family, checkpointing=checkpointing)
    gates = mixers(net, 3)

    def loss(net: AdaptedNetwork, tree: Any, x: Tensor, y: Tensor, teacher: Any) -> Tensor:
        rest = {name: teacher[name] for name in net.groups["adapters"]}
        mixed = net.logits(mixed_by_rows(tree, rest, gates), x, training=True)
        plain = net.logits(tree, x, training=True)
        shared = net.logits(side_by_side([tree, teacher], torch.tensor([[0.2, 0.8]])), x, training=True)
        return F.cross_entropy(mixed, y) + F.cross_entropy(plain, y) + F.cross_entropy(shared, y)

    check_gradients(net, family, loss, [trained(net, k) for k in range(3)])


def test_the_next_call_of_a_single_model_is_not_mixed() -> None:
    net = network("vit")
    one, other, x = trained(net, 1), trained(net, 2), inputs("vit", 3, 0)
    with torch.no_grad():
        before = net.logits(one, x)
        mixed = net.logits(mixed_by_rows(one, other, mixers(net, 0)), x)
        assert (mixed - before).abs().max() > 1e-4
        assert torch.equal(net.logits(one, x), before)
        net.logits(side_by_side([one, other], torch.tensor([[0.5, 0.5]])), x)
        assert torch.equal(net.logits(one, x), before)


@pytest.mark.parametrize("trains", [["a", "b"], ["a"], ["b"]], ids=["ab", "a", "b"])
def test_fixed_shares_are_one_adapter_of_a_higher_rank(trains: list[str]) -> None:
    """That is how such a model leaves for other programs; the factor that all have in common is written twice."""
    net = network("vit", adapter={"r": 3, "alpha": 6, "trains": trains})
    one, other, x = trained(net, 1), trained(net, 2), inputs("vit", 4, 0)
    model = side_by_side([one, other], torch.tensor([[0.3, 0.7]]))
    like = {**net.initialize(0), **net.fixed_parameters}
    whole = merged({**model, **net.fixed_parameters}, like)
    plain = network("vit", adapter={"r": 6, "alpha": 12})
    assert {name: leaf.shape for name, leaf in whole.items()} == {
        name: leaf.shape for name, leaf in plain.initialize(0).items()
    }
    with torch.no_grad():
        torch.testing.assert_close(plain.logits(whole, x), net.logits(model, x), rtol=1e-5, atol=1e-5)
    assert merged(one, like) == one


def test_names_of_no_layer_are_refused() -> None:
    net = network("vit")
    tree, x = trained(net, 1), inputs("vit", 2, 0)
    with pytest.raises(ModelError, match=r"unknown \['model.other.mixer'\]"):
        net.logits({**tree, "model.other.mixer": torch.zeros(2, 32)}, x)
    incomplete = dict(list(tree.items())[1:])
    with pytest.raises(ModelError, match="do not fit the model"):
        net.logits({**incomplete, "shares": torch.ones(1, 2)}, x)
