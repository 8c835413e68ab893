"""FedGen: invariants GEN, both losses written out in PyTorch, and what the generator needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fedavg import FedAvg
from algorithms.fedgen import FedGen, generated
from rayfl.engine.client import Client
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.params import Tree, copy, leaves
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.fedgen_toys import TRAIN, fedavg, toy_of
from tests.support.toy_networks import TwoLayers, two_layers
from tests.support.toys import assert_close, assert_equal


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


def test_what_generated_features_teach_is_a_constant() -> None:
    toy = toy_of()
    network, server = toy.task.network, toy.server["generator"]
    model = {name: leaf.requires_grad_() for name, leaf in network.initialize(0).items()}
    sample, numbers = toy.dataset.load(0)["train"], torch.Generator().manual_seed(1)
    _, other = (torch.randn(n, 4, generator=numbers, dtype=torch.float64) for n in (3, 4))
    seen = generated(server["network"], other, sample.y[:4], tuple(server["statistics"].values()))
    target = F.linear(seen, model["head.weight"], model["head.bias"]).log_softmax(1).detach()
    logs = network.logits(model, sample.x[:4]).log_softmax(1)
    value = F.kl_div(logs, target, reduction="batchmean", log_target=True)
    expected = dict(zip(model, torch.autograd.grad(value, list(model.values())), strict=True))
    assert_close(slopes(0.0, 1.0), expected, 1e-12)


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


def test_the_population_policy_averages_what_is_sent() -> None:
    toy, plain = toy_of(aggregation="population"), fedavg()
    plain.algorithm = FedAvg(aggregation="population")
    for host in plain.client_hosts:
        host.algorithm = plain.algorithm
    assert_equal(toy.step([0, 3])["model"], plain.step([0, 3])["model"])


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
