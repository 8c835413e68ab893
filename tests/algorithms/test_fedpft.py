"""FedPFT: mixtures against closed forms and steps of EM, draws, whole rounds in plain PyTorch, what travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from algorithms.fedpft import FedPFT
from algorithms.parts.feature_mixtures import drawn, fitted, spread
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy
from tests.support.partial_toys import labelled
from tests.support.toy_networks import softmax_regression, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

UNEQUAL = ([0, 1] * 9, [1] * 7 + [2] * 4, [2, 0, 2, 2, 1] * 2, [0, 0, 1])
"""Clients of 18, 11, 10 and 3 samples, of which two lack a class and one has a single sample of one."""
TRAIN = TrainConfig(rounds=1, clients_per_round="all", batch_size=4, lr=0.1)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
KINDS = pytest.mark.parametrize("covariance", ["spherical", "diag", "full"])
RIDGE = 1e-6
"""What scikit-learn adds to variances."""


def toy_of(method: FedPFT, **options: Any) -> Toy:
    return Toy(method, labelled(*UNEQUAL), **{"task": two_layers(), "train": TRAIN, **options})


def fit(z: torch.Tensor, y: torch.Tensor, **options: Any) -> Tree:
    usual = {"components": 1, "covariance": "spherical", "least": 2, "tolerance": 1e-12, "iterations": 1000, "seed": 3}
    return fitted(z, y, **{**usual, "dtype": torch.float64, **options})


def entries(covariance: np.ndarray, kind: str) -> np.ndarray:
    """What is sent of a whole covariance of one Gaussian."""
    if kind == "full":
        return np.array([covariance[i, j] for i in range(len(covariance)) for j in range(i, len(covariance))])
    diagonal = covariance.diagonal()
    return diagonal if kind == "diag" else np.array([diagonal.mean()])


def closed_form(z: np.ndarray, y: np.ndarray, kind: str) -> tuple[list[int], list[np.ndarray], list[np.ndarray]]:
    """Of one Gaussian for each class with two samples or more, by loops: classes, means, entries of covariances."""
    labels, means, covariances = [], [], []
    for label in sorted({*y.tolist()}):
        own = z[y == label]
        if len(own) < 2:
            continue
        mean = own.sum(0) / len(own)
        scatter = RIDGE * np.eye(z.shape[1])
        for row in own:
            scatter += np.outer(row - mean, row - mean) / len(own)
        labels.append(label)
        means.append(mean)
        covariances.append(entries(scatter, kind))
    return labels, means, covariances


@KINDS
def test_inv_fedpft_1_one_gaussian_is_the_mean_and_the_covariance_of_a_class(covariance: str) -> None:
    generator = torch.Generator().manual_seed(0)
    z, y = (
        torch.randn(20, 4, generator=generator, dtype=torch.float64),
        torch.tensor([0, 2, 2, 0, 2] * 3 + [2] * 4 + [1]),
    )
    found = fit(z, y, covariance=covariance)
    labels, means, covariances = closed_form(z.numpy(), y.numpy(), covariance)
    assert found["labels"].tolist() == labels == [0, 2] and found["counts"].tolist() == [6, 13]
    np.testing.assert_allclose(found["means"].numpy(), means, atol=1e-12)
    np.testing.assert_allclose(found["covariances"].numpy(), covariances, atol=1e-12)
    assert found["weights"].tolist() == [1, 1]


@KINDS
def test_inv_fedpft_2_a_further_step_of_em_changes_nothing(covariance: str) -> None:
    """By loops, from what is sent: shares of each sample, then weights, means and covariances."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(60, 3, generator=generator, dtype=torch.float64) + 4 * (torch.arange(60) % 3 == 0)[:, None]
    found = fit(z, torch.zeros(60, dtype=torch.int64), covariance=covariance, components=2)
    rows, columns = np.triu_indices(3)
    wholes = []
    for kept in found["covariances"].numpy():
        whole = np.eye(3) * kept if covariance != "full" else np.zeros((3, 3))
        if covariance == "full":
            whole[rows, columns] = whole[columns, rows] = kept
        wholes.append(whole)
    density = np.zeros((60, 2))
    for i, row in enumerate(z.numpy()):
        for j, whole in enumerate(wholes):
            apart = row - found["means"][j].numpy()
            exponent = -apart @ np.linalg.solve(whole, apart) / 2
            density[i, j] = float(found["weights"][j]) * np.exp(exponent) / np.sqrt(np.linalg.det(whole))
    shares = density / density.sum(1, keepdims=True)
    for j in range(2):
        mean = shares[:, j] @ z.numpy() / shares[:, j].sum()
        apart = z.numpy() - mean
        scatter = (shares[:, j, None] * apart).T @ apart / shares[:, j].sum() + RIDGE * np.eye(3)
        assert abs(float(found["weights"][j]) - shares[:, j].mean()) < 1e-6
        np.testing.assert_allclose(found["means"][j].numpy(), mean, atol=1e-5)
        np.testing.assert_allclose(found["covariances"][j].numpy(), entries(scatter, covariance), atol=1e-5)
    assert 0.2 < float(found["weights"].min()) < 0.5


