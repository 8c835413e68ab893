"""Runs with secure aggregation: what the server gets, what is refused, which rounds fail, what attackers can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rayfl
from algorithms.base import Averaging
from algorithms.fedavg import FedAvg
from algorithms.registry import Experiment
from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.secure_sum import protocol_bytes, step_of
from rayfl.config.loading import load_config
from rayfl.engine.client import Client
from rayfl.errors import ClientError, ConfigError, MethodError, RayflError
from rayfl.experiment.parts import Parts
from rayfl.messages.attack import AttackConfig
from rayfl.messages.compressors import SecureAggregation
from rayfl.params import Tree, leaves, subtract
from rayfl.runs.attackable import caveats
from rayfl.runs.folder import open_run
from tests.algorithms.test_compressed_messages import toy
from tests.algorithms.test_privacy import Talkative
from tests.cluster.rounds.test_unseen_clients import experiment as twelve_clients
from tests.support.experiments import assert_same, outcome

SECURE = {"name": "secure_aggregation"}
DEVICES = {"name": "given", "computation": [40.0] * 12, "communication": [5000.0] * 12}


def experiment(folder: Path, name: str = "run", method: str = "fedavg", **changes: Any) -> dict[str, Any]:
    """Twelve clients of digits for two rounds of eight."""
    train = {"clients_per_round": 8, **changes.pop("train", {})}
    compression = {**SECURE, "bits": 20, **changes.pop("compression", {})}
    sections = {"evaluation": {"every": 1}, "compression": compression, **changes}
    content = twelve_clients(folder, name, method, **sections)
    return {**content, "train": {**content["train"], **train}}


def parts(folder: Path, **changes: Any) -> Parts:
    return Parts(load_config(Experiment, experiment(folder, **changes), {}))


def test_the_server_gets_the_mean_of_rounded_changes() -> None:
    rule = SecureAggregation(clip=2.0, bits=10)
    one = toy(compression=rule)
    start = one.server["model"]
    change = subtract(one.step([0, 1, 2])["model"], start)
    weight = int(one.dataset.sizes()[[0, 1, 2], 0].sum())
    for _, leaf in leaves(change):  # one division and one addition away from integers
        levels = leaf * weight / step_of(2.0, 10)
        torch.testing.assert_close(levels, levels.round(), atol=1e-6, rtol=0)


def test_a_continued_run_has_the_same_bits(tmp_path: Path) -> None:
    changes = {"compression": {"neighbours": 4, "error_feedback": True, "bits": 9, "modulus_bits": 24}}
    rayfl.run(experiment(tmp_path, "whole", **changes))
    rayfl.run(experiment(tmp_path, "parts", **changes, train={"rounds": 1}))
    run = rayfl.run(str(tmp_path / "parts"), **{"train.rounds": 2})
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "parts"))
    parameters = 64 * 8 + 8 + 8 * 10 + 10
    up = run.rounds["bytes_up"].to_pylist()
    assert max(up) == 2 * 8 * ((parameters + 1) * 3 + protocol_bytes(5))
    said = caveats(open_run(str(tmp_path / "whole"), Experiment), 1, "cosine")
    assert ["secure_aggregation: the server sees sums" in line for line in said] == [True], "of an attack on a message"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "scaffold"}, "compression=secure_aggregation: it is for changes of one model.*; scaffold"),
        ({"aggregator": "median"}, "sees sums alone, and aggregator=median needs every message"),
        (
            {"attack": {"clients": [1], "message": "alie"}},
            "attack.message=alie is made of what honest clients send, which nobody sees: choose sign_flip",
        ),
        ({"train": {"clients_per_round": 1}}, "needs 2 clients in a round, and there are 1: raise"),
        ({"train": {"min_clients_per_round": 1}}, "there are 1 in the smallest round"),
        ({"train": {"sampling": "poisson"}}, "with train.sampling=poisson there may be none"),
        (
            {"compression": {"neighbours": 8}},
            "needs 9 clients in a round, and there are 8.*lower compression.neighbours",
        ),
        (
            {"compression": {"bits": 24}},
            r"clients are up to \d+ in all, and sums with bits=24 modulo 2\^32 wrap from 256 on: "
            r"set compression.bits=22 or compression.modulus_bits=34 or algorithm.aggregation=uniform",
        ),
        (
            {
                "algorithm": {"name": "fedavg", "aggregation": "uniform"},
                "compression": {"bits": 24, "modulus_bits": 25},
            },
            "up to 8 in all, and sums with bits=24 modulo 2.25 wrap from 2 on: set .*bits=21 or .*modulus_bits=28$",
        ),
        ({"method": "fedas"}, "not with algorithm.aggregation=fisher, whose weights are no integers"),
        (
            {"model": {"name": "tests.support.own_norm:normalized", "head": "4"}},
            "running statistics .*private_norm=statistics",
        ),
        (
            {"algorithm": {"name": "fedavg", "aggregation": "uniform"}, "privacy": {"clip_norm": 1}},
            "together with noise that the server adds it is not",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        parts(tmp_path, **changes).check()


class Buffered(FedAvg):
    """Takes the mean of what arrives."""

    name: Any = "buffered"
    asynchronous = True


def test_rounds_without_a_barrier_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"secure_aggregation: masks are those of clients that begin together"):
        parts(tmp_path, method=f"{__name__}:Buffered", system={**DEVICES, "mode": "buffered"}).check()


class WithAFailure(FedAvg):
    """Its clients 0 to 8 fail."""

    name: Any = "with_a_failure"

    async def local_update(self, client: Client, model: Tree) -> Any:
        if client.id < 9:
            raise RuntimeError("out of order")
        return await super().local_update(client, model)


def test_failed_clients_count_as_such_that_do_not_answer(tmp_path: Path) -> None:
    clients = {"on_error": "skip"}
    algorithm = {"name": f"{__name__}:WithAFailure"}
    with pytest.raises(RayflError, match=r"9 of 12 clients of the first round failed.*3 of 12 clients answer, too few"):
        rayfl.run(experiment(tmp_path, algorithm=algorithm, clients=clients, train={"clients_per_round": "all"}))


def test_a_round_says_how_many_messages_were_clipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rayfl.run(experiment(tmp_path, "wide"))
    assert "had entries that were clipped" not in caplog.text
    rayfl.run(experiment(tmp_path, "narrow", compression={"clip": 1e-4}))
    assert "compression.clip=0.0001: in round 2 8 of 8 messages had entries that were clipped" in caplog.text


class Halves(Averaging):
    """Weights that are no integers."""

    name: Any = "halves"

    def weighted(self, client: Client, tree: Tree) -> Weighted:
        return Weighted(tree, 1.5)


class Heavy(Averaging):
    """Weights that nobody could know before."""

    name: Any = "heavy"

    def weighted(self, client: Client, tree: Tree) -> Weighted:
        return Weighted(tree, 1000)


def test_weights_of_ones_own_method_are_checked() -> None:
    with pytest.raises(ClientError, match=r"returns a weight of 1\.5, and sums are of integers"):
        toy(Halves(), compression=SecureAggregation()).step()
    with pytest.raises(ClientError, match=r"weights are 2000 in all.*may wrap from 1024 on"):
        toy(Heavy(), compression=SecureAggregation()).step([0, 1])
    toy(Heavy(), compression=SecureAggregation(modulus_bits=40)).step([0, 1])


def test_sums_of_groups_are_refused() -> None:
    with pytest.raises(MethodError, match=r"for one sum over all clients.*this is Clients\.means"):
        toy(Talkative(way="groups"), compression=SecureAggregation()).step()


def test_malicious_clients_send_levels_and_need_not_clip() -> None:
    rule = SecureAggregation(clip=1.0, bits=12, modulus_bits=40)
    attack = {"clients": [1], "message": "scaled"}
    honest, mild, strong = (
        toy(compression=rule, attack=AttackConfig(**attack, strength=strength)) for strength in (1.0, 3.5, 1e4)
    )
    start = honest.server["model"]
    changes = [subtract(one.step([0, 1])["model"], start) for one in (honest, mild, strong)]
    weight = int(honest.dataset.sizes()[[0, 1], 0].sum())
    for change in changes:
        for _, leaf in leaves(change):
            levels = leaf * weight / step_of(1.0, 12)
            torch.testing.assert_close(levels, levels.round(), atol=1e-4, rtol=0)
    assert max(float(leaf.abs().max()) for _, leaf in leaves(changes[2])) > 1, "beyond the clip of honest clients"
    narrow = SecureAggregation(clip=1.0, bits=12, modulus_bits=24)
    with pytest.raises(ClientError, match=r"leaves the range modulo 2\^24 and would wrap: lower attack\.strength"):
        toy(compression=narrow, attack=AttackConfig(**attack, strength=1e4)).step([0, 1])
