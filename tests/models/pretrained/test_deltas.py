"""A matrix that a tree adds to a layer's own: alone, stacked, where all have the same, and in files."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from rayfl.models.pretrained.mixing import delta_name
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.models.pretrained.sites import _added
from tests.models.pretrained.test_network import reference
from tests.support.bases import inputs, network, trained

FAMILIES = ["vit", "gpt2", "llama", "roberta"]


def with_deltas(net: AdaptedNetwork, tree: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """A tree with a random matrix for each layer."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {site: (len(tree[f"{site}.lora_B.weight"]), inputs) for site, inputs in net.sites.items()}
    return tree | {delta_name(site): torch.randn(shape, generator=generator) / 10 for site, shape in shapes.items()}


def low_rank(net: AdaptedNetwork, tree: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same model with adapters of as high a rank as D has: [B, D / s] [A; I]."""
    found = {name: leaf for name, leaf in tree.items() if not name.endswith(".delta")}
    for site, width in net.sites.items():
        a, b = f"{site}.lora_A.weight", f"{site}.lora_B.weight"
        found |= {
            a: torch.cat([tree[a], torch.eye(width)]),
            b: torch.cat([tree[b], tree[delta_name(site)] / net.scale], 1),
        }
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_weights_with_the_matrix_compute(family: str) -> None:
    net = network(family)
    tree, x = with_deltas(net, trained(net, 1), 2), inputs(family, 5, 0)
    with torch.no_grad():
        model = reference(family, net, low_rank(net, tree))
        expected = model(pixel_values=x) if family == "vit" else model(input_ids=x)
        torch.testing.assert_close(net.logits(tree, x), expected.logits, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_of_all_clients_is_multiplied_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an expanded view, of which no copy for each client is made."""
    rows, delta = torch.ones(3, 4, 6, dtype=dtype), torch.eye(5, 6)
    monkeypatch.setattr(torch, "bmm", None)
    found = _added(rows, delta.expand(3, 5, 6))
    assert found.dtype == dtype and found.shape == (3, 4, 5) and (found == 1).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_clients_have_one_matrix_or_each_its_own_and_leave_no_trace(family: str) -> None:
    net = network(family)
    one, other, x = with_deltas(net, trained(net, 1), 3), with_deltas(net, trained(net, 2), 4), inputs(family, 6, 0)
    plain = trained(net, 1)
    with torch.no_grad():
        before = net.logits(plain, x[:3])
        alone = torch.stack([net.logits(one, x[:3]), net.logits(other, x[3:])])
        own = {name: torch.stack([one[name], other[name]]) for name in one}
        folded = vmap(net.logits)(own, x.unflatten(0, (2, 3)))
        torch.testing.assert_close(folded, alone, rtol=1e-5, atol=1e-5)
        # the matrix of the first for both
        shared = {name: leaf if name in plain else one[name] for name, leaf in own.items()}
        dims = {name: 0 if name in plain else None for name in own}
        folded = vmap(net.logits, in_dims=(dims, 0))(shared, x.unflatten(0, (2, 3)))
        second = {**other, **{name: leaf for name, leaf in one.items() if name not in plain}}
        alone = torch.stack([net.logits(one, x[:3]), net.logits(second, x[3:])])
        torch.testing.assert_close(folded, alone, rtol=1e-5, atol=1e-5)
        assert torch.equal(net.logits(plain, x[:3]), before)
