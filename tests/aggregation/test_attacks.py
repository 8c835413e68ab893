"""What malicious clients send, against the formulas of the papers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from rayfl.aggregation.attacks import a_little, against_mean, gaussian, most_deviations, scaled
from rayfl.params import Tree
from tests.support.toys import assert_close

RECEIVED = {"body/w": torch.zeros(400, 5), "b": torch.tensor([1.0, 2.0])}


def message(change: float) -> Tree:
    return {"body": {"w": RECEIVED["body/w"] + change}, "b": RECEIVED["b"] + change}


def test_changes_are_scaled_and_reversed() -> None:
    assert_close(scaled(message(0.5), RECEIVED, 10), message(5.0), atol=1e-6)
    assert_close(scaled(message(0.5), RECEIVED, -1), message(-0.5), atol=1e-6)


def test_noise_stands_in_place_of_the_change() -> None:
    first, second = (gaussian(message(100.0), RECEIVED, 0.3, np.random.default_rng(seed)) for seed in (0, 1))
    noise = first["body"]["w"]
    assert float(noise.std()) == pytest.approx(0.3, rel=0.05) and abs(float(noise.mean())) < 0.03
    assert abs(float(torch.corrcoef(torch.stack([noise.flatten(), second["body"]["w"].flatten()]))[0, 1])) < 0.1


def test_inner_product_manipulation_reverses_the_mean_of_the_honest() -> None:
    honest = [message(1.0), message(3.0)]
    assert_close(against_mean(honest, RECEIVED, 0.5), message(-1.0), atol=1e-6)


def test_a_little_is_as_many_standard_deviations_below_the_mean() -> None:
    honest = [message(1.0), message(3.0), message(5.0)]
    deviation = float(np.std([1, 3, 5]))
    assert_close(a_little(honest, 1.5), message(3 - 1.5 * deviation), atol=1e-6)


@pytest.mark.parametrize(("clients", "malicious"), [(50, 24), (50, 12), (20, 4), (10, 2)])
def test_how_far_is_what_enough_honest_clients_are_expected_to_be(clients: int, malicious: int) -> None:
    supporters = clients // 2 + 1 - malicious
    expected = stats.norm.ppf((clients - malicious - supporters) / (clients - malicious))
    assert most_deviations(clients, malicious) == pytest.approx(max(expected, 0))


def test_how_far_of_the_papers_example() -> None:
    # 50 workers, 24 of them corrupted: 2 supporters are needed, z = 1.43
    assert most_deviations(50, 24) == pytest.approx(1.43, abs=0.01)
    assert most_deviations(3, 2) == 0  # a majority has no need to hide
