"""FeedSign: an oracle in plain loops, ties, weights of votes, one bit a message."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.feedsign import FeedSign
from rayfl.engine.gradients.counted_normals import drawn_keys
from tests.support.both_modes import assert_modes_agree
from tests.support.toys import assert_close, assert_equal
from tests.support.zeroth_order_toys import (
    COHORTS,
    SIZES,
    TRAIN,
    batches,
    direction,
    rate,
    shares,
    shifted,
    slope,
    toy_of,
)


def sign(value: float) -> int:
    """-1, 0 or 1."""
    return (value > 0) - (value < 0)


@pytest.mark.parametrize("difference", ["central", "forward"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_feedsign_1_rounds_are_those_of_plain_loops(difference: Any, weights: Any, mode: str) -> None:
    """Forty rounds of changing cohorts, among which are votes without a winner, that leave the model as it is."""
    mu = 1e-2
    toy = toy_of(FeedSign(perturbation=mu, difference=difference, aggregation=weights), mode=mode)
    w = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    ties = 0
    for round in range(40):
        cohort = COHORTS[round % len(COHORTS)]
        z = direction(drawn_keys(toy.context.streams.generator("directions", round), 1, 1)[0, 0], w)
        result = 0.0
        for client, share in shares(cohort, weights).items():
            ((x, y),) = batches(toy, round, client, 1)
            result += share * sign(slope(w, z, mu, difference == "central", x, y))
        winner = sign(round_off(result))
        ties += not winner
        before = toy.server["model"]
        w = shifted(w, z, -rate(round) * winner)
        toy.step(cohort)
        assert_close(toy.server["model"], w, 1e-12)
        if not winner:
            assert_equal(toy.server["model"], before)
    assert ties or weights == "samples"


def round_off(value: float) -> float:
    """A sum of thirds and quarters that is zero but for rounding."""
    return 0.0 if abs(value) < 1e-9 else value


def test_inv_feedsign_2_weights_by_samples_turn_votes() -> None:
    """A client of twelve samples against one of one: alike they are two votes that cancel out."""
    same = other = 0
    for round in range(30):
        toys = [toy_of(FeedSign(aggregation=weights)) for weights in ("uniform", "samples")]
        for toy in toys:
            toy.round = round
            toy.step([1, 2])
        start = toys[0].task.network.initialize(toys[0].context.streams.integer("init.global"))
        alike, weighed = (toy.server["model"]["inner.weight"] for toy in toys)
        if torch.equal(alike, start["inner.weight"]):
            assert not torch.equal(weighed, alike)
            other += 1
        else:
            assert torch.equal(weighed, alike)
            same += 1
    assert same and other


def test_inv_feedsign_3_a_message_is_a_bit() -> None:
    """A byte is what holds it; results of eight missed votes are one byte, of nine two."""
    toy = toy_of(FeedSign(), TRAIN.model_copy(update={"rounds": 30}))
    toy.step([0])
    assert toy.federation.traffic.by_client == {0: (0, 1)}
    for _ in range(8):
        toy.step([1])
    toy.step([0, 1])
    assert toy.federation.traffic.by_client == {0: (2, 1), 1: (1, 1)}


@pytest.mark.parametrize("double", [True, False])
def test_vectorized_agrees_with_looped(double: bool) -> None:
    assert_modes_agree(FeedSign(), SIZES, TRAIN, double, 1e-10 if double else 1e-5)


def test_local_epochs_have_no_effect_which_is_said() -> None:
    toy = toy_of(FeedSign(), TRAIN.model_copy(update={"local_epochs": 7}))
    (remark,) = toy.algorithm.remarks(toy.context)
    assert remark == "train.local_epochs has no effect: a round of FeedSign has one local step"
