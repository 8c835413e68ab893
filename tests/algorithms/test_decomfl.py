"""DeComFL: an oracle in plain loops, clients that make up for missed rounds, bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.decomfl import DeComFL
from algorithms.parts.zeroth_order import walked
from rayfl.engine.gradients.counted_normals import drawn_keys
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients
from tests.support.zeroth_order_toys import (
    COHORTS,
    NAMES,
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


@pytest.mark.parametrize("difference", ["forward", "central"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_decomfl_1_rounds_are_those_of_plain_loops(difference: Any, weights: Any, mode: str) -> None:
    steps, directions, mu = 3, 2, 1e-2
    method = DeComFL(
        local_steps=steps, directions=directions, perturbation=mu, difference=difference, aggregation=weights
    )
    toy = toy_of(method, mode=mode)
    start = w = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    for round, cohort in enumerate(COHORTS):
        eta = rate(round)
        keys = drawn_keys(toy.context.streams.generator("directions", round), steps, directions)
        mean = [[0.0] * directions for _ in range(steps)]
        ends = {name: torch.zeros_like(leaf) for name, leaf in w.items()}
        for client, share in shares(cohort, weights).items():
            model = dict(w)
            for k, (x, y) in enumerate(batches(toy, round, client, steps)):
                z = [direction(keys[k, p], model) for p in range(directions)]
                found = [slope(model, z[p], mu, difference == "central", x, y) for p in range(directions)]
                for p in range(directions):
                    model = shifted(model, z[p], -eta / directions * found[p])
                    mean[k][p] += share * found[p]
            ends = {name: leaf + share * model[name] for name, leaf in ends.items()}
        for k in range(steps):
            for p in range(directions):
                w = shifted(w, direction(keys[k, p], w), -eta / directions * mean[k][p])
        toy.step(cohort)
        assert_close(toy.server["model"], w, 1e-12)
        # the steps of the mean slopes lead where the clients' own steps lead in the mean
        assert_close(toy.server["model"], ends, 1e-12)
    assert max(float((w[name] - start[name]).abs().max()) for name in NAMES) > 1e-2


@pytest.mark.parametrize("double", [True, False])
def test_inv_decomfl_2_who_has_missed_rounds_makes_the_model_from_their_slopes(double: bool) -> None:
    """From the first model, or from that of its last round, to the bit."""
    seen: list[Tensor] = []

    class Recorded(DeComFL):
        def decided(self, mean: Tensor) -> Tensor:
            seen.append(mean)
            return mean

    data = random_clients(SIZES, dtype=torch.float64 if double else torch.float32)
    toy = Toy(Recorded(local_steps=2, directions=3), data, two_layers(double=double), TRAIN)
    models = [toy.task.network.initialize(toy.context.streams.integer("init.global"))]
    for cohort in COHORTS:
        models.append(toy.step(cohort)["model"])
    for since in range(len(COHORTS)):
        model = models[since]
        for round in range(since, len(COHORTS)):
            keys = torch.from_numpy(drawn_keys(toy.context.streams.generator("directions", round), 2, 3)).view(6, 7)
            model = walked(model, keys, rate(round) / 3 * seen[round].double().flatten(), toy.task)
        assert_equal(model, toy.server["model"])


def test_inv_decomfl_3_messages_grow_with_missed_rounds_and_not_with_the_model() -> None:
    """8 bytes a seed and 4 a slope, of K = 2 steps with P = 3 directions: 40 a missed round, and 16 for the round."""
    for hidden in (7, 300):
        data = random_clients(SIZES, dtype=torch.float32)
        toy = Toy(DeComFL(local_steps=2, directions=3), data, two_layers(hidden=hidden, double=False), TRAIN)
        missed = {
            0: [0, None, 2, None, 2],
            1: [None, 1, 1, None, None],
            2: [None, 1, 1, 1, None],
            3: [None, None, 2, None, 2],
        }
        for round, cohort in enumerate(COHORTS):
            toy.federation.traffic.by_client.clear()
            toy.step(cohort)
            found = toy.federation.traffic.by_client
            assert found == {client: (16 + 40 * int(missed[client][round] or 0), 24) for client in cohort}


@pytest.mark.parametrize("double", [True, False])
def test_vectorized_agrees_with_looped(double: bool) -> None:
    assert_modes_agree(DeComFL(local_steps=3, directions=2), SIZES, TRAIN, double, 1e-10 if double else 1e-3)


def test_local_epochs_have_no_effect_which_is_said() -> None:
    toys = [toy_of(DeComFL(), TRAIN.model_copy(update={"local_epochs": epochs})) for epochs in (1, 7)]
    for toy in toys:
        toy.run(2)
        assert any("train.local_epochs has no effect" in remark for remark in toy.algorithm.remarks(toy.context))
    assert_equal(toys[0].server["model"], toys[1].server["model"])
