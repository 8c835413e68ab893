"""FedETF: invariants ETF of the frame, of the loss, and of personalization; whole runs by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from algorithms.fedetf import FedETF, etf_logits
from algorithms.parts.balanced import log_prior
from algorithms.parts.replaced_heads import simplex_etf
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch
from tests.support.fedetf_toys import SKEWED, TRAIN, Oracle, steps, toy_of
from tests.support.partial_toys import held_out_accuracy, labelled, planted_clients, vectors
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


@pytest.mark.parametrize(("classes", "dim"), [(2, 2), (3, 3), (3, 7), (10, 64)])
def test_inv_etf_1_the_classifier_is_a_simplex_equiangular_tight_frame(classes: int, dim: int) -> None:
    v = simplex_etf(classes, dim, np.random.default_rng(3)).numpy()
    assert v.shape == (classes, dim)
    expected = np.full((classes, classes), -1 / (classes - 1))
    np.fill_diagonal(expected, 1)
    np.testing.assert_allclose(v @ v.T, expected, atol=1e-14)
    np.testing.assert_allclose(v.sum(0), 0, atol=1e-14)
    assert np.linalg.matrix_rank(v) == classes - 1
    assert np.abs(v - simplex_etf(classes, dim, np.random.default_rng(4)).numpy()).max() > 1e-2


def test_inv_etf_2_the_classifier_stays_and_is_the_seeds() -> None:
    toy = toy_of(FedETF(projection_dim=5))
    before = copy(toy.server)
    for cohort in ([0, 1], [2, 3], [0, 3]):
        toy.step(cohort)
        assert torch.equal(toy.server["classifier"], before["classifier"])
    for name in ("projection", "shared"):
        assert all((toy.server[name][key] != before[name][key]).any() for key in before[name])
    assert toy.server["temperature"] != before["temperature"] == 1
    assert_equal(toy_of(FedETF(projection_dim=5)).server, before)
    assert (toy_of(FedETF(projection_dim=5), seed=1).server["classifier"] != before["classifier"]).all()


@MODES
def test_inv_etf_3_a_rotation_of_the_classifier_rotates_the_projection_and_nothing_else(mode: str) -> None:
    rotation = torch.from_numpy(np.linalg.qr(np.random.default_rng(1).standard_normal((4, 4)))[0])
    one, other = (toy_of(FedETF(projection_dim=4, alternations=2), mode=mode) for _ in range(2))
    other.server = rotated(other.server, rotation)
    for cohort in ([0, 2], [1, 2, 3]):
        assert_close(rotated(one.step(cohort), rotation), other.step(cohort), 1e-12)
    ours, theirs = one.scores(final=True), other.scores(final=True)
    for row in ("global", "finetuned"):
        for client, found in vectors(ours, row).items():
            assert found == pytest.approx(vectors(theirs, row)[client], abs=1e-11)


def rotated(server: Tree, rotation: Tensor) -> Tree:
    """The same model with another U."""
    return {
        **server,
        "projection": {"matrix": rotation @ server["projection"]["matrix"],
                       "offset": rotation @ server["projection"]["offset"]},
        "classifier": server["classifier"] @ rotation.T,
    }  # fmt: skip


def test_inv_etf_4_logits_are_cosines_times_the_temperature_whatever_the_length_of_features() -> None:
    generator = torch.Generator().manual_seed(0)
    features, matrix = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((6, 7), (4, 7)))
    v, beta = simplex_etf(3, 4, np.random.default_rng(0)), torch.tensor(2.5, dtype=torch.float64)
    projection = {"matrix": matrix, "offset": torch.zeros(4, dtype=torch.float64)}
    z = etf_logits(projection, beta, v, features)
    assert_close(z, etf_logits(projection, beta, v, 1e3 * features), 1e-12)
    for row, x in zip(z, features, strict=True):
        mu = matrix @ x
        for found, vector in zip(row, v, strict=True):
            assert abs(float(found) - 2.5 * float(mu @ vector / mu.norm() / vector.norm())) < 1e-12
    assert etf_logits(projection, beta, v, torch.zeros_like(features)).tolist() == [[0, 0, 0]] * 6


@MODES
def test_inv_etf_5_with_equally_many_samples_of_every_class_the_exponent_does_not_count(mode: str) -> None:
    data = labelled([0, 1, 2] * 3, [2, 1, 0] * 4, [1, 2, 0], [0, 0, 1, 1, 2, 2])
    one, other = (toy_of(FedETF(balance_exponent=gamma), dataset=data, mode=mode) for gamma in (0.0, 2.5))
    for _ in range(TRAIN.rounds):
        assert_close(one.step(), other.step(), 1e-12)


def test_inv_etf_6_the_loss_is_the_papers() -> None:
    toy = toy_of(FedETF(balance_exponent=0.7, temperature=2.0))
    part, server, counts = SKEWED.load(3)["train"], toy.server, torch.tensor([1.0, 3.0, 3.0], dtype=torch.float64)
    head = {"head.weight": torch.zeros(3, 7).double(), "head.bias": torch.zeros(3).double()}
    trained = {"model": server["shared"], "projection": server["projection"], "temperature": server["temperature"]}
    frozen = {"head": head, "classifier": server["classifier"], "prior": log_prior(counts, 0.7)}
    mask = torch.tensor([1.0, 1, 1, 1, 1, 0, 0], dtype=torch.float64)
    found = toy.algorithm.objective(trained, Batch(part.x, part.y, mask), toy.task, frozen, None)
    z, y = Oracle(server, 3)(part.x[:5]).detach().numpy(), part.y[:5].numpy()
    shares = counts.numpy() ** 0.7 * np.exp(z)
    assert abs(float(found) + np.log(shares[np.arange(5), y] / shares.sum(1)).mean()) < 1e-13


@MODES
def test_inv_etf_7_a_client_of_one_class_sends_back_what_it_received(mode: str) -> None:
    train = TRAIN.model_copy(update={"weight_decay": 0.0})
    data = labelled([1] * 5, [0] * 7)
    toy = toy_of(FedETF(), train, dataset=data, mode=mode)
    before = copy(toy.server)
    assert_equal(toy.step([0, 1]), before)
    counted = toy_of(FedETF(absent_count=1), train, dataset=data, mode=mode)
    assert (counted.step([0, 1])["projection"]["matrix"] != before["projection"]["matrix"]).any()


def test_inv_etf_8_without_personalization_the_fine_tuned_model_is_the_global_one() -> None:
    for idle in ({"alternations": 0}, {"alternation_epochs": 0}, {"classifier_lr": 0.0, "projection_lr": 0.0}):
        toy = toy_of(FedETF(finetune_epochs=0, **idle))
        toy.step([0, 1])
        scores = toy.scores(final=True)
        assert vectors(scores, "finetuned") == vectors(scores, "global")
        assert all(set(rows) == {"global"} for rows in toy.scores().values())


def test_inv_etf_9_messages_have_the_size_of_what_is_trained_and_clients_keep_nothing() -> None:
    toy = toy_of(FedETF(projection_dim=5))
    up = (5 * 7 + 7) + (7 * 5 + 5) + 1
    for cohort in ([0, 1], [2, 3]):
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (8 * (up + 3 * 5), 8 * up))
    assert not any(toy.states().values())


def rule_of(train: TrainConfig, parameters: Any, lr: float | None = None) -> Any:
    """The configured optimizer in PyTorch."""
    rate = train.lr if lr is None else lr
    if train.optimizer == "sgd":
        return torch.optim.SGD(parameters, rate, momentum=train.momentum, weight_decay=train.weight_decay)
    return torch.optim.Adam(parameters, rate)


OPTIMIZERS: list[dict[str, Any]] = [{"momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam", "lr": 0.01}]


@MODES
@pytest.mark.parametrize("dim", [None, 5])
@pytest.mark.parametrize("changes", OPTIMIZERS, ids=["momentum", "adam"])
def test_runs_are_those_of_plain_pytorch(changes: dict[str, Any], dim: int | None, mode: str) -> None:
    """Rounds of unequal clients, some of which lack classes; then the personalization of all."""
    train = TrainConfig.model_validate({**TRAIN.model_dump(), "momentum": 0.0, "weight_decay": 0.0, **changes})
    method = FedETF(
        projection_dim=dim, temperature=3.0, balance_exponent=0.7, finetune_epochs=1, alternations=3,
        alternation_epochs=2, classifier_lr=0.2, projection_lr=0.03,
    )  # fmt: skip
    toy = toy_of(method, train, mode=mode)
    expected = copy(toy.server)
    for cohort in ([0, 2], [1, 2, 3], [0, 1]):
        locals_, sizes = [], [len(SKEWED.load(k)["train"]) for k in cohort]
        for client in cohort:
            model = Oracle(expected, dim or 3)
            trained = [*model.body.parameters(), *model.g.parameters(), model.beta]
            steps(toy, model, client, "batches", 2, 0.7, rule_of(train, trained))
            locals_.append(model.tree())
        expected = {**mean(locals_, [n / sum(sizes) for n in sizes]), "classifier": expected["classifier"]}
        assert_close(toy.step(cohort), expected, 1e-12)
    scores = toy.scores(final=True)
    for client in range(4):
        model, test = Oracle(expected, dim or 3), SKEWED.load(client)["test"]
        assert abs(scores[client]["global"].loss - loss_of(model, test)) < 1e-12
        trained = [*model.body.parameters(), *model.g.parameters(), model.beta]
        steps(toy, model, client, "batches.finetune", 1, 0.7, rule_of(train, trained))
        for turn in range(3):
            model.v.requires_grad_(True)
            plain = torch.optim.SGD([model.v], 0.2)
            steps(toy, model, client, f"batches.finetune.V{turn}", 2, None, plain)
            model.v.requires_grad_(False)
            again = rule_of(train, list(model.g.parameters()), 0.03)
            steps(toy, model, client, f"batches.finetune.g{turn}", 2, None, again)
        assert abs(scores[client]["finetuned"].loss - loss_of(model, test)) < 1e-12
        assert (model.v - expected["classifier"]).abs().max() > 1e-2


def mean(trees: list[Tree], weights: list[float]) -> Tree:
    """The weighted mean of some trees of tensors."""
    if isinstance(trees[0], Tensor):
        return sum(weight * tree for weight, tree in zip(weights, trees, strict=True))
    return {name: mean([tree[name] for tree in trees], weights) for name in trees[0] if name != "classifier"}


def loss_of(model: Oracle, part: Any) -> float:
    return float(nn.functional.cross_entropy(model(part.x), part.y).detach())


def test_a_class_of_which_the_client_has_nothing_counts_as_said() -> None:
    """One step of client 1, which lacks class 0: left out, or in the softmax with the given count."""
    train = TrainConfig(rounds=1, clients_per_round=1, local_epochs=1, lr=0.1)
    part = SKEWED.load(1)["train"]
    for count in (0.0, 0.25, 1.0):
        toy = toy_of(FedETF(absent_count=count), train)
        model = Oracle(toy.server, 3)
        shares = torch.tensor([count, 1.0, 3.0], dtype=torch.float64) * model(part.x).exp()
        (-(shares[torch.arange(4), part.y] / shares.sum(1)).log()).mean().backward()
        moved = toy.server["projection"]["matrix"] - 0.1 * model.g.weight.grad  # type: ignore[operator]
        assert_close(toy.step([1])["projection"]["matrix"], moved, 1e-13)


def test_nesterov_and_dampening_are_no_matter_of_the_classifiers_plain_steps() -> None:
    train = TrainConfig.model_validate({**TRAIN.model_dump(), "nesterov": True})
    looped, stacked = (
        toy_of(FedETF(alternations=2, projection_lr=0), train, mode=mode) for mode in ("looped", "vectorized")
    )
    plain = toy_of(FedETF(alternations=2, projection_lr=0, finetune_epochs=0))
    for toy in (looped, stacked, plain):
        toy.step([0, 1, 2])
    assert_close(looped.server, stacked.server, 1e-12)
    nesterov = toy_of(FedETF(alternations=2, projection_lr=0, finetune_epochs=0), train)
    nesterov.server, nesterov.round = copy(plain.server), 1
    assert vectors(nesterov.scores(final=True), "finetuned") == vectors(plain.scores(final=True), "finetuned")


def test_refused() -> None:
    toy = toy_of(FedETF())
    with pytest.raises(ConfigError, match=r"projection_dim is 2, in which 3 classes .* set 3 or more"):
        FedETF(projection_dim=2).check(toy.task, toy.context)
    FedETF(projection_dim=3).check(toy.task, toy.context)
    shallow = two_layers(classes=1)
    with pytest.raises(ConfigError, match="needs two of them at least"):
        FedETF().check(shallow, toy.context)


@MODES
def test_running_statistics_are_part_of_the_body(mode: str) -> None:
    toy = toy_of(
        FedETF(alternations=1), TRAIN.model_copy(update={"batch_size": 3}), task=normalized_layers(), mode=mode
    )
    before = copy(toy.server["shared"])
    toy.step([0, 3])
    assert (toy.server["shared"]["norm.running_mean"] != before["norm.running_mean"]).all()
    after = copy(toy.server)
    toy.scores(final=True)
    assert_equal(toy.server, after)


def test_vectorized_agrees_with_looped_on_ragged_mini_batches() -> None:
    looped, stacked = (toy_of(FedETF(alternations=2), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 2]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-12)
    ours, theirs = (vectors(toy.scores(final=True), "finetuned") for toy in (looped, stacked))
    for client, found in ours.items():
        assert found == pytest.approx(theirs[client], abs=1e-10)


@pytest.mark.slow
def test_own_classifiers_serve_clients_with_few_of_the_classes() -> None:
    train = TRAIN.model_copy(update={"rounds": 15, "clients_per_round": 6, "local_epochs": 2, "batch_size": 10})
    toy = Toy(FedETF(temperature=5.0), planted_clients("classes"), two_layers(12, 8), train, mode="vectorized")
    toy.run()
    shared, own = (held_out_accuracy(toy, row, final=True) for row in ("global", "finetuned"))
    assert shared > 0.6 and own > shared + 0.03, (shared, own)
