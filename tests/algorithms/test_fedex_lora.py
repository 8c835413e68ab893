"""FedEx-LoRA: an oracle in plain PyTorch, the exact mean of layers, federated averaging of one client, what travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.fedex_lora import FedExLoRA
from algorithms.parts.adapters import added_and_rest
from rayfl.models.pretrained.mixing import delta_name
from rayfl.params import num_bytes
from tests.support.adapted import TRAIN as IMAGES_TRAIN
from tests.support.adapted import adapted_toy, images
from tests.support.bases import network, trained
from tests.support.low_rank_toys import (
    BASE,
    COHORTS,
    SCALE,
    SHAPES,
    low_rank_toy,
    mean,
    mean_product,
    shares_of,
    trained_alone,
)
from tests.support.toys import assert_close, assert_equal

WEIGHTS = pytest.mark.parametrize("weights", ["samples", "uniform"])


@WEIGHTS
def test_inv_fedex_1_rounds_are_those_of_an_oracle_in_plain_pytorch(weights: Any) -> None:
    """Dense layers: the new one is the mean of the clients' layers, of which the mean factors are a part."""
    toy = low_rank_toy(FedExLoRA(aggregation=weights))
    names = toy.task.network.parameter_names
    model = dict(toy.server["model"])
    assert not any(model[delta_name(site)].any() for site in SHAPES)
    for round, cohort in enumerate(COHORTS):
        sent = [trained_alone(toy, model, names, client, round) for client in cohort]
        shares = shares_of(cohort, weights)
        model |= {name: mean(sent, shares, name) for name in names}
        for site in SHAPES:
            added = sent[0][delta_name(site)]
            layers = [BASE[site] + added + SCALE * mean_product([one], [1.0], site) for one in sent]
            layer = sum(share * one for share, one in zip(shares, layers, strict=True))
            model[delta_name(site)] = layer - BASE[site] - SCALE * mean_product([model], [1.0], site)
        assert_close(toy.step(cohort)["model"], model, 1e-12)
    assert all(float(model[delta_name(site)].abs().max()) > 1e-3 for site in SHAPES)


@WEIGHTS
def test_inv_fedex_2_the_server_s_layer_is_the_mean_of_the_clients_layers(weights: Any) -> None:
    """W + D + s B A of the new model is sum_k p_k (W + D + s B_k A_k), dense; the factors are the clients' means."""
    net = network("vit")
    toy = adapted_toy(FedExLoRA(aggregation=weights))
    generator = torch.Generator().manual_seed(0)
    old = toy.server["model"]
    old |= {name: torch.randn(leaf.shape, generator=generator) / 20 for name, leaf in added_and_rest(old)[0].items()}
    sent, counts = {client: trained(net, client + 1) for client in range(3)}, {0: 5, 1: 8, 2: 9}
    if weights == "uniform":
        counts = dict.fromkeys(counts, 1)
    found = FedExLoRA.combined(old, sent, counts, net.scale)
    shares = [count / sum(counts.values()) for count in counts.values()]
    doubles = [{name: leaf.double() for name, leaf in tree.items()} for tree in sent.values()]
    for site in net.sites:
        layer = found[delta_name(site)].double() + net.scale * product(found, site)
        expected = old[delta_name(site)].double() + net.scale * mean_product(doubles, shares, site)
        assert_close(layer, expected, 3e-8)  # D is rounded once
    for name in net.parameter_names:
        assert_close(found[name], mean(doubles, shares, name).float(), 1e-6)


