"""Epsilon of a client's samples, against opacus used directly."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from rayfl.engine import example_accounting
from rayfl.engine.accountants import Mechanism
from rayfl.engine.example_accounting import Exposure, example_epsilon, exposure_of, largest_and_middle
from rayfl.engine.updates.batches import sampling_rate
from rayfl.messages.privacy import PrivacyConfig

accountants = pytest.importorskip("opacus.accountants")


def privacy(noise: float, delta: float | None = None) -> PrivacyConfig:
    return PrivacyConfig(example_clip_norm=1, example_noise_multiplier=noise, example_delta=delta)


@pytest.mark.parametrize(
    ("noise", "samples", "batch_size", "steps"),
    [
        (1.0, 100, 10, 50),
        (0.5, 60, 10, 30),
        (3.0, 1000, 10, 400),
        (1.2, 8, 10, 5),
        (2.0, 40, None, 20),
        (0.3, 50, 5, 9),
    ],
)
def test_epsilon_is_what_opacus_finds_with_all_of_its_orders(
    noise: float, samples: int, batch_size: int | None, steps: int
) -> None:
    accountant = accountants.RDPAccountant()
    accountant.history = [(noise, sampling_rate(samples, batch_size), steps)]
    expected = accountant.get_epsilon(1 / (10 * samples))
    assert example_epsilon(privacy(noise), {1: steps}, samples, batch_size) == expected > 0
    assert example_epsilon(privacy(noise, 1e-3), {1: steps}, samples, batch_size) == accountant.get_epsilon(1e-3)


def test_steps_on_one_mini_batch_are_one_step_with_less_noise() -> None:
    one = example_epsilon(privacy(2.0), {4: 10}, 50, 5)
    assert one == example_epsilon(privacy(1.0), {1: 10}, 50, 5)
    assert one > example_epsilon(privacy(2.0), {1: 40}, 50, 5)


def test_steps_of_all_samples_are_normal_mechanisms() -> None:
    """Four steps at q = 1 are one with half the noise."""
    many, one = example_epsilon(privacy(2.0), {1: 4}, 10, None), example_epsilon(privacy(1.0), {1: 1}, 10, None)
    assert many == pytest.approx(one, rel=1e-12)


def test_who_draws_nothing_says_nothing() -> None:
    assert example_epsilon(privacy(1.0), {1: 0}, 10, 5) == example_epsilon(privacy(1.0), {}, 10, 5) == 0
    assert example_epsilon(privacy(1.0), {1: 3}, 0, 5) == 0


def test_fewer_samples_and_more_steps_cost_more() -> None:
    found = [example_epsilon(privacy(1.0, 1e-3), {1: steps}, n, 5) for steps, n in ((10, 80), (10, 40), (20, 40))]
    assert found == sorted(found) and len(set(found)) == 3


def in_place_of_opacus(mechanisms: Sequence[Mechanism], delta: float, accountant: str) -> float:
    """Grows with rate and steps and falls with delta, as epsilon does; a seventh less by ``prv``."""
    spread = sum(count * (rate / z) ** 2 for z, rate, count in mechanisms)
    return math.sqrt(spread * math.log(1 / delta)) * (1 if accountant == "rdp" else 0.86)


@pytest.mark.parametrize("times", [[3], [1, 2, 5]], ids=["planned", "as_sampled"])
def test_the_largest_and_the_middle_are_found_with_few_of_the_epsilons_that_take_long(
    times: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def spent(mechanisms: Sequence[Mechanism], delta: float, accountant: str) -> float:
        asked.extend([mechanisms] if accountant == "prv" else [])
        return in_place_of_opacus(mechanisms, delta, accountant)

    monkeypatch.setattr(example_accounting, "spent", spent)
    sizes = [*range(20, 420), 7, 7, 0]
    exposures = [exposure_of(privacy(1.0), {1: times[n % len(times)] * math.ceil(n / 10), 2: 1}, n, 10) for n in sizes]
    found = largest_and_middle(exposures, "prv")
    used = len(asked)
    every = [one.epsilon("prv") for one in exposures]
    assert found == pytest.approx((max(every), statistics.median(every)))
    assert used < len(set(exposures)) / 5
    every = [one.epsilon("rdp") for one in exposures]
    assert largest_and_middle(exposures, "rdp") == pytest.approx((max(every), statistics.median(every)))


@pytest.mark.slow
def test_the_largest_epsilon_by_numerical_composition() -> None:
    exposures = [exposure_of(privacy(1.5), {1: 3 * math.ceil(n / 10)}, n, 10) for n in (30, 40, 60)]
    every = [one.epsilon("prv") for one in exposures]
    largest, middle = largest_and_middle(exposures, "prv")
    assert largest == max(every)
    assert middle == pytest.approx(statistics.median(every))
    assert largest_and_middle([Exposure((), 1.0)], "prv") == (0, 0)
