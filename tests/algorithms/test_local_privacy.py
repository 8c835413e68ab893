"""Noise that each client adds to its own message (``privacy.noise_at=clients``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from algorithms.fedavg import FedAvg
from rayfl.messages.aggregators import Median
from rayfl.messages.compressors import Sign
from rayfl.messages.privacy import PrivacyConfig
from rayfl.params import Tree, leaves, subtract
from tests.algorithms.test_privacy import PRIVATE, toy, uniform
from tests.support.cases import of_kinds, toy_of
from tests.support.cases.base import Case
from tests.support.toys import assert_close, assert_equal

NOISY = PrivacyConfig(clip_norm=0.1, noise_multiplier=2.0, noise_at="clients")
QUIET = PrivacyConfig(clip_norm=0.1, noise_multiplier=1e-16, noise_at="clients")
TINY = PrivacyConfig(clip_norm=1e6, noise_multiplier=1e-16, noise_at="clients")
METHOD = FedAvg(aggregation="uniform")


def flat(tree: Tree) -> torch.Tensor:
    return torch.cat([leaf.flatten() for _, leaf in leaves(tree)])


def noise_of(cohort: list[int], round: int = 0, **options: Any) -> torch.Tensor:
    """What the server's model has of the noise of a cohort's messages."""
    noisy, quiet = (toy(METHOD, one, **options) for one in (NOISY, QUIET))
    noisy.round = quiet.round = round
    return flat(subtract(noisy.step(cohort)["model"], quiet.step(cohort)["model"]))


@of_kinds(PRIVATE)
def test_hardly_any_noise_changes_hardly_anything(case: Case) -> None:
    chosen = replace(case, algorithm=uniform(case))
    free, noisy = toy_of(chosen), toy_of(chosen, privacy=TINY)
    for _ in range(2):
        assert_close(free.step(), noisy.step(), atol=1e-8)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_each_message_has_noise_of_its_own_and_the_mean_has_their_mean(mode: str) -> None:
    alone = [noise_of([client], mode=mode) for client in (0, 1)]
    for noise in alone:
        assert float(noise.std()) == pytest.approx(0.2, rel=0.25)
    assert abs(float(torch.corrcoef(torch.stack(alone))[0, 1])) < 0.5
    torch.testing.assert_close(noise_of([0, 1], mode=mode), sum(alone) / 2, rtol=0, atol=1e-12)


def test_the_mean_is_over_those_who_took_part() -> None:
    """The server adds nothing, so that it divides by their number, however many were expected."""
    for cohort in ([0, 1, 2], [0]):
        assert_close(toy(METHOD, TINY).step(cohort), toy(METHOD, PrivacyConfig()).step(cohort), atol=1e-8)


def test_noise_is_of_the_round_and_the_same_on_any_number_of_hosts() -> None:
    one, several = (toy(METHOD, NOISY, hosts=hosts) for hosts in (1, 3))
    for _ in range(2):
        assert_equal(one.step(), several.step())
    first, second = noise_of([0]), noise_of([0], round=1)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.5


def test_noisy_messages_can_be_compressed() -> None:
    """Compression comes after the noise, and so takes nothing of what is promised away."""
    plain, coarse = toy(METHOD, NOISY), toy(METHOD, NOISY, compression=Sign())
    start = plain.server["model"]
    exact, rough = (dict(leaves(subtract(one.step([0])["model"], start))) for one in (plain, coarse))
    assert_close(rough, {path: leaf.sign() * leaf.abs().mean() for path, leaf in exact.items()}, atol=1e-12)


def test_a_robust_rule_sees_noisy_messages() -> None:
    cohort = [0, 1, 2]
    median = toy(METHOD, NOISY, aggregator=Median())
    alone = torch.stack([flat(toy(METHOD, NOISY).step([client])["model"]) for client in cohort])
    torch.testing.assert_close(flat(median.step(cohort)["model"]), alone.median(0).values, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "noise_at=clients is where noise is added: set privacy.noise_multiplier"),
        ({"noise_multiplier": 1, "noise": "tree"}, "noise=tree is drawn by the server for sums of rounds"),
        ({"noise_multiplier": 1, "target_quantile": 0.5}, "which has no noise of its own"),
    ],
)
def test_what_goes_not_with_it_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrivacyConfig(clip_norm=1, noise_at="clients", **options)
