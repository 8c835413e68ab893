"""Stragglers (train.stragglers): who they are, which steps they take, and what counts these."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import rayfl
from algorithms.centralized import Centralized
from algorithms.fedavg import FedAvg
from algorithms.fedcm import FedCM
from algorithms.fednova import FedNova, normalizer, overshoot
from algorithms.fedprox import FedProx
from algorithms.fedrep import FedRep
from algorithms.l2gd import L2GD
from algorithms.pfedhn import PFedHN
from algorithms.scaffold import Scaffold
from rayfl.engine.updates.settings import TrainConfig
from rayfl.engine.updates.stragglers import WHOLE, steps_within, work_of
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, interpolate
from rayfl.randomness import RandomStreams
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(rounds=4, clients_per_round=3, local_epochs=4, batch_size=4, lr=0.1, momentum=0.5)
LAGGING = TRAIN.model_copy(update={"stragglers": 1.0, "straggler_epochs": 2})
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def toy(algorithm: Any, train: TrainConfig = TRAIN, mode: str = "looped", **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), train, mode=mode, **options)


def test_who_lags_and_how_much_is_drawn_for_each_client_and_round() -> None:
    train = TRAIN.model_copy(update={"stragglers": 0.25, "straggler_epochs": 2})
    found = [[work_of(train, RandomStreams(3), round, client) for client in range(400)] for round in range(20)]
    lagging = np.array([[work < 1 for work in row] for row in found])
    # of the quarter that is drawn, a third does all four epochs nonetheless
    assert abs(lagging.mean() - 0.25 * 2 / 3) < 0.02
    assert {work for row in found for work in row} == {Fraction(1, 2), Fraction(3, 4), WHOLE}
    half = sum(work == Fraction(1, 2) for row in found for work in row) / lagging.sum()
    assert abs(half - 0.5) < 0.03
    assert lagging.std(axis=1).min() > 0 and len({tuple(row) for row in lagging.tolist()}) == 20
    assert found[7][11] == work_of(train, RandomStreams(3), 7, 11)
    assert all(work_of(TRAIN, RandomStreams(3), 0, client) == WHOLE for client in range(50))


def test_a_share_of_steps_is_rounded_up() -> None:
    assert [steps_within(steps, Fraction(1, 3)) for steps in (0, 1, 3, 4)] == [0, 1, 1, 2]
    assert steps_within(7, WHOLE) == 7


@MODES
@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(proximal_weight=0.3)])
def test_a_straggler_takes_the_first_steps_of_a_client_that_does_not_lag(algorithm: Any, mode: str) -> None:
    """In a round of one client, x of E epochs are those of a configuration with x epochs."""
    for client in range(len(SIZES)):
        lagging = toy(algorithm, LAGGING, mode)
        epochs = int(lagging.context.work_of(client) * 4)
        assert 2 <= epochs <= 4
        plain = toy(algorithm, TRAIN.model_copy(update={"local_epochs": epochs}), mode)
        assert_equal(lagging.step([client]), plain.step([client]))


def test_passes_over_epochs_of_a_methods_own_are_as_much_shorter() -> None:
    client = next(client for client in range(4) if toy(FedAvg(), LAGGING).context.work_of(client) == Fraction(1, 2))
    lagging, plain = toy(FedRep(head_epochs=4, body_epochs=2), LAGGING), toy(FedRep(head_epochs=2, body_epochs=1))
    assert_equal(lagging.step([client]), plain.step([client]))
    assert_equal(lagging.states(), plain.states())


@MODES
def test_all_together_are_the_mean_of_each_alone(mode: str) -> None:
    together = toy(FedAvg(aggregation="uniform"), LAGGING, mode).step([0, 1, 2, 3])["model"]
    alone = [toy(FedAvg(), LAGGING, mode).step([client])["model"] for client in range(4)]
    mean: Tree = {name: sum(tree[name] for tree in alone) / 4 for name in together}
    assert_close(together, mean, 1e-6)


def test_inv_nova_with_stragglers_divides_by_the_steps_that_were_taken() -> None:
    nova = toy(FedNova(), LAGGING)
    start, context = copy(nova.server["model"]), nova.context
    cohort = [0, 1, 2, 3]
    steps = [-(-SIZES[client] // 4) * int(context.work_of(client) * 4) for client in cohort]
    assert steps == [context.steps_of(client, SIZES[client]) for client in cohort] and len(set(steps)) > 2
    alone = [toy(FedAvg(), LAGGING).step([client])["model"] for client in cohort]
    applied = np.array([normalizer(tau, 0.5) for tau in steps])
    shares = np.array(SIZES) / sum(SIZES)
    expected = {}
    for name, leaf in start.items():
        direction = sum(p * (leaf - tree[name]) / a for p, tree, a in zip(shares, alone, applied, strict=True))
        expected[name] = leaf - float((shares * applied).sum()) * direction
    assert_close(nova.step(cohort)["model"], expected, 1e-6)
    assert overshoot(shares, applied, applied) != 1
    assert interpolate(start, start, 1.0).keys() == expected.keys()


@pytest.mark.parametrize("algorithm", [Scaffold(), FedCM()])
def test_what_divides_by_steps_stays_finite_and_has_the_clients_own_steps(algorithm: Any) -> None:
    train = LAGGING.model_copy(update={"momentum": 0.0})
    lagging = toy(algorithm, train)
    context = lagging.context
    if isinstance(algorithm, FedCM):
        steps = np.array([context.steps_of(client, SIZES[client]) for client in range(4)])
        assert abs(algorithm.mean_steps([0, 1, 2, 3], lagging.federation) - steps.mean()) < 1e-12
    else:
        before, after = copy(lagging.server["model"]), lagging.step([0])
        tau = context.steps_of(0, SIZES[0])
        for name, leaf in lagging.states()[0]["control"].items():
            assert_close(leaf, (before[name] - after["model"][name]) / (tau * 0.1), 1e-5)
    lagging.run()


def test_evaluation_and_newcomers_do_not_lag() -> None:
    tuned = FedAvg(finetune_epochs=2)
    lagging = toy(tuned, LAGGING, unseen=1)
    assert lagging.context.work_of(3) == WHOLE
    plain = toy(tuned, TRAIN, unseen=1)
    for client, scored in lagging.scores(final=True).items():
        for name, statistics in plain.scores(final=True)[client].items():
            assert scored[name].vector.tolist() == statistics.vector.tolist()


def test_what_has_no_epochs_says_that_nobody_lags() -> None:
    def said(algorithm: Any) -> list[str]:
        context = toy(FedAvg(), LAGGING).context
        return [*algorithm.remarks(context)]

    epochs, remark = said(PFedHN())
    assert epochs.startswith("train.local_epochs has no effect")
    assert remark == "train.stragglers has no effect: algorithm.inner_steps says how many local steps there are"
    assert said(PFedHN(inner_steps=None)) == []
    for algorithm, words in ((Centralized(), "no client can lag"), (L2GD(), "of which nobody can do a part")):
        train = LAGGING.model_copy(update={"momentum": 0.0, "clients_per_round": "all"})
        one = toy(FedAvg(), train)
        with pytest.raises(ConfigError, match=words):
            algorithm.check(one.task, one.context)


def test_sections_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="straggler_epochs=1 to local_epochs=1 epochs, so that none does less"):
        TrainConfig(stragglers=0.5, local_epochs=1)
    options = {"cluster.backend": "inline", "storage_path": str(tmp_path), "train.local_epochs": 3, "system": "sampled"}
    with pytest.raises(ConfigError, match=r"train\.stragglers: on simulated devices \(system\) slow clients take"):
        rayfl.run("quickstart", **{**options, "train.stragglers": 0.5})
