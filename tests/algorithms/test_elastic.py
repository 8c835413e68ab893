"""Elastic aggregation: an oracle in plain PyTorch, closed forms, federated averaging, buffers, what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.elastic import Elastic
from algorithms.fedavg import FedAvg
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.models.classification import ClassificationModel
from rayfl.params import Tree, copy, num_bytes
from rayfl.tasks.base import Batch
from rayfl.tasks.further_tasks import Regression
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import DoubleNetwork, normalized_layers, softmax_regression, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 1, 10)
TRAIN = TrainConfig(
    rounds=5, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
COHORTS = ([0], [1, 2], [0, 1, 2, 3], [2], [0, 3])
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
WEIGHTS = pytest.mark.parametrize("weights", ["samples", "uniform", "population"])


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": random_clients(SIZES), "task": two_layers(), "train": train, **options})


def outputs(model: Tree, x: Tensor) -> Tensor:
    """The network of two layers."""
    z: Tensor = (x @ model["inner.weight"].T + model["inner.bias"]).relu() @ model["head.weight"].T
    return z + model["head.bias"]


def slopes(model: Tree, value: Any) -> Tree:
    """The gradient of a function of a model."""
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in model.items()}
    return dict(zip(leaves, torch.autograd.grad(value(leaves), list(leaves.values())), strict=True))


def sensitivity(toy: Toy, w: Tree, client: int, round: int, mu: float, share: float) -> Tree:
    """A client's Omega: a mean over mini-batches of weights that fall off by mu, the last one's the largest."""
    x, n = toy.dataset.load(client)["train"].x, SIZES[client]
    count = math.ceil(share * n)
    chosen = x[toy.context.streams.generator("sensitivity", round, client).permutation(n)[:count]]
    plan = plan_batches(count, 4, -(-count // 4), toy.context.streams.generator("batches.sensitivity", round, client))
    batches = plan.batches(CPU)
    weights = [mu ** (len(batches) - 1 - b) for b in range(len(batches))]
    found = {name: torch.zeros_like(leaf) for name, leaf in w.items()}
    for weight, index in zip(weights, batches, strict=True):
        rows = chosen[index]
        g = slopes(w, lambda model, rows=rows: (outputs(model, rows) ** 2).sum(1).mean())
        for name in found:
            found[name] += weight / sum(weights) * g[name].abs()
    return found


@pytest.mark.parametrize("most_of", ["tensor", "model"])
@WEIGHTS
def test_inv_el_1_rounds_are_those_of_an_oracle_in_plain_pytorch(weights: Any, most_of: Any) -> None:
    tau, mu, share = 0.4, 0.8, 0.6
    toy = toy_of(Elastic(tau=tau, mu=mu, sample_share=share, most_of=most_of, aggregation=weights))
    network, streams = toy.task.network, toy.context.streams
    w = network.initialize(streams.integer("init.global"))
    for round, cohort in enumerate(COHORTS):
        counted = cohort if weights == "samples" else range(len(SIZES))
        q = [1 / len(cohort) if weights == "uniform" else SIZES[i] / sum(SIZES[j] for j in counted) for i in cohort]
        delta = {name: torch.zeros_like(leaf) for name, leaf in w.items()}
        omega = {name: torch.zeros_like(leaf) for name, leaf in w.items()}
        for weight, i in zip(q, cohort, strict=True):
            part, k = toy.dataset.load(i)["train"], 2 * -(-SIZES[i] // 4)
            own, v = copy(w), {name: torch.zeros_like(leaf) for name, leaf in w.items()}
            for index in plan_batches(SIZES[i], 4, k, streams.generator("batches", round, i)).batches(CPU):
                x, y = part.x[index], part.y[index]
                g = slopes(own, lambda model, x=x, y=y: F.cross_entropy(outputs(model, x), y))
                v = {name: 0.5 * v[name] + g[name] + 0.01 * own[name] for name in own}
                own = {name: own[name] - 0.1 * v[name] for name in own}
            measured = sensitivity(toy, w, i, round, mu, share)
            for name in w:
                delta[name] += weight * (own[name] - w[name])
                omega[name] += weight * measured[name]
        largest = max(float(leaf.max()) for leaf in omega.values())
        for name in w:
            peak = largest if most_of == "model" else float(omega[name].max())
            w[name] = w[name] + (1 + tau - omega[name] / peak) * delta[name]
        assert_close(toy.step(cohort)["model"], w, 1e-12)


@MODES
@WEIGHTS
def test_inv_el_2_without_samples_to_measure_with_it_is_federated_averaging(mode: str, weights: Any) -> None:
    elastic, plain = (
        toy_of(method, mode=mode)
        for method in (Elastic(sample_share=0, aggregation=weights), FedAvg(aggregation=weights))
    )
    for cohort in COHORTS:
        assert_equal(elastic.step(cohort), plain.step(cohort))
        assert elastic.federation.traffic.by_client == plain.federation.traffic.by_client


class OneWeight(ClassificationModel):
    """A line through the origin."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1, bias=False)

    def features(self, x: Tensor) -> Tensor:
        return x

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