def product(model: Any, site: str) -> torch.Tensor:
    """B A in float64."""
    found: torch.Tensor = model[f"{site}.lora_B.weight"].double() @ model[f"{site}.lora_A.weight"].double()
    return found


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_fedex_3_with_one_client_a_round_it_is_federated_averaging(mode: str) -> None:
    """Nothing is added to the base, to the bit."""
    exact, plain = (low_rank_toy(method, mode) for method in (FedExLoRA(), FedAvg()))
    over_images, fedit = (
        adapted_toy(method, mode, train=IMAGES_TRAIN.model_copy(update={"clients_per_round": 1}))
        for method in (FedExLoRA(), FedAvg())
    )
    for one, other in ((exact, plain), (over_images, fedit)):
        for client in (0, 2, 1):
            model, expected = one.step([client])["model"], other.step([client])["model"]
            added, rest = added_and_rest(model)
            assert not any(leaf.any() for leaf in added.values())
            assert_equal(rest, expected) if mode == "looped" else assert_close(rest, expected, 1e-6)


def test_inv_fedex_4_the_residual_is_that_of_the_deviations() -> None:
    """sum p_k B_k A_k - B A = sum p_k (B_k - B) (A_k - A), of rank (n - 1) r at most with n clients."""
    net = network("vit")
    sent, counts = {client: trained(net, client + 1) for client in range(3)}, {0: 5, 1: 8, 2: 9}
    old = {**sent[0], **{delta_name(site): torch.zeros(32, 32) for site in net.sites}}
    found = FedExLoRA.combined(old, sent, counts, net.scale)
    for site in net.sites:
        a, b = (
            {client: tree[f"{site}.lora_{part}.weight"].double() for client, tree in [*sent.items(), (-1, found)]}
            for part in "AB"
        )
        away = [counts[client] / 22 * (b[client] - b[-1]) @ (a[client] - a[-1]) for client in sent]
        assert_close(found[delta_name(site)].double(), net.scale * torch.stack(away).sum(0), 1e-6)
        values = torch.linalg.svdvals(found[delta_name(site)].double())
        assert values[6] < 1e-6 * values[0] and values[5] > 1e-3 * values[0]


def test_inv_fedex_5_clients_with_a_common_factor_leave_no_residual() -> None:
    net = network("vit")
    first, second = trained(net, 1), trained(net, 2)
    for part in "AB":
        common = {**second, **{name: leaf for name, leaf in first.items() if f"lora_{part}" in name}}
        old = {**first, **{delta_name(site): torch.zeros(32, 32) for site in net.sites}}
        found = FedExLoRA.combined(old, {0: first, 1: common}, {0: 1, 1: 1}, net.scale)
        assert all(float(leaf.abs().max()) < 1e-7 for leaf in added_and_rest(found)[0].values())


def test_stacked_is_looped_and_hosts_make_no_difference() -> None:
    one, other, many = (
        adapted_toy(FedExLoRA()),
        adapted_toy(FedExLoRA(), "vectorized"),
        adapted_toy(FedExLoRA(), hosts=3),
    )
    found = one.run()
    assert_close(found, other.run(), 1e-5)
    assert_equal(found, many.run())
    assert any(leaf.any() for leaf in added_and_rest(found["model"])[0].values())
    scores = other.scores()
    for client, own in one.scores().items():
        assert set(own) == {"global"} and abs(own["global"].loss - scores[client]["global"].loss) < 1e-5
    double, stacked = low_rank_toy(FedExLoRA()), low_rank_toy(FedExLoRA(), "vectorized")
    for cohort in COHORTS:
        assert_close(double.step(cohort), stacked.step(cohort), 1e-10)


def test_down_go_the_factors_and_what_was_added_up_the_factors() -> None:
    toy = adapted_toy(FedExLoRA(), dataset=images((5, 8, 9, 6)))
    added, rest = added_and_rest(toy.server["model"])
    toy.step([1, 3])
    sizes = (num_bytes(added) + num_bytes(rest), num_bytes(rest))
    assert toy.federation.traffic.by_client == dict.fromkeys([1, 3], sizes)
    assert toy.algorithm.sent(toy.server).keys() == {"added", "model"}
    assert not any(toy.states().values())


def test_newcomers_have_the_server_s_model() -> None:
    toy = adapted_toy(FedExLoRA(), unseen=1)
    toy.run()
    assert set(toy.scores(newcomers=True)[3]) == {"global"}
