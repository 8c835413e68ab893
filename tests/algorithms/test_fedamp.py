"""FedAMP and HeurFedAMP: invariants AMP, who is mixed, partial participation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from algorithms.fedamp import FedAMP, attraction, heuristic_attraction
from algorithms.local import Local
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import copy, tensors, weighted_sum
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round="all", local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)


def distances(rows: torch.Tensor) -> torch.Tensor:
    return (rows[:, None] - rows[None]).square().sum(-1)


def cosines(rows: torch.Tensor) -> torch.Tensor:
    unit = rows / rows.norm(dim=1, keepdim=True)
    return unit @ unit.T


def points(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("clip", [True, False])
def test_inv_amp_1_rows_sum_to_one(clip: bool) -> None:
    rows, everyone = points(), range(5)
    for alpha in (0.01, 0.5, 100.0):
        weights = attraction(distances(rows), everyone, 2.0, alpha, clip)
        assert_close(weights.sum(1), torch.ones(5, dtype=torch.float64), 1e-12)
        assert not clip or bool((weights >= 0).all())
        if alpha < 0.5 or not clip:
            assert_equal(weights, weights.T)
    weights = heuristic_attraction(cosines(rows), everyone, 3.0, 0.4)
    assert_close(weights.sum(1), torch.ones(5, dtype=torch.float64), 1e-12)
    assert_close(weights.diagonal(), torch.full((5,), 0.4, dtype=torch.float64), 0)
    assert bool((attraction(distances(rows), everyone, 2.0, 100.0, clip=False).diagonal() < 0).any())


def test_the_attraction_of_two_models_is_the_slope_of_the_kernel() -> None:
    """A(x) = 1 - exp(-x / sigma), whose slope at x = 2 with sigma = 2 is 1 / (2 e)."""
    weights = attraction(torch.tensor([[0.0, 2.0]], dtype=torch.float64), [0], 2.0, 0.5)
    assert_close(weights[0, 1], torch.tensor(0.25 / math.e, dtype=torch.float64), 1e-15)


@pytest.mark.parametrize("heuristic", [True, False])
def test_inv_amp_2_of_equal_models_the_mixture_is_that_model(heuristic: bool) -> None:
    toy = Toy(FedAMP(heuristic=heuristic, sigma=2.0, alpha=0.1), random_clients(SIZES), two_layers(), TRAIN)
    model = toy.server["model"]
    own = {str(client): {"parameters": copy(model)} for client in range(4)}
    toy.server = {"model": model, "own": own}
    toy.federation.begin_round(0, ("test",))
    toy.step()
    assert all("cloud" in found["test"] for found in toy.federation.trained_scores.values())
    for row in toy.algorithm.weights(range(4), own, 0).tolist():
        assert_close(weighted_sum([copy(model) for _ in row], row), model, 1e-12)


def test_inv_amp_3_the_mean_is_conserved_by_symmetric_weights() -> None:
    rows = points()
    mixed = attraction(distances(rows), range(5), 2.0, 0.3) @ rows
    assert_close(mixed.sum(0), rows.sum(0), 1e-12)
    assert not torch.allclose((heuristic_attraction(cosines(rows), range(5), 2.0, 0.3) @ rows).sum(0), rows.sum(0))


@pytest.mark.parametrize("heuristic", [True, False])
@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_amp_4_without_a_pull_it_is_local_training(heuristic: bool, make: Any) -> None:
    train = TRAIN.model_copy(update={"clients_per_round": 3})
    amp = Toy(FedAMP(proximal_weight=0, heuristic=heuristic, sigma=0.7), random_clients(SIZES), make(), train)
    local = Toy(Local(), random_clients(SIZES), make(), train)
    for _ in range(TRAIN.rounds):
        amp.step()
        local.step()
    for client, state in local.states().items():
        assert_equal(amp.states()[client]["personal"], state["local"])
    left, right = amp.scores(), local.scores()
    for client in range(4):
        assert left[client]["personalized"].vector.tolist() == right[client]["personalized"].vector.tolist()


def test_inv_amp_5_without_sharpness_all_others_weigh_the_same() -> None:
    rows = points()
    weights = heuristic_attraction(cosines(rows), range(5), 0.0, 0.6)
    assert_close(weights[0], torch.tensor([0.6, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64), 1e-15)
    train = TrainConfig(rounds=3, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.1)
    toy = Toy(FedAMP(sigma=0.0, start="cloud"), quadratic_clients([3, -1, 4], [2, 2, 2]), Quadratic(), train)
    # from the mean of all, each moves by lr towards its point, up to the weak pull: uniform federated averaging
    expected = 1.0
    for _ in range(3):
        own = toy.step()["own"]
        expected += 0.1 * (2 - expected)
        found = torch.stack([own[str(client)]["parameters"]["theta"] for client in range(3)]).mean()
        assert found.item() == pytest.approx(expected, abs=1e-4)
    assert not toy.states()


@pytest.mark.parametrize("mode", ["looped", pytest.param("vectorized", marks=pytest.mark.slow)])
def test_inv_amp_6_the_local_solution_of_quadratics(mode: str) -> None:
    train = TrainConfig(rounds=2, clients_per_round="all", local_epochs=300, batch_size=None, lr=0.2)
    algorithm = FedAMP(heuristic=False, sigma=5.0, alpha=0.5, proximal_weight=0.8)
    toy = Toy(algorithm, quadratic_clients([3, -1, 4], [2, 2, 2]), Quadratic(), train, mode=mode)
    rho, w = 0.8 / 0.5, torch.tensor([3.0, -1.0, 4.0], dtype=torch.float64)
    for round in range(2):
        if round:  # before, there is nobody to be pulled to
            w = (torch.tensor([3.0, -1.0, 4.0]) + rho * attraction(distances(w[:, None]), range(3), 5.0, 0.5) @ w) / (
                1 + rho
            )
        own = toy.step()["own"]
        assert_close(torch.stack([own[str(k)]["parameters"]["theta"][0] for k in range(3)]), w, 1e-10)


def test_inv_amp_7_known_values() -> None:
    w = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    weights = attraction(distances(w[:, None]), range(3), 1.0, 0.5)
    assert_close(weights[0, 1], torch.tensor(0.183939720586, dtype=torch.float64), 1e-11)
    assert_close(weights[0, 2], torch.tensor(0.000061704902, dtype=torch.float64), 1e-11)
    assert_close(weights[1, 2], torch.tensor(0.009157819444, dtype=torch.float64), 1e-11)
    mixed = torch.tensor([0.184124835292, 0.834375918303, 2.981499246405], dtype=torch.float64)
    assert_close(weights @ w, mixed, 1e-11)
    rows = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    weights = heuristic_attraction(cosines(rows), range(3), 2.0, 0.3)
    assert_close(weights[0], torch.tensor([0.3, 0.563100777755, 0.136899222245], dtype=torch.float64), 1e-11)
    assert_close(weights[0] @ rows, torch.tensor([0.863100777755, 0.7], dtype=torch.float64), 1e-11)


@pytest.mark.parametrize("heuristic", [True, False])
def test_a_single_client_is_mixed_with_nobody(heuristic: bool) -> None:
    own = {"2": {"parameters": {"theta": torch.tensor([5.0, 1.0])}}}
    assert FedAMP(heuristic=heuristic).weights([2], own, 0).tolist() == [[1.0]]


def test_the_weight_of_ones_own_model_is_chosen_or_what_is_left() -> None:
    own = {str(k): {"parameters": {"theta": row}} for k, row in enumerate(points(4).float())}
    everyone = range(4)
    assert_close(FedAMP().weights(everyone, own, 0).diagonal(), torch.full((4,), 0.25, dtype=torch.float64), 1e-15)
    chosen = FedAMP(self_weight=0.7).weights(everyone, own, 0)
    assert_close(chosen.diagonal(), torch.full((4,), 0.7, dtype=torch.float64), 1e-15)
    far = {"heuristic": False, "sigma": 2.0, "alpha": 100.0}
    clipped, whole = (FedAMP(clip_self=clip, **far).weights(everyone, own, 0) for clip in (True, False))
    assert bool((clipped.diagonal() >= 0).all())
    assert bool((whole.diagonal() < 0).any())
    assert_close(whole.sum(1), clipped.sum(1), 1e-12)


def test_only_clients_that_have_trained_are_mixed() -> None:
    toy = Toy(FedAMP(), random_clients(SIZES), two_layers(), TRAIN)
    toy.step([1, 3])
    assert set(toy.server["own"]) == {"1", "3"}
    toy.step([0, 3])
    assert set(toy.server["own"]) == {"0", "1", "3"}
    assert FedAMP().weights([0, 3], toy.server["own"], 0).shape == (2, 3)
    initial = toy.server["model"]
    assert set(toy.scores()[2]) == {"personalized"}
    assert_equal(initial, toy.task.network.initialize(toy.context.streams.integer("init.global")))


def test_alpha_decays_in_steps_to_its_least_value() -> None:
    algorithm = FedAMP(alpha=8, alpha_decay=0.5, alpha_every=3)
    assert [algorithm.alpha_in(t) for t in range(7)] == [8, 8, 8, 4, 4, 4, 2]
    assert algorithm.alpha_in(30) == 1.0
    few = FedAMP(alpha=0.2)
    assert few.alpha_in(90) == 0.2, "what is less from the beginning stays"
    toy = Toy(few, random_clients(SIZES), two_layers(), TRAIN)
    (said,) = few.remarks(toy.context)
    assert "alpha stays at 0.2" in said
    assert FedAMP(alpha=0.2, alpha_decay=1).remarks(toy.context) == algorithm.remarks(toy.context) == ()


def test_a_pull_that_overshoots_in_a_later_round_is_refused() -> None:
    toy = Toy(FedAMP(), random_clients(SIZES), two_layers(), TRAIN.model_copy(update={"rounds": 2000, "lr": 0.005}))
    toy.algorithm.check(toy.task, toy.context)
    falling = FedAMP(alpha_min=1e-6)
    with pytest.raises(ConfigError, match=r"from round 210 on.*is 5, not below 1; raise algorithm\.alpha_min"):
        falling.check(toy.task, toy.context)
    falling.check(toy.task, replace(toy.context, rounds=210))


def test_a_client_without_a_cloud_model_is_not_pulled() -> None:
    """In its first round, whenever that is, it does what a client alone does; a newcomer likewise."""
    train = TRAIN.model_copy(update={"clients_per_round": 3})
    amp = Toy(FedAMP(alpha=0.5), random_clients(SIZES), two_layers(), train)
    alone = Toy(Local(), random_clients(SIZES), two_layers(), train)
    for toy in (amp, alone):
        toy.step([0, 1])
        toy.step([0, 2])
    assert_equal(amp.states()[2]["personal"], alone.states()[2]["local"])
    assert not torch.equal(amp.states()[0]["personal"]["inner.weight"], alone.states()[0]["local"]["inner.weight"])


def test_a_zero_scale_of_distances_is_refused() -> None:
    toy = Toy(FedAMP(heuristic=False, sigma=0), random_clients(SIZES), two_layers(), TRAIN)
    with pytest.raises(ConfigError, match=r"algorithm\.sigma"):
        toy.algorithm.check(toy.task, toy.context)
    FedAMP(sigma=0).check(toy.task, toy.context)


def test_running_statistics_are_mixed_with_the_parameters() -> None:
    toy = Toy(FedAMP(start="cloud"), random_clients((8, 12)), normalized_layers(), TRAIN)
    toy.step()
    before = copy(toy.server["own"])
    toy.step()
    assert set(toy.server["own"]["0"]["buffers"]) == set(toy.task.network.buffer_names)
    assert all(bool(torch.isfinite(leaf).all()) for leaf in tensors(toy.server["own"]))
    assert not torch.equal(
        toy.server["own"]["0"]["buffers"]["norm.running_mean"], before["0"]["buffers"]["norm.running_mean"]
    )
