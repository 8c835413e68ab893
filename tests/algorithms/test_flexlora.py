"""FlexLoRA: the server's adapter is the best of its rank for the mean of the clients' products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.flexlora import FlexLoRA
from algorithms.parts.low_rank import decomposed_product
from algorithms.parts.ranks import cut, sites_of
from tests.support.adapted import adapted_toy, images
from tests.support.bases import trained, vit
from tests.support.toys import assert_close, assert_equal

INITIAL = vit().initialize(0)
WEIGHTS = {0: 5, 1: 8, 2: 9}


def models(*ranks: int) -> dict[int, dict[str, Tensor]]:
    """Models of some ranks, some way from their initial values; by client."""
    return {client: cut(trained(vit(), client + 1), rank) for client, rank in enumerate(ranks)}


def product(model: Any, site: str) -> Tensor:
    """B A in float64."""
    found: Tensor = model[f"{site}.lora_B.weight"].double() @ model[f"{site}.lora_A.weight"].double()
    return found


def mean_product(sent: Any, weights: Any, site: str) -> Tensor:
    """sum_k p_k B_k A_k, dense."""
    total = sum(weights[client] for client in sent)
    return torch.stack([weights[client] / total * product(model, site) for client, model in sent.items()]).sum(0)


@pytest.mark.parametrize("values", ["b", "both"])
def test_inv_flexlora_the_error_is_that_of_the_smaller_singular_values(values: Any) -> None:
    """For every rank that is cut: no adapter of that rank is nearer to the mean of the products."""
    sent = models(3, 1, 2)
    found = FlexLoRA(singular_values=values).combined(sent, WEIGHTS, INITIAL)
    for site in sites_of(INITIAL):
        mean = mean_product(sent, WEIGHTS, site)
        exact = torch.linalg.svdvals(mean)
        for rank in (1, 2, 3):
            error = (product(cut(found, rank), site) - mean).norm()
            assert float(error) == pytest.approx(float(exact[rank:].square().sum().sqrt()), rel=1e-5)
    for name in vit().groups["head"]:
        expected = sum(WEIGHTS[client] / 22 * model[name].double() for client, model in sent.items())
        assert_close(found[name], expected.float(), 1e-6)


def test_inv_flexlora_equal_clients_have_the_product_that_they_send() -> None:
    """Whatever they weigh; the factors are others."""
    same = trained(vit(), 1)
    found = FlexLoRA().combined({0: same, 1: same, 2: same}, WEIGHTS, INITIAL)
    for site in sites_of(INITIAL):
        assert_close(product(found, site), product(same, site), 1e-6)
    x = images((6,)).load(0)["train"].x
    assert_close(vit().logits(found, x), vit().logits(same, x), 1e-5)


def test_inv_flexlora_ranks_that_the_mean_lacks_begin_as_the_initial_adapter() -> None:
    """A row of A with a column of zeros in B, which has a gradient; the mean of one client of rank 1 has one rank."""
    found = FlexLoRA().combined(models(1), {0: 5}, INITIAL)
    for site in sites_of(INITIAL):
        a, b = f"{site}.lora_A.weight", f"{site}.lora_B.weight"
        assert torch.equal(found[a][1:], INITIAL[a][1:]) and not found[b][:, 1:].any()
        assert found[b][:, 0].any()
    untrained = dict.fromkeys(WEIGHTS, INITIAL)
    assert_equal(FlexLoRA().combined(untrained, WEIGHTS, INITIAL), INITIAL)


@pytest.mark.parametrize("shape", [(7, 3, 5), (4, 9, 6), (5, 2, 5)])
def test_the_decomposition_is_that_of_the_product_with_one_sign(shape: tuple[int, int, int]) -> None:
    o, m, i = shape
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(o, m, generator=generator, dtype=torch.float64)
    right = torch.randn(m, i, generator=generator, dtype=torch.float64)
    u, values, v = decomposed_product(left, right)
    exact = torch.linalg.svdvals(left @ right)[: min(shape)]
    assert_close(values, exact, 1e-10)
    assert_close(u * values @ v, left @ right, 1e-10)
    assert_close(u.mT @ u, torch.eye(len(values), dtype=u.dtype), 1e-10)
    assert_close(v @ v.mT, torch.eye(len(values), dtype=u.dtype), 1e-10)
    assert (u.gather(0, u.abs().argmax(0, keepdim=True)) > 0).all()
    again = decomposed_product(-left, -right)
    assert_close(u, again[0], 1e-9), assert_close(v, again[2], 1e-9)
    assert len(decomposed_product(left * 0, right)[1]) == 0


def test_newcomers_have_their_ranks_of_the_server_s_model() -> None:
    toy = adapted_toy(FlexLoRA(ranks=(1, 2, 3)), unseen=1)
    toy.run()
    assert set(toy.scores(newcomers=True)[3]) == {"global", "truncated"}
    assert toy.algorithm.served(toy.server, toy.context)[1][3] == {"rank": 1}