def lines(algorithm: Any, **options: Any) -> Toy:
    """Regression with one parameter."""
    generator = np.random.default_rng(0)
    clients = [
        (torch.from_numpy(generator.standard_normal((n, 1))), torch.full((n, 1), float(n)).double()) for n in SIZES
    ]
    data = ListDataset(clients)
    data.spec = InputSpec("image", (1,), 1, target="values")
    return Toy(algorithm, data, Regression(DoubleNetwork(OneWeight), spec=data.spec), TRAIN, **options)


@MODES
def test_inv_el_3_a_sensitivity_that_is_the_same_for_all_elements_gives_the_step_tau(mode: str) -> None:
    """So tau = 1 is federated averaging there; one parameter is its own largest."""
    plain, one = lines(FedAvg(), mode=mode), lines(Elastic(tau=1.0), mode=mode)
    for cohort in COHORTS:
        assert_equal(plain.step(cohort)["model"], one.step(cohort)["model"])
    start = copy(plain.server["model"])["head.weight"]
    half = lines(Elastic(tau=0.5), mode=mode)
    half.server, half.round = copy(plain.server), plain.round
    moved = plain.step([1, 3])["model"]["head.weight"] - start
    assert_close(half.step([1, 3])["model"]["head.weight"], start + 0.5 * moved, 1e-14)
    equal = {"a": torch.full((3, 2), 7.0), "b": torch.full((4,), 0.1)}
    assert_equal(Elastic(tau=1.0).steps(equal), {"a": torch.ones(3, 2), "b": torch.ones(4)})


def test_inv_el_4_steps_are_between_tau_and_one_more_and_do_not_depend_on_the_unit() -> None:
    omega = {"a": torch.tensor([0.0, 1.0, 4.0]), "b": torch.tensor([[2.0], [1.0]]), "c": torch.zeros(2)}
    found = Elastic(tau=0.25).steps(omega)
    assert found["a"].tolist() == [1.25, 1.0, 0.25]
    assert found["b"].tolist() == [[0.25], [0.75]]
    assert found["c"].tolist() == [1.25, 1.25], "nothing depends on it"
    over_all = Elastic(tau=0.25, most_of="model").steps(omega)
    assert over_all["a"].tolist() == [1.25, 1.0, 0.25]
    assert over_all["b"].tolist() == [[0.75], [1.0]]
    for method in (Elastic(tau=0.25), Elastic(tau=0.25, most_of="model")):
        scaled = method.steps({name: 8 * leaf for name, leaf in omega.items()})
        assert_equal(scaled, method.steps(omega))
        assert Elastic(most_of=method.most_of).steps({"c": torch.zeros(2)})["c"].tolist() == [1.5, 1.5]


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_inv_el_5_sensitivities_of_a_linear_model_in_closed_form(mu: float) -> None:
    """||W x + b||^2 has the slopes 2 (W x + b) x^T; from one mini-batch the factor mu cancels."""
    train = TRAIN.model_copy(update={"batch_size": None})
    elastic, plain = (
        toy_of(method, train, task=softmax_regression())
        for method in (Elastic(mu=mu, sample_share=1.0, tau=0.3), FedAvg())
    )
    w = copy(elastic.server["model"])
    (weight, bias), x = w.values(), elastic.dataset.load(1)["train"].x.numpy()
    z = x @ weight.numpy().T + bias.numpy()
    steps = [1.3 - part / part.max() for part in (np.abs(2 * z.T @ x / len(x)), np.abs(2 * z.mean(0)))]
    moved, mean = elastic.step([1])["model"], plain.step([1])["model"]
    for (name, leaf), step in zip(w.items(), steps, strict=True):
        assert_close(moved[name], leaf + torch.from_numpy(step) * (mean[name] - leaf), 1e-13)


