"""FedSOL: steps in plain PyTorch, limits that are federated averaging, what e is, statistics, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedsol import FedSOL, movement
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, num_bytes
from tests.support.partial_toys import COHORTS, SIZES, TRAIN, initial, partly_fixed, three_layers, toy_of
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SETTINGS: dict[str, dict[str, Any]] = {
    "adaptive": {"radius": 2.0, "temperature": 2.0},
    "fixed": {"radius": 0.7, "adaptive": False, "aggregation": "uniform"},
    "head": {"radius": 2.0, "perturbed": "head"},
    "body": {"radius": 0.5, "perturbed": "body", "adaptive": False},
}


def logits_of(model: Tree, x: Tensor) -> Tensor:
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    logits: Tensor = hidden @ model["head.weight"].T + model["head.bias"]
    return logits


def apart_of(model: Tree, received: Tree, x: Tensor, method: FedSOL) -> Tree:
    """e, with PyTorch's own divergence."""
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in model.items()}
    tau = method.temperature
    pair = (F.log_softmax(logits_of(leaves, x) / tau, 1), F.softmax(logits_of(received, x) / tau, 1))
    found = torch.autograd.grad(F.kl_div(*pair, reduction="batchmean"), list(leaves.values()))
    gradient = dict(zip(leaves, found, strict=True))
    if method.perturbed != "all":
        chosen = {name for name in gradient if name.startswith("head") == (method.perturbed == "head")}
        gradient = {name: leaf * (name in chosen) for name, leaf in gradient.items()}
    norm = float(torch.cat([leaf.flatten() for leaf in gradient.values()]).norm())
    # at the received model all that is left is rounding
    if norm < 1e-12:
        return {name: torch.zeros_like(leaf) for name, leaf in gradient.items()}
    for name, leaf in gradient.items():
        gradient[name] = method.radius * leaf / norm
        if method.adaptive:
            sizes = (model[name] - received[name]).detach().abs()
            columns = sizes.pow(2).sum(0).sqrt()
            gradient[name] = gradient[name] * torch.where(columns > 0, sizes / columns, 0)
    return gradient


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_sol_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = FedSOL(**SETTINGS[name])
    toy = toy_of(method, task=two_layers())
    model = initial(toy)
    for round, cohort in enumerate(COHORTS):
        sizes = {k: 1 if method.aggregation == "uniform" else SIZES[k] for k in cohort}
        mean: Tree = {key: torch.zeros_like(leaf) for key, leaf in model.items()}
        for k in cohort:
            part = toy.dataset.load(k)["train"]
            leaves = {key: leaf.clone().requires_grad_() for key, leaf in model.items()}
            optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
            generator = toy.context.streams.generator("batches", round, k)
            for index in plan_batches(SIZES[k], 4, 2 * -(-SIZES[k] // 4), generator).batches(CPU):
                apart = apart_of(leaves, model, part.x[index], method)
                optimizer.zero_grad()
                moved = {key: leaf + apart[key] for key, leaf in leaves.items()}
                loss = F.cross_entropy(logits_of(moved, part.x[index]), part.y[index])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            mean = {key: mean[key] + sizes[k] / sum(sizes.values()) * leaf.detach() for key, leaf in leaves.items()}
        model = mean
        assert_close(toy.step(cohort)["model"], model, 1e-12)


@pytest.mark.parametrize("aggregation", ["samples", "uniform", "population"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_sol_2_of_radius_0_it_is_federated_averaging_to_the_bit(make: Any, aggregation: Any) -> None:
    ours = toy_of(FedSOL(radius=0, aggregation=aggregation), task=make())
    theirs = toy_of(FedAvg(aggregation=aggregation), task=make())
    for cohort in COHORTS:
        assert_equal(ours.step(cohort)["model"], theirs.step(cohort)["model"])


@pytest.mark.parametrize("adaptive", [True, False])
def test_inv_sol_3_a_single_step_is_a_plain_one(adaptive: bool) -> None:
    """At the received model the divergence has no gradient."""
    train = TRAIN.model_copy(update={"local_epochs": 1, "batch_size": 12})
    ours = toy_of(FedSOL(radius=9.0, adaptive=adaptive), train, two_layers())
    plain = toy_of(FedAvg(), train, two_layers())
    for cohort in COHORTS:
        assert_close(ours.step(cohort)["model"], plain.step(cohort)["model"], 1e-12)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("adaptive", [True, False])
def test_inv_sol_4_a_vanishing_radius_is_federated_averaging_with_dropout(mode: str, adaptive: bool) -> None:
    methods = FedSOL(radius=1e-14, adaptive=adaptive), FedAvg()
    ours, plain = (toy_of(method, task=normalized_layers(0.4), mode=mode) for method in methods)
    for cohort in COHORTS:
        assert_close(ours.step(cohort), plain.step(cohort), 1e-10)


def test_inv_sol_5_columns_that_have_moved_have_movements_of_length_1() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 4), (5, 2, 3, 3), (6,)):
        change = torch.randn(shape, generator=generator, dtype=torch.float64)
        found = movement(change)
        assert_close(found.square().sum(0), torch.ones(shape[1:], dtype=torch.float64), 1e-12)
        assert torch.equal(movement(3 * change) > 0, found > 0) and (found >= 0).all()
    assert not movement(torch.zeros(3, 2)).any()
    assert movement(torch.tensor(-2.0)) == 1 and movement(torch.tensor(0.0)) == 0


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_running_statistics_are_recorded_once_a_step_and_are_those_at_w(mode: str) -> None:
    """In a single step, and so at the received model."""
    train = TrainConfig(rounds=1, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.1)
    data = random_clients((9, 5))
    ours, plain = (
        Toy(method, data, normalized_layers(), train, mode=mode) for method in (FedSOL(radius=3.0), FedAvg())
    )
    left, right = (toy.step()["model"] for toy in (ours, plain))
    for name in ours.task.network.buffer_names:
        assert_close(left[name], right[name], 1e-13)


def test_only_the_model_travels() -> None:
    toy = toy_of(FedSOL(), task=two_layers())
    size = num_bytes(initial(toy))
    for cohort in COHORTS:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))
    assert not any(toy.states().values())


@pytest.mark.parametrize("options", [{}, {"adaptive": False, "perturbed": "head"}])
@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "momentum": 0.0, "lr": 0.01}])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_vectorized_agrees_with_looped(
    make: Any, optimizer: Any, options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    train = TrainConfig.model_validate({**TRAIN.model_dump(), **optimizer})
    looped, stacked = (toy_of(FedSOL(**options), train, make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3]):
        assert_close(looped.step(cohort)["model"], stacked.step(cohort)["model"], 1e-8)
    assert "failed together" not in caplog.text


def test_what_is_refused_and_what_is_idle() -> None:
    fixed = partly_fixed("head.weight", "head.bias")
    with pytest.raises(ConfigError, match=r"algorithm.perturbed is head, .* set algorithm.perturbed=all"):
        FedSOL(perturbed="head").check(fixed, toy_of(FedAvg()).context)
    FedSOL(perturbed="body").check(fixed, toy_of(FedAvg()).context)
    assert len(FedSOL(radius=0, adaptive=False, temperature=1.0).idle_settings()) == 2
