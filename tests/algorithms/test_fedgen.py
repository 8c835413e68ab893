"""FedGen: invariants GEN, both losses written out in PyTorch, and what the generator needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fedavg import FedAvg
from algorithms.fedgen import FedGen, diversity, generated, heads_loss, shares
from rayfl.engine.classification import Classification
from rayfl.engine.client import Client
from rayfl.engine.settings import TrainConfig
from rayfl.engine.tasks import Batch
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.params import Tree, copy, leaves
from tests.support.toys import ListDataset, Toy, TwoLayers, assert_close, assert_equal, random_clients, two_layers

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5)
SMALL: dict[str, Any] = {"noise_dim": 4, "generator_hidden": 6, "generator_steps": 5, "generator_lr": 0.01}


def toy_of(train: TrainConfig = TRAIN, mode: str = "looped", task: Any = None, **options: Any) -> Toy:
    return Toy(FedGen(**{**SMALL, **options}), random_clients(SIZES), task or two_layers(), train, mode=mode)


def fedavg() -> Toy:
    return Toy(FedAvg(), random_clients(SIZES), two_layers(), TRAIN)


@pytest.mark.parametrize("options", [{}, {"generator_steps": 0}])
def test_inv_gen_1_without_both_terms_it_is_fedavg(options: dict[str, Any]) -> None:
    toy, plain = toy_of(label_weight=0, feature_weight=0, **options), fedavg()
    for cohort in ([0, 1], [1, 2, 3], [2]):
        assert_equal(toy.step(cohort)["model"], plain.step(cohort)["model"])
    assert not any(toy.states().values())


def test_inv_gen_2_round_0_is_fedavg_and_later_ones_are_not() -> None:
    toy, plain = toy_of(), fedavg()
    assert_equal(toy.step([0, 1])["model"], plain.step([0, 1])["model"])
    assert not torch.equal(toy.step([0, 1])["model"]["head.weight"], plain.step([0, 1])["model"]["head.weight"])


def test_inv_gen_2_weights_decay_by_round_down_to_the_least() -> None:
    algorithm = FedGen(label_weight=2, feature_weight=0, weight_decay_by_round=0.5)
    assert algorithm.weights_in(0) == (0, 0)
    assert algorithm.weights_in(2) == (0.5, 0)
    assert algorithm.weights_in(60) == (1e-4, 0)


def slopes(label: float, feature: float, **numbers: Any) -> dict[str, Tensor]:
    """The gradient of a client's loss, less that of the plain one."""
    toy = toy_of()
    network = toy.task.network
    model = {name: leaf.requires_grad_() for name, leaf in network.initialize(0).items()}
    sample = toy.dataset.load(0)["train"]
    batch = Batch(sample.x[:4], sample.y[:4])
    generator = torch.Generator().manual_seed(1)
    draw = {
        "labels": torch.tensor([0.0, 2.0, 1.0]).double(),
        "noise": torch.randn(3, 4, generator=generator, dtype=torch.float64),
        "other_noise": torch.randn(4, 4, generator=generator, dtype=torch.float64),
        "active": torch.tensor(1.0),
        **numbers,
    }
    frozen = {"generator": toy.server["generator"], "weights": {"label": label, "feature": feature}}
    loss = toy.algorithm.regularized(model, batch, toy.task, frozen, draw)  # type: ignore[attr-defined]
    extra = loss - toy.task.loss(model, batch)
    found = torch.autograd.grad(extra, list(model.values()), materialize_grads=True)
    return dict(zip(model, found, strict=True))


def test_inv_gen_3_the_labels_term_trains_the_head_alone() -> None:
    found = slopes(1.0, 0.0)
    assert all(found[name].abs().max() < 1e-15 for name in ("inner.weight", "inner.bias"))
    assert all(found[name].abs().max() > 1e-3 for name in ("head.weight", "head.bias"))
    features = slopes(0.0, 1.0)
    assert all(leaf.abs().max() > 1e-4 for leaf in features.values())


def test_inv_gen_3_terms_end_with_their_epochs() -> None:
    assert all(leaf.abs().max() < 1e-15 for leaf in slopes(1.0, 1.0, active=torch.tensor(0.0)).values())
    never, plain = toy_of(regularized_epochs=0), fedavg()
    once, always = toy_of(regularized_epochs=1), toy_of(regularized_epochs=2)
    for _ in range(2):
        found = [toy.step([0, 1])["model"] for toy in (never, plain, once, always)]
    assert_close(found[0], found[1], 1e-12)
    for left, right in ((found[0], found[2]), (found[2], found[3])):
        assert (left["head.weight"] - right["head.weight"]).abs().max() > 1e-6


