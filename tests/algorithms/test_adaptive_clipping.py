"""Clipping norms that follow a quantile, against the algorithm written down a second time."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch

from actors.federation.federation import Federation
from actors.federation.hosts import Hosts
from actors.processes.pool import InlinePool
from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from rayfl.aggregation.exact_sum import Weighted
from rayfl.config.cluster_section import ClientsConfig
from rayfl.engine.client import Client
from rayfl.errors import RunError
from rayfl.messages.privacy import PrivacyConfig
from rayfl.params import Tree, leaves
from rayfl.randomness import RandomStreams
from tests.support.cases import TRAIN
from tests.support.cases.base import SIZES
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

METHOD = FedAvg(aggregation="uniform")
COHORTS = ([0, 1, 2], [1, 3], [0, 1, 2, 3, 4], [2], [0, 4])
EXPECTED = 3
NOISY = PrivacyConfig(clip_norm=0.2, noise_multiplier=0.25, target_quantile=0.4, clip_lr=0.7)
QUIET = PrivacyConfig(clip_norm=0.2, target_quantile=0.6)


def toy(privacy: PrivacyConfig, algorithm: Any = METHOD, **options: Any) -> Toy:
    clients = random_clients(SIZES, dtype=torch.float64)
    train = TRAIN.model_copy(update={"clients_per_round": EXPECTED})
    return Toy(algorithm, clients, two_layers(double=True), train, privacy=privacy, **options)


def by_hand(privacy: PrivacyConfig, multiplier: float, count_noise: float) -> list[tuple[Tree, float]]:
    """Algorithm 1 of Andrew et al. (2021) in NumPy, with the models of clients that are trained without privacy."""
    assert privacy.clip_norm is not None and privacy.target_quantile is not None
    alone, streams = toy(PrivacyConfig()), RandomStreams(0)
    model, norm, found = alone.server["model"], privacy.clip_norm, []
    for round, cohort in enumerate(COHORTS):
        start = {path: leaf.numpy() for path, leaf in leaves(model)}
        total, halves = {path: np.zeros_like(leaf) for path, leaf in start.items()}, 0.0
        for client in cohort:
            alone.server, alone.round = {"model": model}, round
            change = {path: leaf.numpy() - start[path] for path, leaf in leaves(alone.step([client])["model"])}
            length = math.sqrt(sum((leaf**2).sum() for leaf in change.values()))
            total = {path: leaf + change[path] * min(1.0, norm / length) for path, leaf in total.items()}
            halves += 0.5 if length <= norm else -0.5
        noise = streams.generator("privacy", round)
        drawn = {path: multiplier * norm * noise.standard_normal(leaf.shape) for path, leaf in start.items()}
        model = {path: torch.from_numpy(start[path] + (total[path] + drawn[path]) / EXPECTED) for path in start}
        halves += count_noise * streams.generator("privacy.count", round).standard_normal()
        norm = norm / math.exp(privacy.clip_lr * (halves / EXPECTED + 0.5 - privacy.target_quantile))
        found.append((model, norm))
    return found


@pytest.mark.parametrize(
    ("privacy", "multiplier", "count_noise"),
    [
        (NOISY, (0.25**-2 - (2 * 0.15) ** -2) ** -0.5, 0.15),  # by default 3 / 20
        (NOISY.model_copy(update={"count_noise": 0.9}), (0.25**-2 - 1.8**-2) ** -0.5, 0.9),
        (QUIET, 0.0, 0.0),
    ],
    ids=["a twentieth of the cohort", "chosen", "without noise"],
)
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_rounds_are_those_of_the_algorithm(
    privacy: PrivacyConfig, multiplier: float, count_noise: float, mode: str
) -> None:
    one, norms = toy(privacy, mode=mode), []
    for cohort, (model, norm) in zip(COHORTS, by_hand(privacy, multiplier, count_noise), strict=True):
        assert_close(dict(leaves(one.step(cohort)["model"])), model, atol=1e-12)
        assert one.moved_norm == pytest.approx(norm, rel=1e-12)
        norms.append(norm)
    assert len(set(norms)) == len(COHORTS)


@pytest.mark.parametrize("method", [METHOD, Ditto(aggregation="uniform")], ids=["fedavg", "ditto"])
def test_any_number_of_hosts_gives_the_same_bits(method: Any) -> None:
    one, several = (toy(NOISY, method, hosts=hosts) for hosts in (1, 3))
    for cohort in COHORTS:
        assert_equal(one.step(cohort), several.step(cohort))
        assert one.moved_norm == several.moved_norm
    assert_equal(one.states(), several.states())


class Lame(FedAvg):
    """Its client 3 fails."""

    name: Literal["lame"] = "lame"  # type: ignore[assignment]

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        if client.id == 3:
            raise RuntimeError("out of order")
        return await super().local_update(client, model)


def test_a_client_that_is_left_out_is_not_counted() -> None:
    method = Lame(aggregation="uniform")
    one, other = toy(NOISY, method), toy(NOISY)
    policy = ClientsConfig(on_error="skip")
    one.federation = Federation(Hosts(InlinePool(one.client_hosts)), one.task, one.context, one.dataset.sizes(), policy)
    one.federation.begin_round(0)
    changed = one.federation.play(method, one.server, [0, 1, 3])
    assert list(one.federation.absent) == [3]
    assert_equal(changed, other.step([0, 1]))
    assert one.federation.next_norm == other.moved_norm != NOISY.clip_norm


@pytest.mark.slow
def test_the_norm_comes_to_the_quantile_of_the_clients_changes() -> None:
    """Without a step on the server all rounds begin from the same model, of which every client has its own change."""
    privacy = PrivacyConfig(clip_norm=50.0, target_quantile=0.5, clip_lr=0.3)
    one, everybody = toy(privacy), list(range(len(SIZES)))
    start, alone = one.server, toy(PrivacyConfig())
    lengths = []
    for client in everybody:
        alone.server, alone.round = start, 0
        changes = [leaf - start["model"][path] for path, leaf in leaves(alone.step([client])["model"])]
        lengths.append(math.sqrt(sum(float(change.square().sum()) for change in changes)))
    for _ in range(80):
        one.server, one.round = start, 0
        one.step(everybody)
    assert one.moved_norm is not None
    below, median, above = sorted(lengths)[1:4]
    assert below < one.moved_norm < above and abs(math.log(one.moved_norm / median)) < 0.3


def test_a_fixed_norm_does_not_move() -> None:
    one = toy(PrivacyConfig(clip_norm=0.2, noise_multiplier=0.25))
    one.step()
    assert one.moved_norm is None


def test_a_norm_that_is_no_number_any_more_ends_the_run() -> None:
    one = toy(PrivacyConfig(clip_norm=1e-3, target_quantile=0.5, clip_lr=1e5))
    with pytest.raises(RunError, match=r"privacy.clip_lr=100000: the clipping norm of round 1, 0.001, would"):
        one.step([0, 1, 2])
