"""TERM: an oracle in plain PyTorch, federated averaging, the largest and smallest loss, estimates, tilted samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.parts.relative_weights import LEAST_SHARE, relative
from algorithms.term import TERM, log_mean
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import copy
from rayfl.tasks.base import Batch
from rayfl.tasks.further_tasks import Regression
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 1, 10)
TRAIN = TrainConfig(
    rounds=5, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01, lr_decay=0.8
)
COHORTS = ([0], [1, 2], [0, 1, 2, 3], [2], [0, 3])


def toy_of(algorithm: Any, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), **{"train": TRAIN, **options})


def tilted(losses: Tensor, tau: float) -> Tensor:
    """1/tau log mean e^(tau l), as it is written; the mean for tau = 0."""
    return losses.mean() if tau == 0 else (tau * losses).exp().mean().log() / tau


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize(("t", "share", "tau"), [(1.0, 1.0, 0.0), (3.0, 0.3, 0.0), (-2.0, 0.5, 0.8), (0.7, 1.0, -1.5)])
def test_inv_term_1_rounds_are_those_of_an_oracle_in_plain_pytorch(
    weights: Any, t: float, share: float, tau: float
) -> None:
    """Exponentials as they are written, and an estimate that is no logarithm."""
    toy = toy_of(TERM(tilt=t, estimate_share=share, sample_tilt=tau, aggregation=weights))
    network, streams = toy.task.network, toy.context.streams
    w = network.initialize(streams.integer("init.global"))
    estimate = None

    def losses(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(network.head_inputs_and_logits(model, x)[1], y, reduction="none")

    for round, cohort in enumerate(COHORTS):
        factors, changes, shares = [], [], []
        for client in cohort:
            part, n = toy.dataset.load(client)["train"], SIZES[client]
            shares.append(1 if weights == "uniform" else n)
            factors.append(math.exp(t * float(tilted(losses(w, part.x, part.y), tau))))
            model = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
            optimizer = torch.optim.SGD(model.values(), lr=0.1 * 0.8**round, momentum=0.5, weight_decay=0.01)
            plan = plan_batches(n, 4, 2 * -(-n // 4), streams.generator("batches", round, client))
            for index in plan.batches(CPU):
                optimizer.zero_grad()
                tilted(losses(model, part.x[index], part.y[index]), tau).backward()
                optimizer.step()
            changes.append({name: model[name].detach() - w[name] for name in w})
        p = np.array(shares) / sum(shares)
        now = float(p @ factors)
        estimate = now if estimate is None else (1 - share) * estimate + share * now
        for q, factor, change in zip(p, factors, changes, strict=True):
            w = {name: leaf + q * factor / estimate * change[name] for name, leaf in w.items()}
        assert_close(toy.step(cohort)["model"], w, 1e-12)
        assert ("estimate" in toy.server) == (share < 1)
        if share < 1:
            assert abs(math.exp(toy.server["estimate"]) - estimate) < 1e-12 * estimate


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_inv_term_2_without_tilt_it_is_federated_averaging(make: Any, weights: Any) -> None:
    flat = toy_of(TERM(tilt=0, aggregation=weights, finetune_epochs=1), make())
    plain = toy_of(FedAvg(aggregation=weights, finetune_epochs=1), make())
    for cohort in COHORTS:
        assert_equal(flat.step(cohort), plain.step(cohort))
    mine, theirs = flat.scores(final=True), plain.scores(final=True)
    assert all((mine[k][row].vector == theirs[k][row].vector).all() for k in mine for row in ("global", "finetuned"))
    assert flat.federation.traffic.by_client == plain.federation.traffic.by_client


def test_inv_term_3_as_tilts_vanish_it_becomes_federated_averaging() -> None:
    for vanishing, tolerance in ({"tilt": 1e-14}, 1e-12), ({"tilt": 0, "sample_tilt": 1e-7}, 1e-6):
        near, plain = toy_of(TERM(**vanishing)), toy_of(FedAvg(aggregation="uniform"))
        for cohort in COHORTS:
            assert_close(near.step(cohort)["model"], plain.step(cohort)["model"], tolerance)


@pytest.mark.parametrize(("t", "chosen"), [(1e6, max), (-1e6, min)])
@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_term_4_a_large_tilt_follows_the_client_of_the_largest_loss_alone(make: Any, t: float, chosen: Any) -> None:
    toy, cohort = toy_of(TERM(tilt=t, aggregation="samples"), make()), [0, 1, 3]
    losses = {client: toy.scores(split="train")[client]["global"].loss for client in cohort}
    extreme = chosen(losses, key=losses.__getitem__)
    alone = toy_of(FedAvg(), make()).step([extreme])["model"]
    assert_close(toy.step(cohort)["model"], alone, 1e-12)


def test_inv_term_5_one_step_on_all_samples_goes_down_the_tilted_objective() -> None:
    t, rate = 1.7, 0.1
    train = TrainConfig(rounds=1, clients_per_round="all", local_epochs=1, batch_size=None, lr=rate)
    toy = toy_of(TERM(tilt=t, aggregation="samples"), train=train)
    network, w = toy.task.network, toy.server["model"]
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
    parts = [toy.dataset.load(client)["train"] for client in range(4)]
    each = torch.stack([F.cross_entropy(network.logits(leaves, part.x), part.y) for part in parts])
    value = ((t * each).exp() * torch.tensor(SIZES) / sum(SIZES)).sum().log() / t
    slopes = dict(zip(w, torch.autograd.grad(value, list(leaves.values())), strict=True))
    assert_close(toy.step([0, 1, 2, 3])["model"], {name: w[name] - rate * slopes[name] for name in w}, 1e-12)


def test_inv_term_6_the_step_is_no_longer_than_one_over_lambda_and_shorter_while_losses_fall() -> None:
    train = TRAIN.model_copy(update={"lr_decay": 1.0, "weight_decay": 0.0})
    toy, whole = (toy_of(TERM(tilt=2.0, estimate_share=share), train=train) for share in (0.2, 1.0))
    for number in range(4):
        before = copy(toy.server["model"])
        whole.server, whole.round = {"model": before}, toy.round
        after, mean = toy.step([0, 1, 3])["model"], whole.step([0, 1, 3])["model"]
        name = "head.weight"
        ratio = float((after[name] - before[name]).norm() / (mean[name] - before[name]).norm())
        assert ratio == pytest.approx(1, abs=1e-12) if number == 0 else 0 < ratio < 1


def test_inv_term_7_weights_are_exponentials_in_units_of_the_largest() -> None:
    assert_close(torch.from_numpy(relative(np.log([2.0, 1, 4]))), torch.tensor([2, 1, 4]).double() / 4, 1e-15)
    assert relative(np.array([1e300, -1e300])).tolist() == [1.0, LEAST_SHARE]
    assert relative(np.array([-1e300, -1e300])).tolist() == [1.0, 1.0]


def test_inv_term_8_the_tilted_mean_of_samples_ignores_padding_and_ends_at_the_extremes() -> None:
    values = torch.tensor([0.3, 2.0, -1.0, 9.0]).double()
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0]).double()
    assert_close(log_mean(values, mask), log_mean(values[:3]), 1e-15)
    assert_close(log_mean(values), values.exp().mean().log(), 1e-14)
    assert abs(float(log_mean(1e5 * values) / 1e5) - 9.0) < 1e-4
    assert abs(float(log_mean(-1e5 * values) / -1e5) + 1.0) < 1e-4


def test_the_loss_of_a_mini_batch_is_the_tilted_mean() -> None:
    task = two_layers()
    model, part = task.network.initialize(0), random_clients((6,)).load(0)["train"]
    each = F.cross_entropy(task.network.logits(model, part.x), part.y, reduction="none")
    for tau in (2.0, -0.5):
        found = TERM(sample_tilt=tau).objective(model, Batch(part.x, part.y), task, None, None)
        assert_close(found, tilted(each, tau), 1e-14)


def test_buffers_are_averaged_with_the_tilted_weights_whatever_the_estimate_is() -> None:
    steps = [toy_of(TERM(tilt=2.0, estimate_share=share), normalized_layers()) for share in (0.3, 1.0)]
    lagging, plain = steps
    for cohort in ([0, 1], [1, 3]):
        plain.server, plain.round = {"model": copy(lagging.server["model"])}, lagging.round
        mine, theirs = (toy.step(cohort)["model"] for toy in (lagging, plain))
        for name in lagging.task.network.buffer_names:
            assert torch.equal(mine[name], theirs[name])
    assert not torch.equal(mine["head.weight"], theirs["head.weight"])


def test_a_round_without_a_rate_moves_nothing() -> None:
    toy = toy_of(TERM(tilt=2, estimate_share=0.4), train=TRAIN.model_copy(update={"lr": 0.0}))
    before = copy(toy.server["model"])
    for cohort in COHORTS:
        assert_close(toy.step(cohort)["model"], before, 1e-15)


def test_traffic_is_that_of_federated_averaging_and_a_number() -> None:
    toy = toy_of(TERM(estimate_share=0.5))
    size = 8 * toy.task.network.num_parameters
    toy.step([0, 2])
    assert toy.federation.traffic.by_client == {0: (size + 8, size), 2: (size + 8, size)}
    assert set(toy.algorithm.served(toy.server, toy.context)[0]) == {"model"}
    assert not any(toy.states().values())


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
@pytest.mark.parametrize("tau", [0.0, 1.3])
def test_looped_and_stacked_clients_agree(make: Any, tau: float) -> None:
    algorithm = TERM(tilt=2, sample_tilt=tau, estimate_share=0.6)
    looped, stacked = (toy_of(algorithm, make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 3], [1, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-10)


def test_samples_are_tilted_where_there_are_classes_alone() -> None:
    task = Regression(two_layers(classes=1).network)
    TERM().check_task(task)
    with pytest.raises(ConfigError, match=r"term cannot learn task=regression.*sample_tilt"):
        TERM(sample_tilt=1).check_task(task)
    for share in (0.0, 1.1):
        with pytest.raises(ValueError, match="estimate_share"):
            TERM(estimate_share=share)


@pytest.mark.slow
def test_the_worst_client_is_better_off() -> None:
    train = TrainConfig(rounds=60, clients_per_round="all", local_epochs=2, batch_size=8, lr=0.1)
    found = {}
    for t in (0.0, 8.0):
        toy = Toy(TERM(tilt=t), random_clients((30, 30, 30, 30, 30)), two_layers(), train, mode="vectorized")
        toy.run()
        found[t] = max(rows["global"].loss for rows in toy.scores(split="train").values())
    assert found[8.0] < 0.95 * found[0.0], found