def test_inv_el_6_measuring_reads_no_labels_and_no_padding() -> None:
    task, method = two_layers(), Elastic(mu=0.6)
    model = task.network.initialize(0)
    x = random_clients((6,)).load(0)["train"].x
    zeros = {name: torch.zeros_like(leaf) for name, leaf in model.items()}

    def step(batch: Batch) -> Tree:
        trained = {name: leaf.clone().requires_grad_() for name, leaf in zeros.items()}
        value = method.measuring({"sensitivity": trained}, batch, task, {"model": model}, None)
        return dict(zip(trained, torch.autograd.grad(value, list(trained.values())), strict=True))

    found = step(Batch(x, torch.zeros(6, dtype=torch.int64)))
    expected = slopes(model, lambda model: (outputs(model, x) ** 2).sum(1).mean())
    assert_close(found, {name: -0.4 * leaf.abs() for name, leaf in expected.items()}, 1e-14)
    assert_equal(step(Batch(x, torch.tensor([2, 1, 0, 2, 1, 0]))), found)
    padded = torch.cat([x, 9 * torch.ones(2, 5).double()])
    mask = torch.tensor([1.0] * 6 + [0.0] * 2, dtype=torch.float64)
    assert_close(step(Batch(padded, torch.zeros(8, dtype=torch.int64), mask)), found, 1e-14)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("most_of", ["tensor", "model"])
def test_vectorized_agrees_with_looped(most_of: Any, double: bool) -> None:
    method = Elastic(mu=0.5, sample_share=0.7, most_of=most_of)
    assert_modes_agree(method, SIZES, TRAIN, double, 1e-10 if double else 1e-5)


@MODES
def test_buffers_are_averaged_and_measuring_leaves_them_alone(mode: str) -> None:
    elastic, plain = (
        Toy(method, random_clients((8, 12, 6)), normalized_layers(), TRAIN, mode=mode)
        for method in (Elastic(sample_share=1.0), FedAvg())
    )
    elastic.step([0, 1])
    plain.step([0, 1])
    assert elastic.task.network.buffer_names
    for name in elastic.task.network.buffer_names:
        assert_equal(elastic.server["model"][name], plain.server["model"][name])


@MODES
def test_neither_clipping_nor_a_kept_optimizer_counts_for_sensitivities(mode: str) -> None:
    """A client's own steps are federated averaging's, and zeta is the same with gradients as short as one likes."""
    steps = []
    for norm in (None, 0.05):
        train = TRAIN.model_copy(update={"max_grad_norm": norm, "persist_optimizer": True})
        elastic, plain = (toy_of(method, train, mode=mode) for method in (Elastic(mu=0.5, sample_share=1.0), FedAvg()))
        w = copy(elastic.server["model"])
        moved, mean = elastic.step([0, 1, 3])["model"], plain.step([0, 1, 3])["model"]
        assert_equal(elastic.states(), plain.states())
        assert set(elastic.states()[0]) == {"optimizer"}
        steps.append({name: (moved[name] - w[name]) / (mean[name] - w[name]) for name in w})
    assert_close(steps[0], steps[1], 1e-8)
    assert min(float(leaf.min()) for leaf in steps[0].values()) == pytest.approx(0.5)


def test_one_model_goes_down_and_two_come_up_and_clients_keep_nothing() -> None:
    toy = toy_of(Elastic())
    size = num_bytes(toy.server["model"])
    for cohort in COHORTS[1:3]:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, 2 * size))
    assert not any(toy.states().values())


def test_what_is_undefined_is_refused() -> None:
    for wrong in ({"mu": 1.0}, {"mu": -0.1}, {"tau": -0.1}, {"sample_share": 1.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Elastic(**wrong)
    task = two_layers()
    task.traits = frozenset()  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"elastic cannot learn task=classification, .* one vector of features"):
        Elastic().check_task(task)
    said = Elastic(sample_share=0, tau=0.1).idle_settings()
    assert len(said) == 1 and said[0].startswith("algorithm.tau has no effect")
