"""HetLoRA: ranks that a client has not are not moved, weights are norms of products, and pruned ranks stay away."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.hetlora import HetLoRA, size_of
from algorithms.parts.adapters import adapters_of
from algorithms.parts.ranks import cut, padded, rank_in, sites_of
from rayfl.errors import ConfigError
from tests.support.adapted import SIZES, TRAIN, adapted_toy, images
from tests.support.bases import trained, vit
from tests.support.toy_networks import two_layers
from tests.support.toys import assert_close, assert_equal

ALL = TRAIN.model_copy(update={"clients_per_round": "all"})
NO_PRUNING: dict[str, Any] = {"kept_share": 1.0, "pruning_weight": 0.0}


def models(*ranks: int) -> dict[int, dict[str, Tensor]]:
    """Models of some ranks, some way from their initial values; by client."""
    return {client: cut(trained(vit(), client + 1), rank) for client, rank in enumerate(ranks)}


def test_inv_hetlora_of_equal_ranks_and_weights_is_fedit() -> None:
    """p_k = 1/n, to the bit."""
    one = adapted_toy(HetLoRA(aggregation="uniform", **NO_PRUNING))
    assert_equal(one.run()["model"], adapted_toy(FedAvg(aggregation="uniform")).run()["model"])
    one = adapted_toy(HetLoRA(aggregation="samples", **NO_PRUNING))
    assert_equal(one.run()["model"], adapted_toy(FedAvg()).run()["model"])


@pytest.mark.parametrize(
    "optimizer", [{}, {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1}], ids=["sgd", "adamw"]
)
def test_inv_hetlora_a_client_of_rank_1_trains_an_adapter_of_rank_1(optimizer: dict[str, Any]) -> None:
    """The zeros that its adapter is padded with stay zero, with the same scale s = 2."""
    train = TRAIN.model_copy(update={"clients_per_round": 1, **optimizer})
    options: dict[str, Any] = {"dataset": images((9,)), "train": train}
    wide = adapted_toy(HetLoRA(ranks=(1,), **NO_PRUNING), **options)
    narrow = adapted_toy(FedAvg(), model={"adapter": {"r": 1, "alpha": 2}}, **options)
    begun = wide.server["model"]
    assert_equal(cut(begun, 1), narrow.server["model"])
    found = wide.run()["model"]
    assert_close(cut(found, 1), narrow.run()["model"], 1e-6)
    for site in sites_of(found):  # nobody has the other ranks
        assert torch.equal(found[f"{site}.lora_A.weight"][1:], begun[f"{site}.lora_A.weight"][1:])
        assert not found[f"{site}.lora_B.weight"][:, 1:].any()


@pytest.mark.parametrize("padding", ["zeros", "renormalised"])
def test_inv_hetlora_padding_moves_a_rank_by_the_weights_of_others_alone(padding: Any) -> None:
    """A rank is the weighted sum of those that have it; renormalised, their mean; if nobody has it, it stays."""
    old, sent, weights = trained(vit(), 0), models(1, 2, 1), {0: 0.2, 1: 0.3, 2: 0.5}
    found = HetLoRA(padding=padding).combined(old, sent, weights)
    for site in sites_of(old):
        a, b = f"{site}.lora_A.weight", f"{site}.lora_B.weight"
        first = sum(weights[k] * sent[k][a][0].double() for k in sent)
        assert_close(found[a][0], first.float(), 1e-6)
        share = 0.3 if padding == "zeros" else 1.0
        assert_close(found[a][1], share * sent[1][a][1], 1e-6)
        assert_close(found[b][:, 1], share * sent[1][b][:, 1], 1e-6)
        assert torch.equal(found[a][2], old[a][2]) and torch.equal(found[b][:, 2], old[b][:, 2])
    for name in vit().groups["head"]:
        assert_close(found[name], sum(weights[k] * sent[k][name] for k in sent), 1e-6)


def test_inv_hetlora_weights_are_the_norms_of_products() -> None:
    """p_k = ||B_k A_k|| / sum, over all layers, from Gram matrices."""
    sent, toy = models(1, 3, 2), adapted_toy(HetLoRA())
    norms = {}
    for client, tree in sent.items():
        products = [tree[f"{s}.lora_B.weight"].double() @ tree[f"{s}.lora_A.weight"].double() for s in sites_of(tree)]
        norms[client] = float(torch.stack([product.square().sum() for product in products]).sum().sqrt())
    found = HetLoRA().weights(sent, toy.federation)
    assert found == pytest.approx({client: norm / sum(norms.values()) for client, norm in norms.items()})
    # a client that adds nothing counts nothing, unless that is true of all
    nothing = {name: torch.zeros_like(leaf) if ".lora_B." in name else leaf for name, leaf in sent[1].items()}
    assert HetLoRA().weights({0: sent[0], 1: nothing}, toy.federation) == {0: 1.0, 1: 0.0}
    assert HetLoRA().weights({0: nothing, 1: nothing}, toy.federation) == {0: 1, 1: 1}
    found_model = HetLoRA().combined(trained(vit(), 0), {0: sent[0], 1: nothing}, {0: 1.0, 1: 0.0})
    assert_equal(cut(found_model, 1), sent[0])


def test_inv_hetlora_a_pruned_rank_never_returns() -> None:
    toy = adapted_toy(HetLoRA(ranks=(3, 2), kept_share=0.5, pruning_weight=1.0), train=ALL)
    ranks = [dict(toy.server["ranks"])]
    for _ in range(6):
        ranks.append(dict(toy.step([0, 1, 2, 3])["ranks"]))
    assert ranks[0] == {"0": 3, "1": 2, "2": 3, "3": 2}
    for before, after in pairwise(ranks):
        assert all(1 <= after[client] <= before[client] for client in before)
        assert all(after[c] in (before[c], max(before[c] // 2, 1)) for c in before)
    assert ranks[-1] != ranks[0]
    served = toy.algorithm.served(toy.server, toy.context)[1]
    assert {str(client): own["rank"] for client, own in served.items()} == ranks[-1]


def test_the_term_holds_the_last_ranks_and_has_a_gradient_at_zero() -> None:
    """sum ||B[:, last]|| ||A[last]||; where B is zero the gradient is zero, not undefined."""
    tree, last = adapters_of(trained(vit(), 1), vit()), torch.tensor([0.0, 1.0, 1.0])
    pairs = [(tree[f"{site}.lora_B.weight"][:, 1:], tree[f"{site}.lora_A.weight"][1:]) for site in sites_of(tree)]
    dense = sum(b.norm() * a.norm() for b, a in pairs)
    assert_close(size_of(tree, last), dense, 1e-5)
    zero = {name: torch.zeros_like(leaf) if ".lora_B." in name else leaf for name, leaf in tree.items()}
    held = {name: leaf.clone().requires_grad_() for name, leaf in zero.items()}
    size = size_of(held, last)
    gradients = torch.autograd.grad(size, list(held.values()))
    assert size == 0 and not any(gradient.any() for gradient in gradients)
    held = {name: leaf.clone().requires_grad_() for name, leaf in tree.items()}
    gradients = dict(zip(held, torch.autograd.grad(size_of(held, last), list(held.values())), strict=True))
    assert all(not g[0].any() if ".lora_A." in n else not g[:, 0].any() for n, g in gradients.items())


def test_ranks_are_in_turn_or_drawn_once_for_each_client() -> None:
    toy = adapted_toy(HetLoRA())
    turn, drawn = HetLoRA(ranks=(1, 3)), HetLoRA(ranks=(1, 3), rank_choice="drawn")
    assert [turn.first_rank(client, 3, toy.context) for client in range(5)] == [1, 3, 1, 3, 1]
    found = [drawn.first_rank(client, 3, toy.context) for client in range(60)]
    assert found == [drawn.first_rank(client, 3, toy.context) for client in range(60)]
    assert 15 < found.count(1) < 45 and set(found) == {1, 3}
    assert HetLoRA().first_rank(7, 3, toy.context) == 3


def test_cutting_what_was_padded_gives_it_back() -> None:
    for tree in models(1, 2, 3).values():
        wide = padded(tree, 3)
        assert rank_in(wide) == 3
        assert_equal(cut(wide, rank_in(tree)), tree)


def test_newcomers_have_their_ranks_of_the_server_s_model() -> None:
    toy = adapted_toy(HetLoRA(ranks=(1, 2, 3)), unseen=1)
    toy.run()
    rows = toy.scores(newcomers=True)
    assert set(rows) == {3} and set(rows[3]) == {"global", "truncated"}
    assert toy.algorithm.served(toy.server, toy.context)[1][3] == {"rank": 1}


@pytest.mark.parametrize(
    ("method", "model", "train", "message"),
    [
        (HetLoRA(), {"adapter": {"r": 3, "alpha": 6, "trains": ["b"]}}, {}, r"hetlora needs model\.adapter\.trains"),
        (HetLoRA(ranks=(1, 4)), None, {}, r"algorithm\.ranks has 4, but .* of rank 3: set model\.adapter\.r=4"),
        (HetLoRA(), None, {"persist_optimizer": True}, r"hetlora needs train\.persist_optimizer=false"),
    ],
    ids=["one factor", "rank", "optimizer"],
)
def test_what_cannot_work_is_refused(method: HetLoRA, model: Any, train: dict[str, Any], message: str) -> None:
    toy = adapted_toy(method, model=model, train=TRAIN.model_copy(update=train), dataset=images(SIZES))
    with pytest.raises(ConfigError, match=message):
        method.check(toy.task, toy.context)
    with pytest.raises(ConfigError, match=r"hetlora needs a model with adapters .*model=pretrained"):
        method.check(two_layers(), toy.context)
