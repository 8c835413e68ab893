"""Models of the server under the noise of a tree (DP-FTRL), on any number of hosts and by either engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from rayfl.messages.privacy import PrivacyConfig
from rayfl.params import leaves
from rayfl.randomness import RandomStreams
from tests.support.cases import TRAIN
from tests.support.cases.base import SIZES
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

METHOD = FedAvg(aggregation="uniform")
TREE = PrivacyConfig(clip_norm=0.2, noise_multiplier=0.5, noise="tree")
HONAKER = TREE.model_copy(update={"noise": "honaker", "tree_rounds": 4})
COHORTS = ([0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1], [2, 3, 4])
EXPECTED = 3


def toy(privacy: PrivacyConfig, algorithm: Any = METHOD, **options: Any) -> Toy:
    clients = random_clients(SIZES, dtype=torch.float64)
    train = TRAIN.model_copy(update={"clients_per_round": EXPECTED, **options.pop("train", {})})
    return Toy(algorithm, clients, two_layers(double=True), train, privacy=privacy, **options)


NODES = {1: [(1, 1)], 2: [(2, 2)], 3: [(2, 2), (1, 3)], 4: [(4, 4)], 5: [(4, 4), (1, 5)]}
"""Size and last round, from 1, of the nodes that a sum over the first rounds is made of."""


def test_the_model_has_the_noise_of_the_nodes_of_its_rounds() -> None:
    """Clients that do not learn send no change, so the server's model is the noise alone."""
    one, streams = toy(TREE, train={"lr": 0.0}), RandomStreams(0)
    start = dict(leaves(one.server["model"]))
    for round, cohort in enumerate(COHORTS, 1):
        found = dict(leaves(one.step(cohort)["model"]))
        for path, leaf in found.items():
            shape = tuple(leaf.shape)
            drawn = [
                streams.generator(f"privacy.tree.{size}.{path}.{shape}", last - 1).standard_normal(shape)
                for size, last in NODES[round]
            ]
            expected = start[path] + torch.from_numpy(0.5 * 0.2 * np.sum(drawn, axis=0) / EXPECTED)
            assert (leaf - expected).abs().max() <= 1e-12


def test_noise_is_added_to_what_clients_send() -> None:
    private, quiet = toy(TREE), toy(PrivacyConfig(clip_norm=0.2))
    alone = toy(TREE, train={"lr": 0.0})
    start = alone.server["model"]
    noise = {path: leaf - dict(leaves(start))[path] for path, leaf in leaves(alone.step(COHORTS[0])["model"])}
    sent = dict(leaves(quiet.step(COHORTS[0])["model"]))
    assert_close(
        dict(leaves(private.step(COHORTS[0])["model"])), {path: sent[path] + noise[path] for path in sent}, atol=1e-12
    )


@pytest.mark.parametrize("method", [METHOD, Ditto(aggregation="uniform")], ids=["fedavg", "ditto"])
@pytest.mark.parametrize("privacy", [TREE, HONAKER], ids=["tree", "honaker"])
def test_any_number_of_hosts_gives_the_same_bits(privacy: PrivacyConfig, method: Any) -> None:
    one, several = (toy(privacy, method, hosts=hosts) for hosts in (1, 3))
    for cohort in COHORTS:
        assert_equal(one.step(cohort), several.step(cohort))
    assert_equal(one.states(), several.states())


@pytest.mark.parametrize("privacy", [TREE, HONAKER], ids=["tree", "honaker"])
def test_stacked_clients_get_the_same_noise(privacy: PrivacyConfig) -> None:
    looped, stacked = (toy(privacy, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort), stacked.step(cohort), atol=1e-9)
