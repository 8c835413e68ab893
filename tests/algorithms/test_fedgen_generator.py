"""FedGen: what the server trains its generator on, and its steps written out in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from algorithms.fedgen import FedGen, generated, heads_loss, shares
from algorithms.parts.generators import diversity
from rayfl.engine.transfers import move_trees
from rayfl.params import Tree, copy, leaves
from tests.support.elsewhere import PRETENDED, elsewhere
from tests.support.fedgen_toys import SMALL, TRAIN, fedavg, toy_of
from tests.support.launches import Launches
from tests.support.toy_networks import two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal


def test_inv_gen_4_shares_of_a_class_sum_to_one_where_it_occurs() -> None:
    counts = torch.tensor([[3.0, 0.0, 1.0], [1.0, 0.0, 0.0], [4.0, 0.0, 7.0]])
    found = shares(counts)
    assert_close(found.sum(0), torch.tensor([1.0, 0.0, 1.0]), 1e-7)
    assert found[0].tolist() == [0.375, 0.0, 0.125]


def test_inv_gen_5_diversity_is_in_the_unit_interval_and_1_where_nothing_differs() -> None:
    generator = torch.Generator().manual_seed(0)
    noise, made = torch.randn(8, 4, generator=generator), torch.randn(8, 5, generator=generator)
    assert float(diversity(noise, made[:1].expand(8, 5))) == 1
    assert float(diversity(noise[:1].expand(8, 4), made)) == 1
    assert 0 < float(diversity(noise, made)) < 1
    two = diversity(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 4.0]]))
    # of four pairs, two are of different ones: 2 * (4 / 2) (3 / 3) / 4
    assert float(two) == pytest.approx(np.exp(-1.0))


@PRETENDED
def test_features_are_generated_without_a_transfer() -> None:
    sizes = {"first": ((4, 5), (4,)), "second": ((3, 4), (3,))}
    generator: Tree = {name: {"weight": torch.rand(w), "bias": torch.rand(b)} for name, (w, b) in sizes.items()}
    generator["norm"] = {"gain": torch.rand(4), "offset": torch.rand(4)}
    given = [generator, {"noise": torch.rand(6, 2), "labels": torch.arange(6) % 3, "mean": torch.rand(4)}]
    with elsewhere() as device:
        there, rest = move_trees(given, device)
        with Launches() as counted:
            generated(there, rest["noise"], rest["labels"], (rest["mean"], rest["mean"]))
        assert not counted.waits


def test_inv_gen_6_without_its_steps_the_generator_is_constant() -> None:
    toy = toy_of(generator_steps=0)
    before = copy(toy.server["generator"])
    for _ in range(2):
        assert_equal(toy.step([0, 1])["generator"], before)
    assert toy.server["memory"] == {}


def test_inv_gen_7_one_client_teaches_by_the_cross_entropy_of_its_head() -> None:
    generator = torch.Generator().manual_seed(3)
    made, labels = torch.randn(6, 5, generator=generator), torch.tensor([0, 2, 2, 0, 2, 0])
    weight, bias = torch.randn(3, 5, generator=generator), torch.randn(3, generator=generator)
    alpha = shares(torch.tensor([[3.0, 0.0, 1.0]]))
    found = heads_loss(made, labels, {"weight": weight[None], "bias": bias[None]}, alpha)
    assert float(found) == pytest.approx(float(F.cross_entropy(F.linear(made, weight, bias), labels)), rel=1e-6)
    without = heads_loss(made, labels, {"weight": weight[None]}, alpha)
    assert float(without) == pytest.approx(float(F.cross_entropy(F.linear(made, weight), labels)), rel=1e-6)


def test_inv_gen_7_several_clients_weigh_by_their_samples_of_the_class() -> None:
    generator = torch.Generator().manual_seed(3)
    made, labels = torch.randn(4, 5, generator=generator), torch.tensor([0, 2, 1, 0])
    heads = {"weight": torch.randn(2, 3, 5, generator=generator), "bias": torch.randn(2, 3, generator=generator)}
    alpha = shares(torch.tensor([[3.0, 2.0, 1.0], [1.0, 0.0, 3.0]]))
    expected = sum(
        alpha[k, y] * F.cross_entropy((heads["weight"][k] @ z + heads["bias"][k])[None], y[None]) / 4
        for k in range(2)
        for z, y in zip(made, labels, strict=True)
    )
    assert_close(heads_loss(made, labels, heads, alpha), expected, 1e-6)


def known_of(toy: Toy, cohort: list[int]) -> Tree:
    """Heads and counts by class of plain local updates."""
    trained = [fedavg().step([client])["model"] for client in cohort]
    counts = [F.one_hot(toy.dataset.load(client)["train"].y, 3).double().sum(0) for client in cohort]
    return {
        "weight": torch.stack([model["head.weight"] for model in trained]),
        "bias": torch.stack([model["head.bias"] for model in trained]),
        "counts": torch.stack(counts),
    }


@pytest.mark.parametrize("noise", ["gaussian", "uniform"])
def test_the_servers_steps_are_those_of_pytorch(noise: Any) -> None:
    toy = toy_of(noise=noise, generated_batch=7, diversity_weight=0.5, generator_weight_decay=0.02)
    start, known = copy(toy.server["generator"]), known_of(toy, [0, 1])
    found = toy.step([0, 1])["generator"]
    layers = nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 7)).double()
    names = ("first/weight", "first/bias", "norm/gain", "norm/offset", "second/weight", "second/bias")
    flat = dict(leaves(start["network"]))
    with torch.no_grad():
        for parameter, name in zip(layers.parameters(), names, strict=True):
            parameter.copy_(flat[name])
    rule = torch.optim.Adam(layers.parameters(), 0.01, weight_decay=0.02)
    generator = toy.context.streams.generator("mix", 0, -1)
    drawn = generator.standard_normal if noise == "gaussian" else generator.random
    eps = torch.from_numpy(drawn((5, 7, 4)))
    allowed = (known["counts"] > 1).any(0).nonzero()[:, 0].tolist()
    labels = torch.from_numpy(generator.choice(allowed, (5, 7)))
    for step in range(5):
        made = layers(torch.cat([eps[step], F.one_hot(labels[step], 3).double()], 1))
        value = heads_loss(made, labels[step], known, shares(known["counts"])) + 0.5 * diversity(eps[step], made)
        rule.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        rule.step()
    expected = dict(zip(names, (parameter.detach() for parameter in layers.parameters()), strict=True))
    for name, leaf in leaves(found["network"]):
        assert_close(leaf, expected[name], 1e-9)
    assert_close(found["statistics"]["mean"], layers[1].running_mean, 1e-9)
    assert_close(found["statistics"]["variance"], layers[1].running_var, 1e-9)


def test_moments_and_rate_go_on_from_round_to_round() -> None:
    toy = toy_of(generator_lr_decay=0.5)
    counts = [int(toy.step([0, 1])["memory"]["main"]["count"]["network"]) for _ in range(2)]
    assert counts == [5, 10]
    still = toy_of(generator_lr_decay=1e-12, label_weight=0, feature_weight=0)
    first = copy(still.step([0, 1])["generator"]["network"])
    assert_close(still.step([0, 1])["generator"]["network"], first, 1e-9)


def test_classes_with_one_sample_at_most_are_not_generated() -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = ListDataset([(x[:2], torch.tensor([0, 1])), (x[2:], torch.tensor([2, 1]))], 3)
    toy = Toy(FedGen(**SMALL), data, two_layers(), TRAIN)
    before = copy(toy.server["generator"])
    assert_equal(toy.step([0, 1])["generator"], before)
    assert toy.server["memory"] == {}


def test_what_is_generated_has_the_shape_of_features() -> None:
    server = toy_of().server["generator"]
    statistics = (server["statistics"]["mean"], server["statistics"]["variance"])
    made = generated(server["network"], torch.zeros(3, 4).double(), torch.tensor([0, 1, 2]), statistics)
    assert made.shape == (3, 7)
    assert not torch.equal(made[0], made[1])
