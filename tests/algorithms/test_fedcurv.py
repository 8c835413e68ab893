"""FedCurv: rounds in plain PyTorch, limits that are federated averaging, what Fisher information is, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedcurv import FedCurv
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, num_bytes
from tests.support.partial_toys import COHORTS, SIZES, TRAIN, initial, three_layers, toy_of
from tests.support.staged_toys import cross_entropy, descended, fisher_of, summed
from tests.support.toy_networks import recurrent_layers, two_layers
from tests.support.toys import CPU, assert_close, assert_equal


def held(model: Tree, others: list[tuple[Tree, Tree]], weight: float) -> Tensor:
    """lambda sum_j (theta - theta_j)^T diag(F_j) (theta - theta_j), as the paper first has it."""
    parts = [
        (fisher[name] * (leaf - there[name]).square()).sum() for fisher, there in others for name, leaf in model.items()
    ]
    return weight * torch.stack(parts).sum()


@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
def test_inv_curv_1_rounds_are_those_of_an_oracle_in_plain_pytorch(aggregation: Any) -> None:
    toy = toy_of(FedCurv(curvature_weight=0.7, aggregation=aggregation), task=two_layers())
    model = initial(toy)
    last: dict[int, tuple[Tree, Tree]] = {}
    for round, cohort in enumerate(COHORTS):
        sizes = {k: 1 if aggregation == "uniform" else SIZES[k] for k in cohort}
        mean, now = {key: torch.zeros_like(leaf) for key, leaf in model.items()}, {}
        for k in cohort:
            part = toy.dataset.load(k)["train"]
            others = [one for j, one in last.items() if j != k]

            def value(at: Tree, x: Tensor, y: Tensor, others: Any = others) -> Tensor:
                return cross_entropy(at, x, y) + (held(at, others, 0.7) if others else 0)

            trained = descended(toy, round, k, model, (part.x, part.y), value)
            now[k] = (fisher_of(trained, (part.x, part.y)), trained)
            mean = summed(mean, trained, sizes[k] / sum(sizes.values()))
        model, last = mean, now
        assert_close(toy.step(cohort)["model"], model, 1e-12)


@pytest.mark.parametrize("aggregation", ["samples", "uniform", "population"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_curv_2_of_weight_0_it_is_federated_averaging_to_the_bit(make: Any, aggregation: Any) -> None:
    ours = toy_of(FedCurv(curvature_weight=0, aggregation=aggregation), task=make())
    theirs = toy_of(FedAvg(aggregation=aggregation), task=make())
    for cohort in COHORTS:
        assert_equal(ours.step(cohort)["model"], theirs.step(cohort)["model"])
    assert not any(ours.states().values()) and "curvature" not in ours.server


def test_inv_curv_3_the_first_round_is_one_of_federated_averaging_to_the_bit() -> None:
    ours, theirs = toy_of(FedCurv(curvature_weight=3.0)), toy_of(FedAvg())
    assert_equal(ours.step([0, 2])["model"], theirs.step([0, 2])["model"])
    there = ours.step([1, 2])["model"]["head.weight"] - theirs.step([1, 2])["model"]["head.weight"]
    assert there.abs().max() > 1e-6


def test_inv_curv_4_a_client_alone_has_no_others() -> None:
    ours, theirs = toy_of(FedCurv(curvature_weight=3.0)), toy_of(FedAvg())
    for _ in range(3):
        assert_close(ours.step([1])["model"], theirs.step([1])["model"], 1e-12)


def test_inv_curv_5_the_sums_are_those_of_the_last_round() -> None:
    toy = toy_of(FedCurv(), task=two_layers())
    for round, cohort in enumerate(COHORTS):
        server = toy.step(cohort)
        kept = [toy.states()[k]["curvature"] for k in cohort]
        assert server["round"] == round and all(one["round"] == round for one in kept)
        for key in ("fisher", "products"):
            total = {name: sum(one["sums"][key][name] for one in kept) for name in server["curvature"][key]}
            assert_close(server["curvature"][key], total, 1e-12)
        assert all((leaf >= 0).all() for leaf in server["curvature"]["fisher"].values())


@pytest.mark.parametrize("form", ["samples", "batches"])
def test_inv_curv_6_fisher_information_of_batches_of_one_sample_is_that_of_samples(form: Any) -> None:
    train = TRAIN.model_copy(update={"batch_size": 1, "max_grad_norm": 0.01})
    toy = toy_of(FedCurv(fisher_form=form), train, two_layers())
    toy.step([0, 1])
    for k in (0, 1):
        part = toy.dataset.load(k)["train"]
        fisher = toy.states()[k]["curvature"]["sums"]["fisher"]
        products = toy.states()[k]["curvature"]["sums"]["products"]
        trained = {name: torch.where(leaf > 0, products[name] / leaf, 0) for name, leaf in fisher.items()}
        assert_close(fisher, fisher_of(trained, (part.x, part.y)), 1e-12)


def test_squared_gradients_of_mini_batches_are_averaged_over_them() -> None:
    toy = toy_of(FedCurv(fisher_form="batches"), task=two_layers())
    toy.step([1, 2])
    part, sums = toy.dataset.load(1)["train"], toy.states()[1]["curvature"]["sums"]
    trained = {name: (sums["products"][name] / leaf).nan_to_num() for name, leaf in sums["fisher"].items()}
    plan = plan_batches(SIZES[1], 4, 3, toy.context.streams.generator("batches.fisher", 0, 1))
    expected = {name: torch.zeros_like(leaf) for name, leaf in trained.items()}
    for index in plan.batches(CPU):
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in trained.items()}
        found = torch.autograd.grad(cross_entropy(leaves, part.x[index], part.y[index]), list(leaves.values()))
        expected = {name: expected[name] + g.square() / 3 for name, g in zip(leaves, found, strict=True)}
    assert_close(sums["fisher"], expected, 1e-12)


def test_sums_travel_once_there_are_some() -> None:
    toy = toy_of(FedCurv(), task=two_layers())
    size = num_bytes(initial(toy))
    for round, cohort in enumerate(COHORTS):
        toy.step(cohort)
        down = 3 * size + 8 if round else size
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (down, 3 * size))


@pytest.mark.parametrize("form", ["samples", "batches"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_vectorized_agrees_with_looped(make: Any, form: Any, caplog: pytest.LogCaptureFixture) -> None:
    looped, stacked = (toy_of(FedCurv(fisher_form=form), task=make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3]):
        assert_close(looped.step(cohort)["model"], stacked.step(cohort)["model"], 1e-8)
    assert "failed together" not in caplog.text


def test_a_model_that_transforms_refuse_has_each_gradient_by_itself() -> None:
    toy = toy_of(FedCurv(), TrainConfig(**{**TRAIN.model_dump(), "local_epochs": 1}), recurrent_layers())
    for cohort in COHORTS[:2]:
        toy.step(cohort)
    assert all((leaf >= 0).all() and leaf.any() for leaf in toy.server["curvature"]["fisher"].values())