@KINDS
def test_inv_fedpft_3_draws_have_the_moments_of_the_mixture(covariance: str) -> None:
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(400, 3, generator=generator, dtype=torch.float64) @ torch.randn(3, 3, generator=generator).double()
    y = (torch.arange(400) % 4 == 0).long()
    mixtures = fit(z, y, covariance=covariance, components=2)
    many = {**mixtures, "counts": torch.tensor([60000, 20000], dtype=torch.int32)}
    features, labels = drawn(many, np.random.Generator(np.random.Philox(0)))
    assert torch.bincount(labels).tolist() == [60000, 20000]
    for label in (0, 1):
        own, real = features[labels == label], z[y == label]
        assert_close(own.mean(0), real.mean(0), 0.06)  # EM keeps the mean of the samples
        if covariance == "full":
            assert_close(own.T.cov(), real.T.cov(correction=0), 0.15)


def test_the_root_of_a_covariance() -> None:
    noise = torch.randn(5, 3, dtype=torch.float64)
    assert_close(spread(noise, torch.tensor([4.0], dtype=torch.float64)), 2 * noise, 1e-12)
    assert_close(
        spread(noise, torch.tensor([1.0, 4, -1e-9], dtype=torch.float64)), noise * torch.tensor([1.0, 2, 0]), 1e-12
    )
    whole = torch.tensor([[2.0, 1, 0], [1, 3, 1], [0, 1, 1]], dtype=torch.float64)
    root = spread(torch.eye(3, dtype=torch.float64), whole[torch.triu_indices(3, 3).unbind()])
    assert_close(root @ root, whole, 1e-12)
    assert_close(root, root.T, 1e-12)


