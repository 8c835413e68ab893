"""FedDC: invariants DC of clients with one number: what corrects, and where nothing moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.feddc import FedDC
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import zeros_like
from tests.algorithms.test_feddc import kept
from tests.support.toy_networks import Quadratic
from tests.support.toys import Toy, assert_close, quadratic_clients


def quad(algorithm: Any, points: Any, copies: Any, start: float = 1.0, **train: Any) -> Toy:
    section = TrainConfig(**{"rounds": 3, "clients_per_round": "all", "batch_size": None, "lr": 0.1, **train})
    return Toy(algorithm, quadratic_clients(points, copies), Quadratic(start=start), section)


def test_inv_dc_2_with_equal_steps_the_correction_is_the_papers() -> None:
    """grad F_i + alpha (h_i + theta - w) + (g_i - g) / (eta K) with distances g_i, in closed form after one step."""
    points, alpha, eta = (0.0, 4.0, -3.0), 0.5, 0.1
    toy = quad(FedDC(alpha=alpha), points, (1, 1, 1), local_epochs=1, lr=eta)
    w, h, g = 1.0, [0.0] * 3, [0.0] * 3
    for _ in range(5):
        mean = sum(g) / 3
        moved = [-eta * (w - a + alpha * h[i] + (g[i] - mean) / eta) for i, a in enumerate(points)]
        h, g = [a + b for a, b in zip(h, moved, strict=True)], moved
        w = sum(w + m + a for m, a in zip(moved, h, strict=True)) / 3
        toy.step([0, 1, 2])
        assert abs(float(toy.server["model"]["theta"]) - w) < 1e-12
        for i in range(3):
            assert abs(float(kept(toy, "update")[i]["theta"]) * eta - g[i]) < 1e-12


def test_inv_dc_8_the_papers_correction_comes_every_second_round_where_gradients_stay() -> None:
    toys = {c: quad(FedDC(alpha=1e-9, correction=c), (0.0, 4.0), (1, 1), lr=1e-7) for c in ("update", "gradient")}
    found: dict[str, list[float]] = {name: [] for name in toys}
    for name, toy in toys.items():
        for _ in range(4):
            toy.step([0, 1])
            one, other = (float(u["theta"]) for u in kept(toy, "update"))
            found[name].append(one - other)  # minus the difference of the gradients, -4, where nothing is corrected
    assert torch.allclose(torch.tensor(found["update"]), torch.tensor([-4.0, 0, -4, 0]), atol=1e-4)
    assert torch.allclose(torch.tensor(found["gradient"]), torch.tensor([-4.0] * 4), atol=1e-4)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("correction", ["update", "none"])
def test_inv_dc_9_fixed_point(correction: Any, weights: Any) -> None:
    """At the minimum of the mean loss, with drifts -grad F_i / alpha and updates of 0, nothing moves."""
    points, copies, alpha = (0.0, 4.0, 5.0), (1, 2, 3), 0.25
    p = copies if weights == "samples" else (1, 1, 1)
    best = sum(a * q for a, q in zip(points, p, strict=True)) / sum(p)
    for drifts in ("cohort", "all"):
        algorithm = FedDC(alpha=alpha, correction=correction, aggregation=weights, drift_mean=drifts)
        toy = quad(algorithm, points, copies, start=best, local_epochs=3)
        for i, a in enumerate(points):
            drift = {"theta": torch.tensor([-(best - a) / alpha], dtype=torch.float64)}
            state = {"drift": drift} | ({"update": zeros_like(drift)} if correction == "update" else {})
            toy.client_hosts[0].states.replace(i, state, 0)
        before = toy.states()
        for _ in range(3):
            assert abs(float(toy.step([0, 1, 2])["model"]["theta"]) - best) < 1e-12
            assert_close(toy.states(), before, 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("correction", ["update", "gradient", "none"])
def test_reaches_the_minimum_of_the_mean_loss_where_fedavg_with_unequal_steps_does_not(correction: Any) -> None:
    unequal = {"batch_size": 1, "rounds": 90, "local_epochs": 2}
    corrected = quad(FedDC(alpha=0.5, correction=correction), (0.0, 4.0, 5.0), (1, 4, 2), **unequal)
    plain = quad(FedAvg(), (0.0, 4.0, 5.0), (1, 4, 2), **unequal)
    best = (0 * 1 + 4 * 4 + 5 * 2) / 7
    assert abs(float(corrected.run()["model"]["theta"]) - best) < 2e-3
    assert abs(float(plain.run()["model"]["theta"]) - best) > 2e-2