def test_an_epoch_with_these_terms_has_the_steps_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, active, train = toy_of(TRAIN.model_copy(update={"drop_last": True}), regularized_epochs=1), {}, Client.train

    async def spy(client: Client, *args: Any, draw: Any = None, **options: Any) -> Tree:
        if draw is not None and client.id >= 0:  # not the server
            active[client.id] = draw(np.random.default_rng(0), client.num_steps())["active"].tolist()
        return await train(client, *args, draw=draw, **options)

    monkeypatch.setattr(Client, "train", spy)
    toy.step([0, 1])
    toy.step([0, 1])
    # of 9 and of 12 samples in mini-batches of 4
    assert active == {0: [1, 1, 0, 0], 1: [1, 1, 1, 0, 0, 0]}


def test_labels_weigh_by_their_number_in_the_size_of_a_mini_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, seen, train = toy_of(generated_batch=6, label_weight=3, feature_weight=2), [], Client.train

    async def spy(client: Client, *args: Any, frozen: Any = None, **options: Any) -> Tree:
        if client.id >= 0 and frozen:
            seen.append(frozen["weights"])
        return await train(client, *args, frozen=frozen, **options)

    monkeypatch.setattr(Client, "train", spy)
    toy.step([0])
    toy.step([0])
    # 6 labels for 4 samples, in round 1
    assert seen == [{"label": pytest.approx(3 * 0.98 * 6 / 4), "feature": pytest.approx(2 * 0.98)}]


def test_the_clients_loss_is_the_sum_of_three() -> None:
    toy = toy_of()
    network, server = toy.task.network, toy.server["generator"]
    server["statistics"] = {
        "mean": torch.full((6,), 0.1, dtype=torch.float64),
        "variance": torch.full((6,), 1.7, dtype=torch.float64),
    }
    model, sample = network.initialize(3), toy.dataset.load(1)["train"]
    generator = torch.Generator().manual_seed(2)
    noise, other = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (3, 5))
    draw = {
        "labels": torch.tensor([1, 1, 0]).double(),
        "noise": noise,
        "other_noise": other,
        "active": torch.tensor(1.0),
    }
    layers = nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 7)).double().eval()
    names = ("first/weight", "first/bias", "norm/gain", "norm/offset", "second/weight", "second/bias")
    flat = dict(leaves(server["network"]))
    with torch.no_grad():
        for parameter, name in zip(layers.parameters(), names, strict=True):
            parameter.copy_(flat[name])
        layers[1].running_mean.fill_(0.1)  # type: ignore[union-attr,operator]
        layers[1].running_var.fill_(1.7)  # type: ignore[union-attr,operator]

    def head(eps: Tensor, y: Tensor) -> Tensor:
        made = layers(torch.cat([eps, F.one_hot(y, 3).double()], 1))
        return F.linear(made, model["head.weight"], model["head.bias"])

    for rows in (4, 5):
        batch = Batch(sample.x[:rows], sample.y[:rows])
        logits = network.logits(model, batch.x)
        labels = torch.tensor([1, 1, 0])
        expected = F.cross_entropy(logits, batch.y) + 0.3 * F.cross_entropy(head(noise, labels), labels)
        target = head(other[:rows], batch.y).log_softmax(1)
        expected += 2.0 * F.kl_div(logits.log_softmax(1), target, reduction="batchmean", log_target=True)
        frozen = {"generator": server, "weights": {"label": 0.3, "feature": 2.0}}
        found = toy.algorithm.regularized(model, batch, toy.task, frozen, draw)  # type: ignore[attr-defined]
        assert_close(found, expected.detach(), 1e-12)


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


def test_inv_gen_8_clients_leave_the_generator_as_it_is() -> None:
    toy = toy_of()
    toy.step([0, 1])
    before = copy(toy.server["generator"])
    replies = toy.federation.mean(
        toy.algorithm.guided_update,  # type: ignore[attr-defined]
        [1, 2],
        {"model": toy.server["model"], "generator": toy.server["generator"]},
    )
    assert set(replies) == {"model", "counts"}
    assert_equal(toy.server["generator"], before)
    assert set(toy.server["memory"]["main"]) == {"m", "v", "count"}


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


def test_the_population_policy_averages_what_is_sent() -> None:
    toy, plain = toy_of(aggregation="population"), fedavg()
    plain.algorithm = FedAvg(aggregation="population")
    for host in plain.client_hosts:
        host.algorithm = plain.algorithm
    assert_equal(toy.step([0, 3])["model"], plain.step([0, 3])["model"])


def test_what_is_generated_has_the_shape_of_features() -> None:
    server = toy_of().server["generator"]
    statistics = (server["statistics"]["mean"], server["statistics"]["variance"])
    made = generated(server["network"], torch.zeros(3, 4).double(), torch.tensor([0, 1, 2]), statistics)
    assert made.shape == (3, 7)
    assert not torch.equal(made[0], made[1])


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy_of(mode=mode) for mode in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run())


class FixedBias(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.head.bias.requires_grad_(False)


def test_a_fixed_bias_of_the_head_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'head\.bias' has requires_grad=False"):
        FedGen().check(Classification(Network(FixedBias)), toy_of().context)
    FedGen().check(two_layers(), toy_of().context)
