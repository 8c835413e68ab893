"""FedAsync: invariants ASYNC, its known path, an oracle in plain PyTorch, ages, and buffers of several models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from algorithms.fedasync import FedAsync
from algorithms.fedavg import FedAvg
from algorithms.fedprox import FedProx
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import copy, num_bytes
from tests.support.fedbuff_toys import TRAIN, Rounds, toy_of, trained
from tests.support.toy_networks import Quadratic, normalized_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients

ALONE: dict[str, Any] = {"mixing": 1.0, "staleness": "constant", "proximal_weight": 0}


def factor(method: FedAsync, age: int) -> float:
    if method.staleness == "constant":
        return 1.0
    if method.staleness == "polynomial":
        return float((1 + age) ** -method.exponent)
    return 1.0 if age <= method.hinge else 1 / (method.slope * (age - method.hinge) + 1)


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "hinge": {"staleness": "hinge", "slope": 2.0, "hinge": 1, "mixing": 0.9, "proximal_weight": 0.5},
    "constant": {"staleness": "constant", "mixing": 0.3, "proximal_weight": 2.0},
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_inv_async_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str, size: int) -> None:
    method = FedAsync(**SETTINGS[name])
    rounds = Rounds(toy_of(method), [1, 2, 5, 3], size, concurrency=4)
    models, ages = [copy(rounds.toy.server["model"])], set[int]()
    for t in range(7):
        found = rounds.step()["model"]
        turnout, now = rounds.turnouts[-1], models[t]
        targets = []
        for client in turnout.cohort:
            began = turnout.started.get(client, t)
            ages.add(t - began)
            share = method.mixing * factor(method, t - began)
            own = trained(rounds.toy, models[began], client, began, method.proximal_weight)
            targets.append({key: (1 - share) * leaf + share * own[key] for key, leaf in now.items()})
        models.append({key: torch.stack([target[key] for target in targets]).mean(0) for key in now})
        assert_close(found, models[-1], 1e-12)
    assert len(ages) > 2


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_async_2_equal_devices_give_fedavg_of_the_same_cohorts(mode: str) -> None:
    buffered = Rounds(toy_of(FedAsync(**ALONE), mode=mode), [3] * 4, 2)
    plain = toy_of(FedAvg(aggregation="uniform"), mode=mode)
    for _ in range(6):
        server = buffered.step()
        assert_equal(server["model"], plain.step(buffered.turnouts[-1].cohort)["model"])


def test_inv_async_3_one_at_a_time_each_model_is_the_next() -> None:
    method = FedAsync(**{**ALONE, "proximal_weight": 0.7})
    rounds, plain = Rounds(toy_of(method), [1, 5, 2, 3], 1), toy_of(FedProx(proximal_weight=0.7))
    for _ in range(6):
        server = rounds.step()
        assert_close(server["model"], plain.step(rounds.turnouts[-1].cohort)["model"], 1e-12)
        assert plain.federation.traffic.by_client == rounds.toy.federation.traffic.by_client


def test_inv_async_4_shares_by_age() -> None:
    ages = range(7)
    assert [FedAsync(staleness="constant").share(age) for age in ages] == [0.6] * 7
    assert [FedAsync().share(age) for age in ages] == pytest.approx([0.6 / (1 + age) ** 0.5 for age in ages])
    hinge = [FedAsync(staleness="hinge").share(age) for age in ages]
    assert hinge == pytest.approx([0.6] * 5 + [0.6 / 11, 0.6 / 21])
    assert FedAsync(exponent=0).share(5) == FedAsync(staleness="hinge", slope=0).share(9) == 0.6
    for method in (FedAsync(), FedAsync(staleness="hinge")):
        shares = [method.share(age) for age in range(20)]
        assert shares == sorted(shares, reverse=True) and shares[0] == method.mixing


def test_inv_async_5_known_path() -> None:
    """Client k's model after one full step of rate 0.1 is w + 0.1 (point - w)."""
    train = TrainConfig(rounds=8, clients_per_round=1, local_epochs=1, batch_size=None, lr=0.1)
    method = FedAsync(mixing=0.5, exponent=1.0, proximal_weight=0)
    toy = Toy(method, quadratic_clients([0.0, 4.0, 2.0], [1, 1, 1]), Quadratic(), train)
    rounds, w = Rounds(toy, [1, 2, 5], 1, concurrency=3), [1.0]
    for t in range(6):
        found = float(rounds.step()["model"]["theta"])
        (client,) = rounds.turnouts[-1].cohort
        began = rounds.turnouts[-1].started.get(client, t)
        sent = w[began] + 0.1 * ([0.0, 4.0, 2.0][client] - w[began])
        w.append(w[-1] + 0.5 / (1 + t - began) * (sent - w[-1]))
        assert abs(found - w[-1]) < 1e-12


@pytest.mark.parametrize("hosts", [2, 3])
def test_inv_async_6_rounds_are_the_same_on_any_number_of_hosts(hosts: int) -> None:
    rounds = Rounds(toy_of(FedAsync(), hosts=hosts), [1, 2, 5, 3], 1, concurrency=4)
    alone = Rounds(toy_of(FedAsync()), [1, 2, 5, 3], 1, concurrency=4)
    assert_equal(rounds.run(8), alone.run(8))


def test_what_travels_and_what_is_kept() -> None:
    toy = toy_of(FedAsync(), task=normalized_layers())
    rounds = Rounds(toy, [1, 2, 5, 3], 1, concurrency=4)
    for _ in range(5):
        size = num_bytes(toy.server["model"])
        rounds.step()
        assert set(toy.federation.traffic.by_client.values()) == {(size, size)}
    assert not any(toy.states().values())
    assert torch.isfinite(toy.server["model"]["norm.running_var"]).all()


def test_a_remark_says_that_the_paper_has_no_buffer() -> None:
    toy = toy_of(FedAsync())
    (remark,) = toy.algorithm.remarks(toy.context)
    assert "train.clients_per_round is 2" in remark and "system.concurrency" in remark
    single = toy_of(FedAsync(), TRAIN.model_copy(update={"clients_per_round": 1}))
    assert not single.algorithm.remarks(single.context)


@pytest.mark.parametrize("wrong", [{"mixing": 0}, {"mixing": 1.1}, {"hinge": -1}, {"exponent": -0.5}])
def test_values_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FedAsync(**wrong)


@pytest.mark.parametrize("make", [None, normalized_layers])
def test_looped_and_stacked_agree_on_old_models(make: Any) -> None:
    looped, stacked = (
        Rounds(toy_of(FedAsync(), task=make and make(), mode=mode), [1, 2, 5, 3], 3, concurrency=4)
        for mode in ("looped", "vectorized")
    )
    for _ in range(5):
        assert_close(looped.step(), stacked.step(), 1e-10)
    assert any(turnout.started for turnout in looped.turnouts)
