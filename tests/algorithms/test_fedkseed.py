"""FedKSeed: an oracle in plain loops, the model from scalars, probabilities of seeds, bytes, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from algorithms.decomfl import DeComFL
from algorithms.fedkseed import FedKSeed, chances
from algorithms.feedsign import FeedSign
from algorithms.parts.zeroth_order import walked
from rayfl.engine.gradients.counted_normals import drawn_keys
from rayfl.errors import ConfigError
from rayfl.experiment.checks import statistics_remarks
from rayfl.params import Tree
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
    normalized_toys,
    rate,
    shares,
    shifted,
    slope,
    toy_of,
)

K = 6


def begun(toy: Toy) -> Tree:
    """w_0."""
    found: Tree = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    return found


@pytest.mark.parametrize("sampling", ["uniform", "amplitude"])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_fedkseed_1_rounds_are_those_of_plain_loops(sampling: Any, weights: Any, mode: str) -> None:
    """Few seeds, so that a pass draws some of them several times, and slopes of which some are clipped in phi."""
    eps, clip = 1e-3, 0.4
    method = FedKSeed(
        candidates=K,
        sampling=sampling,
        aggregation=weights,
        perturbation=eps,
        amplitude_clip=clip,
    )
    toy, streams = toy_of(method, mode=mode), toy_of(method).context.streams
    keys = drawn_keys(streams.generator("directions"), K)
    start = w = begun(toy)
    total, history = [0.0] * K, [[0.0] for _ in range(K)]
    for round, cohort in enumerate(COHORTS):
        p = None
        if sampling == "amplitude":
            phi = np.array([np.mean(found) for found in history])
            if phi.max() > phi.min():
                raised = np.exp((phi - phi.min()) / (phi.max() - phi.min()))
                p = raised / raised.sum()
        ends = {name: torch.zeros_like(leaf) for name, leaf in w.items()}
        for client, share in shares(cohort, weights).items():
            model, data = dict(w), batches(toy, round, client)
            seeds = streams.generator("directions", round, client).choice(
                K, size=len(data), p=np.full(K, 1 / K) if sampling == "amplitude" and p is None else p
            )
            for (x, y), j in zip(data, seeds.tolist(), strict=True):
                z = direction(keys[j], model)
                g = slope(model, z, eps, True, x, y)
                model = shifted(model, z, -rate(round) * g)
                total[j] += rate(round) * share * g
                history[j].append(min(abs(g), clip))
            ends = {name: leaf + share * model[name] for name, leaf in ends.items()}
        w = dict(start)
        for j in range(K):
            w = shifted(w, direction(keys[j], w), -total[j])
        toy.step(cohort)
        assert_close(toy.server["model"], w, 1e-12)
        # the model that the scalars make is the mean of where the clients' own steps have led
        assert_close(toy.server["model"], ends, 1e-12)
        assert_close(toy.server["accumulator"], torch.tensor(total, dtype=torch.float64), 1e-12)
    assert max(float((w[name] - start[name]).abs().max()) for name in NAMES) > 1e-2
    if sampling == "amplitude":
        sizes = [len(found) for found in history]
        assert toy.server["draws"].tolist() == sizes
        assert any(found == clip for one in history for found in one)
        assert any(0 < found < clip for one in history for found in one)


def test_inv_fedkseed_2_the_first_model_and_the_scalars_alone_make_the_model() -> None:
    """To the bit, and in whatever order clients were asked before."""
    for double in (True, False):
        data = random_clients(SIZES, dtype=torch.float64 if double else torch.float32)
        toy = Toy(FedKSeed(candidates=20), data, two_layers(double=double), TRAIN)
        for cohort in COHORTS:
            toy.step(cohort)
            keys = torch.from_numpy(drawn_keys(toy.context.streams.generator("directions"), 20))
            assert_equal(walked(begun(toy), keys, toy.server["accumulator"], toy.task), toy.server["model"])


def test_inv_fedkseed_3_messages_do_not_grow_with_the_model() -> None:
    """4 bytes for the number of a seed and 4 for a slope, for each step; down 4 for each seed, with p 8."""
    for sampling, each in (("uniform", 4), ("amplitude", 8)):
        for hidden in (7, 300):
            data = random_clients(SIZES, dtype=torch.float32)
            method = FedKSeed(candidates=4096, sampling=sampling)  # type: ignore[arg-type]
            toy = Toy(method, data, two_layers(hidden=hidden, double=False), TRAIN)
            toy.step([0, 1, 2])
            steps = {0: 6, 1: 6, 2: 2}
            assert toy.federation.traffic.by_client == {k: (4096 * each, 8 * steps[k]) for k in steps}


@pytest.mark.parametrize("sampling", ["uniform", "amplitude"])
@pytest.mark.parametrize("double", [True, False])
def test_vectorized_agrees_with_looped(sampling: Any, double: bool) -> None:
    method = FedKSeed(candidates=8, sampling=sampling)
    assert_modes_agree(method, SIZES, TRAIN, double, 1e-10 if double else 2e-3)


def test_probabilities_of_seeds() -> None:
    found = chances(np.array([1.0, 3.0, 2.0]))
    raised = np.exp([0.0, 1.0, 0.5])
    assert np.allclose(found, raised / raised.sum(), atol=1e-15)
    assert chances(np.array([2.0, 2.0])).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("method", [FedKSeed(candidates=9), DeComFL(local_steps=2), FeedSign()])
def test_dropout_is_off_and_running_statistics_stay(method: Any, mode: str) -> None:
    toys = normalized_toys(method, mode)
    for toy in toys:
        assert any("in evaluation mode" in remark for remark in statistics_remarks(toy.algorithm, toy.task))
        before, buffers = begun(toy), toy.task.network.buffer_names
        assert buffers
        for cohort in COHORTS:
            toy.step(cohort)
        assert_equal({name: toy.server["model"][name] for name in buffers}, {name: before[name] for name in buffers})
        assert not torch.equal(toy.server["model"]["inner.weight"], before["inner.weight"])
    assert_equal(toys[0].server["model"], toys[1].server["model"])


@pytest.mark.parametrize("method", [FedKSeed(), DeComFL(), FeedSign()])
@pytest.mark.parametrize(
    ("option", "value"),
    [("optimizer", "adam"), ("momentum", 0.5), ("weight_decay", 0.1), ("max_grad_norm", 1.0)],
)
def test_steps_that_slopes_do_not_tell_are_refused(method: Any, option: str, value: Any) -> None:
    toy = toy_of(method, TRAIN.model_copy(update={option: value}))
    with pytest.raises(ConfigError, match=f"train.{option}"):
        method.check(toy.task, toy.context)
    plain = toy_of(method)
    method.check(plain.task, plain.context)


def test_a_client_without_steps_sends_nothing_and_the_model_stays() -> None:
    toy = toy_of(FedKSeed(candidates=5), TRAIN.model_copy(update={"local_epochs": 0}))
    toy.step([0, 1])
    assert_equal(toy.server["model"], begun(toy))
    assert toy.federation.traffic.by_client == {0: (40, 0), 1: (40, 0)}
