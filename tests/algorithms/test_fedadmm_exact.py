"""FedADMM: invariants ADMM of clients with one number, whose rounds can be done by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from algorithms.fedadmm import FedADMM
from rayfl.engine.updates.settings import TrainConfig
from tests.support.toy_networks import Quadratic
from tests.support.toys import Toy, quadratic_clients

STARTS = pytest.mark.parametrize("start", ["received", "own"])


def exact(rho: float, points: tuple[float, ...] = (0.0, 4.0), initial: float = 1.0, **options: Any) -> Toy:
    """QUAD, on which one full-batch step of length 1 / (1 + rho) minimises L_i, wherever it starts."""
    train = TrainConfig(rounds=9, clients_per_round=1, local_epochs=1, batch_size=None, lr=1 / (1 + rho))
    data = quadratic_clients(points, range(1, len(points) + 1))
    return Toy(FedADMM(rho=rho, **options), data, Quadratic(start=initial), train)


def scalars(toy: Toy, client: int) -> tuple[float, float]:
    """w_i and y_i of a client of QUAD that has taken part."""
    state = toy.states()[client]
    return float(state["primal"]["theta"]), float(state["dual"]["theta"])


@STARTS
@pytest.mark.parametrize("rho", [0.01, 0.5, 3.0])
def test_inv_admm_5_after_an_exact_solve_the_dual_is_the_negative_gradient(rho: float, start: Any) -> None:
    points = (0.0, 4.0, -3.0)
    toy = exact(rho, points, start=start, server_lr=1.0)
    known = dict.fromkeys(range(3), (1.0, 0.0))
    for cohort in ([0, 1], [1, 2], [0, 1, 2], [0]):
        theta = float(toy.server["model"]["theta"])
        toy.step(cohort)
        moved = 0.0
        for k in cohort:
            w = (points[k] - known[k][1] + rho * theta) / (1 + rho)
            moved += w + (points[k] - w) / rho - known[k][0] - known[k][1] / rho
            known[k] = w, points[k] - w
            assert abs(scalars(toy, k)[0] - w) < 1e-11
            assert abs(scalars(toy, k)[1] - (points[k] - w)) < 1e-11
        assert abs(float(toy.server["model"]["theta"]) - theta - moved / len(cohort)) < 1e-9


@STARTS
@pytest.mark.parametrize(("eta", "place"), [(1.0, 3.0), (None, 3.0), (1.0, 2.0)])
@pytest.mark.parametrize("rho", [0.01, 0.5, 3.0])
def test_inv_admm_6_fixed_point(rho: float, eta: float | None, place: float, start: Any) -> None:
    """Where w_i = theta and y_i = -grad f_i nothing moves, with any cohort; 3 is the minimum of the mean loss."""
    points = (0.0, 4.0, 5.0)
    toy = exact(rho, points, initial=place, start=start, server_lr=eta)
    number = {k: torch.tensor([a - place], dtype=torch.float64) for k, a in enumerate(points)}
    for k, dual in number.items():
        primal = torch.tensor([place], dtype=torch.float64)
        toy.client_hosts[0].states.replace(k, {"primal": {"theta": primal}, "dual": {"theta": dual}}, 0)
    for cohort in ([0, 1, 2], [1], [0, 2]):
        assert abs(float(toy.step(cohort)["model"]["theta"]) - place) < 1e-11
        for k, a in enumerate(points):
            assert abs(scalars(toy, k)[0] - place) < 1e-11
            assert abs(scalars(toy, k)[1] - (a - place)) < 1e-11


def test_rounds_by_hand() -> None:
    for eta, second in ((1.0, 23 / 9), (None, 22 / 9)):
        toy = exact(0.5, server_lr=eta)
        assert abs(float(toy.step([0, 1])["model"]["theta"]) - 7 / 3) < 1e-12
        assert abs(scalars(toy, 0)[0] - 1 / 3) < 1e-12 and abs(scalars(toy, 0)[1] + 1 / 3) < 1e-12
        assert abs(scalars(toy, 1)[0] - 3) < 1e-12 and abs(scalars(toy, 1)[1] - 1) < 1e-12
        assert abs(float(toy.step([1])["model"]["theta"]) - second) < 1e-12
        assert abs(scalars(toy, 1)[0] - 25 / 9) < 1e-12 and abs(scalars(toy, 1)[1] - 11 / 9) < 1e-12


def test_a_first_message_in_a_later_round_is_measured_from_the_initial_theta() -> None:
    toy = exact(0.5, server_lr=1.0)
    assert abs(float(toy.step([0])["model"]["theta"]) + 1 / 3) < 1e-12
    assert abs(float(toy.step([1])["model"]["theta"]) - 37 / 9) < 1e-12


def test_training_starts_where_it_is_told_to() -> None:
    """One short step of QUAD's gradient from there."""
    train = TrainConfig(rounds=9, clients_per_round=1, local_epochs=1, batch_size=None, lr=0.1)
    for start in ("received", "own"):
        toy = Toy(FedADMM(rho=0.5, start=start), quadratic_clients((0.0, 4.0), (1, 2)), Quadratic(), train)  # type: ignore[arg-type]
        w, y = 1.0, 0.0
        for cohort in ([0, 1], [1], [0, 1]):
            theta = float(toy.server["model"]["theta"])
            toy.step(cohort)
            if 0 in cohort:
                begin = w if start == "own" else theta
                w = begin - 0.1 * (begin - 0.0 + y + 0.5 * (begin - theta))
                y = y + 0.5 * (w - theta)
                assert abs(scalars(toy, 0)[0] - w) < 1e-12 and abs(scalars(toy, 0)[1] - y) < 1e-12


def test_what_theta_moves_by_comes_back_times_eta_m_over_the_cohort() -> None:
    """Clients that follow theta, in turn: after a push theta moves on evenly with |S|/m, ever faster with eta = 1."""
    train = TrainConfig(rounds=9, clients_per_round=1, local_epochs=0)
    far = {}
    for eta in (None, 1.0):
        toy = Toy(FedADMM(server_lr=eta), quadratic_clients((0.0, 4.0), (1, 2)), Quadratic(start=0.0), train)
        toy.server = {"model": {"theta": torch.ones(1, dtype=torch.float64)}}
        far[eta] = [float(toy.step([number % 2])["model"]["theta"]) for number in range(12)]
    speeds = {eta: [after - before for before, after in pairwise(thetas)] for eta, thetas in far.items()}
    assert max(speeds[None][-4:]) < 1.01 * min(speeds[None][-4:])
    assert speeds[1.0][-1] > 3 * speeds[1.0][-4] > 100