def expected(toy: Toy, method: FedPFT, cohort: list[int]) -> Tree:
    """The last layer after a round, in plain PyTorch and loops; one Gaussian for each class."""
    model, streams = toy.server["model"], toy.context.streams
    generator, features, labels = streams.generator("virtual", 0), [], []
    for k in cohort:
        data = toy.dataset.load(k)["train"]
        z = F.linear(data.x, model["inner.weight"], model["inner.bias"]).relu().numpy()
        for label, mean, entry in zip(*closed_form(z, data.y.numpy(), method.covariance), strict=True):
            count = int((data.y == label).sum())
            generator.multinomial(count, [1.0])
            noise = generator.standard_normal((count, z.shape[1]))
            precision = getattr(np, method.precision)
            entry, mean = (one.astype(precision).astype(np.float64) for one in (entry, mean))
            features.append(mean + noise * np.sqrt(entry))
            labels += [label] * count
    x, y = torch.from_numpy(np.concatenate(features)), torch.tensor(labels)
    head = nn.Linear(x.shape[1], 3).double()
    head.load_state_dict({"weight": model["head.weight"], "bias": model["head.bias"]})
    optimizer = torch.optim.AdamW(head.parameters(), lr=method.server_lr, weight_decay=method.server_weight_decay)
    size = method.server_batch_size or len(y)
    steps = method.server_epochs * -(-len(y) // size)
    for index in plan_batches(len(y), size, steps, streams.generator("batches", 0, -1)).batches(CPU):
        optimizer.zero_grad()
        F.cross_entropy(head(x[index]), y[index]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {f"head.{name}": leaf.detach() for name, leaf in head.state_dict().items()}


@pytest.mark.parametrize(
    "options", [{}, {"covariance": "diag", "precision": "float32", "server_batch_size": None, "server_lr": 0.1}]
)
@MODES
def test_inv_fedpft_4_rounds_are_those_of_an_oracle_in_plain_pytorch(options: dict[str, Any], mode: str) -> None:
    method = FedPFT(**{"server_epochs": 3, "server_lr": 0.01, "server_batch_size": 7, **options})
    toy = toy_of(method, mode=mode)
    before, head = copy(toy.server["model"]), expected(toy, method, [0, 1, 3])
    after = toy.step([0, 1, 3])["model"]
    assert_close({name: after[name] for name in head}, head, 1e-12)
    assert_equal(
        {name: after[name] for name in after if name not in head}, {n: before[n] for n in before if n not in head}
    )
    assert all(not torch.equal(after[name], before[name]) for name in head)


def test_inv_fedpft_5_only_mixtures_travel() -> None:
    """Two bytes a number: of K Gaussians of d features K (d + 2) if they are spherical; three numbers of 4 a class."""
    sizes = {"spherical": 7 + 2, "diag": 2 * 7 + 1, "full": 7 * 8 // 2 + 7 + 1}
    for covariance, size in sizes.items():
        toy = toy_of(FedPFT(covariance=covariance, server_epochs=1, components=2))
        toy.step(range(4))
        gaussians = {0: 4, 1: 4, 2: 4, 3: 1}  # one less than a class has samples, where these are two
        classes = {0: 2, 1: 2, 2: 3, 3: 1}
        for client, (_, up) in toy.federation.traffic.by_client.items():
            assert up == 2 * size * gaussians[client] + 12 * classes[client], (covariance, client)
        assert not any(toy.states().values())


def test_classes_of_few_samples_have_fewer_gaussians_or_none() -> None:
    z, y = torch.randn(9, 3, dtype=torch.float64), torch.tensor([0] * 5 + [1] * 3 + [2])
    found = fit(z, y, components=4)
    assert found["labels"].tolist() == [0, 1] and found["components"].tolist() == [4, 2]
    alone = fit(z, y, components=4, least=1)
    assert alone["components"].tolist() == [4, 2, 1]
    assert_close(alone["means"][-1], z[8], 1e-14)
    assert float(alone["covariances"][-1]) == pytest.approx(RIDGE)
    none = fit(z, y, least=10)
    features, labels = drawn(none, np.random.Generator(np.random.Philox(0)))
    assert features.shape == (0, 3) and len(labels) == 0 and none["means"].shape == (0, 3)


def test_without_any_mixture_nothing_changes() -> None:
    toy = toy_of(FedPFT(least_samples=100))
    before = copy(toy.server)
    assert_equal(toy.step(range(4)), before)


def test_what_is_undefined_is_refused_and_what_one_may_not_expect_is_said() -> None:
    toy = Toy(FedPFT(), random_clients((8, 6)), softmax_regression(), TRAIN)
    with pytest.raises(ConfigError, match="no layer before the last"):
        FedPFT().check(toy.task, toy.context)
    assert len(FedPFT().remarks(toy.context)) == 1
    several = toy_of(FedPFT(), train=TRAIN.model_copy(update={"rounds": 3})).context
    assert "train.rounds is 3" in FedPFT().remarks(several)[1]
