"""Runs in which clients add integers of noise to a secure sum (``privacy.mechanism``)."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.linalg import hadamard

import rayfl
from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from algorithms.registry import METHODS, Experiment
from cluster.rounds.forking import fork
from rayfl import Client
from rayfl.config.loading import load_config
from rayfl.engine.discrete_accounting import distributed_epsilon
from rayfl.errors import ClientError, ConfigError, RayflError
from rayfl.experiment.parts import Parts
from rayfl.messages.compressors import SecureAggregation
from rayfl.messages.privacy import PrivacyConfig
from rayfl.params import Tree, leaves, subtract
from rayfl.runs.attackable import caveats
from rayfl.runs.finding import load_run
from rayfl.runs.folder import open_run
from rayfl.runs.participation import participants
from rayfl.runs.summary import summary_table
from tests.support.cases import TRAIN
from tests.support.cases.base import SIZES
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

NOISE = {"clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.1, "mechanism": "skellam"}
SECURE = {"name": "secure_aggregation", "clip": 0.25, "bits": 10, "modulus_bits": 18}


def private(place: Path, name: str = "run", method: str = "fedavg", **sections: Any) -> dict[str, Any]:
    content = small_experiment(place, name, "fedavg" if ":" in method else method, backend="inline")
    if ":" in method:
        content["algorithm"] = {"name": method}
    train = {**content["train"], "clients_per_round": 3, **sections.pop("train", {})}
    algorithm = {**content["algorithm"], "aggregation": "uniform", **sections.pop("algorithm", {})}
    made = {
        "privacy": {**NOISE, **sections.pop("privacy", {})},
        "compression": SECURE | sections.pop("compression", {}),
    }
    return {**content, **made, **sections, "train": train, "algorithm": algorithm}


def toy(privacy: PrivacyConfig | None = None, rule: SecureAggregation | None = None, **options: Any) -> Toy:
    data = random_clients(SIZES, dtype=torch.float64)
    sections = {} if privacy is None or rule is None else {"privacy": privacy, "compression": rule}
    return Toy(FedAvg(aggregation="uniform"), data, two_layers(double=True), TRAIN, **sections, **options)


@pytest.mark.parametrize("modulus_bits", [24, 8])
def test_the_servers_model_is_what_the_protocol_gives_in_whole_numbers(
    modulus_bits: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Algorithms 1 and 2 of the paper with matrices and Python's integers, which wrap in the second case."""
    rule = SecureAggregation(clip=0.5, bits=5, modulus_bits=modulus_bits)
    one = toy(PrivacyConfig(clip_norm=0.3, noise_multiplier=5.0, mechanism="skellam"), rule)
    start, cohort, streams, step = one.server["model"], [0, 2, 4], one.context.streams, 0.5 / 2**4
    changes = [dict(sorted(leaves(subtract(toy().step([client])["model"], start)))) for client in cohort]
    flat = [np.concatenate([leaf.flatten().numpy() for leaf in change.values()]) for change in changes]
    entries = len(flat[0])
    size = 2 ** int(np.ceil(np.log2(entries)))
    rotation = (
        hadamard(size) / size**0.5 * (1.0 - 2.0 * streams.generator("privacy.rotation", 0).integers(2, size=size))
    )
    total, half_variance = [0] * size, (5.0 * 0.3 / step) ** 2 / 3 / 2
    for client, change in zip(cohort, flat, strict=True):
        short = np.pad(change * min(1, 0.3 / np.linalg.norm(change)), (0, size - entries))
        draws, noise = (streams.generator(name, 0, client) for name in ("compression", "privacy.discrete"))
        levels = np.floor(rotation @ short / step + draws.random(size))
        drawn = noise.poisson(half_variance, size) - noise.poisson(half_variance, size)
        sent = [int(level + number) % 2**modulus_bits for level, number in zip(levels, drawn, strict=True)]
        total = [(ours + theirs) % 2**modulus_bits for ours, theirs in zip(total, sent, strict=True)]
    signed = [number - 2**modulus_bits if number >= 2 ** (modulus_bits - 1) else number for number in total]
    mean = (rotation.T @ np.array(signed, dtype=float) * step)[:entries] / 3
    with caplog.at_level(logging.WARNING, "rayfl"):
        found = dict(sorted(leaves(subtract(one.step(cohort)["model"], start))))
    torch.testing.assert_close(
        torch.cat([leaf.flatten() for leaf in found.values()]), torch.from_numpy(mean), atol=1e-12, rtol=0
    )
    said = f"compression.modulus_bits={modulus_bits}: in round 1 "
    assert (said in caplog.text and "entries of the sum wrapped" in caplog.text) == (modulus_bits == 8)
    assert one.federation.traffic.up == 3 * (((size + 1) * modulus_bits + 7) // 8 + rule.beside(3))


@pytest.mark.parametrize("mechanism", ["skellam", "discrete_gaussian"])
def test_inv_variance_1_the_mean_has_the_noise_of_the_sum_over_the_number_of_clients(mechanism: str) -> None:
    fine = SecureAggregation(clip=0.5, bits=20)
    found = []
    for noise in (1e-9, 2.0):
        limits = PrivacyConfig(clip_norm=0.3, noise_multiplier=noise, mechanism=mechanism)  # type: ignore[arg-type]
        moved = toy(limits, fine).step([0, 2, 4])["model"]
        found.append(torch.cat([leaf.flatten() for _, leaf in leaves(moved)]))
    drawn = found[1] - found[0]
    assert float(drawn.std()) == pytest.approx(2.0 * 0.3 / 3, rel=4 / (2 * len(drawn)) ** 0.5)


@pytest.mark.parametrize("mechanism", ["skellam", "discrete_gaussian"])
def test_any_number_of_hosts_gives_the_same_bits_and_a_stack_the_same_up_to_rounding(mechanism: str) -> None:
    limits = PrivacyConfig(clip_norm=0.3, noise_multiplier=1.0, mechanism=mechanism)  # type: ignore[arg-type]
    rule = SecureAggregation(clip=0.25, bits=8)
    one, several, stacked = (
        toy(limits, rule, hosts=hosts, mode=mode) for hosts, mode in ((1, "looped"), (3, "looped"), (1, "vectorized"))
    )
    for _ in range(2):
        looped = one.step()
        assert_equal(looped, several.step())
        assert_close(looped, stacked.step(), atol=1e-8)


def test_an_interrupted_run_continues_to_the_same_bits_and_says_epsilon(tmp_path: Path) -> None:
    result = rayfl.run(private(tmp_path, "whole", "superfed-mm"))
    pieces = private(tmp_path, "pieces", "superfed-mm")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(pieces, callbacks=[Interrupt(2)])
    assert rayfl.run(pieces).epsilon == result.epsilon
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))
    took_part = participants(load_run(result.path, METHODS))
    assert took_part is not None
    clients = took_part["client"].to_pylist()
    most = max(clients.count(client) for client in clients)
    rule = result.config.compression
    assert isinstance(rule, SecureAggregation)
    assert result.epsilon == distributed_epsilon(result.config.privacy, rule, 3, 5, result.summed, most)
    written = io.StringIO()
    Console(file=written, width=400).print(summary_table(result))
    said = f"epsilon = {result.epsilon:.2f} for the client that is in most of the 4 rounds ({most})"
    assert said in (printed := " ".join(written.getvalue().split()))
    assert "against the server, which sees the sum of each round and knows whose it is" in printed
    with pytest.raises(ConfigError, match="compression: a fork goes on with"):
        fork(result.path, "forked", None, {"compression.bits": 9})
    told = caveats(open_run(result.path, Experiment), 1, "cosine")
    assert any("the message has the noise of one client" in line for line in told)


class Fails(Ditto):
    """A client of the second round fails, once it has trained."""

    name: Any = "fails"

    async def local_update(self, client: Client, model: Tree) -> Any:
        sent = await super().local_update(client, model)
        if client.round == 1 and client.id == 2:
            raise RuntimeError("out of order")
        return sent


def test_a_round_in_which_a_client_drops_out_has_too_little_noise_and_is_given_up(tmp_path: Path) -> None:
    name = f"{__name__}:{Fails.__name__}"
    everybody = {"train": {"clients_per_round": "all"}, "clients": {"on_error": "skip"}}
    result = rayfl.run(private(tmp_path, method=name, **everybody))
    rows = [row for row in result.skipped.to_pylist() if row["round"] == 2]
    assert len(rows) == 5
    given_up = [row["reason"] for row in rows if row["procedure"] == "round given up"]
    assert all(
        "4 of 5 clients answer, and with privacy.mechanism=skellam their noise is less" in why for why in given_up
    )
    assert len(given_up) == 4
    assert result.rounds_completed == 4
    whole = rayfl.run(private(tmp_path, "whole", "ditto", **everybody))
    assert result.epsilon == whole.epsilon, "the round counts all the same"


class Some(FedAvg):
    """Asks all but the first client of the cohort."""

    name: Any = "some"

    def round(self, server: Tree, cohort: Any, clients: Any) -> Tree:
        return super().round(server, cohort[1:], clients)


def test_a_method_that_asks_a_part_of_the_cohort_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="2 of 3 clients answer, and with privacy"):
        rayfl.run(private(tmp_path, method=f"{__name__}:{Some.__name__}"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"compression": {"error_feedback": True}}, "error_feedback a client would take its noise back"),
        ({"compression": {"modulus_bits": 40}}, "sums are exact up to compression.modulus_bits=32: lower it"),
        (
            {"compression": {"modulus_bits": 12}},
            r"up to 11 in all \(8 of them for noise of four deviations\), and sums with bits=10 modulo 2\^12 wrap",
        ),
        ({"train": {"sampling": "poisson"}}, "with train.sampling=poisson there may be none"),
        ({"method": "floco"}, "floco cannot be made private by clipping and noise"),
        ({"algorithm": {"aggregation": "samples"}}, "set algorithm.aggregation=uniform"),
        ({"aggregator": {"name": "median"}}, "aggregator=median: with privacy.mechanism=skellam epsilon counts on"),
        (
            {"attack": {"share": 0.2, "message": "sign_flip"}},
            "attack.message: with privacy.mechanism=skellam epsilon counts on the noise of every client",
        ),
        ({"contribution": {"name": "leave_one_out"}}, "contribution=leave_one_out: with privacy.mechanism=skellam"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        Parts(load_config(Experiment, private(tmp_path, **sections), {})).check()


def test_without_secure_aggregation_or_with_the_noise_of_others_it_is_refused(tmp_path: Path) -> None:
    alone = {**private(tmp_path), "compression": {"name": "none"}}
    with pytest.raises(
        ConfigError, match="set compression=secure_aggregation, with which the server sees nothing else"
    ):
        Parts(load_config(Experiment, alone, {})).check()
    for options, message in (
        ({"noise_multiplier": 0}, "is what noise is drawn from: set privacy.noise_multiplier"),
        ({"noise_at": "clients"}, "a share of the noise of the sum, and with noise_at=clients that of a message"),
        ({"noise": "tree"}, "noise=tree is drawn by the server, which adds none"),
        ({"target_quantile": 0.5}, "target_quantile counts the changes up to C with normal noise"),
        ({"accountant": "prv"}, "accountant=prv knows normal noise alone"),
    ):
        options = {key: value for key, value in NOISE.items() if key != "delta"} | options
        with pytest.raises(RayflError, match=f"mechanism=skellam.*{message}"):
            load_config(Experiment, {**private(tmp_path), "privacy": options}, {})


def test_levels_that_are_far_apart_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    coarse = {"compression": {"bits": 2, "clip": 1.0}, "privacy": {"clip_norm": 0.01, "noise_multiplier": 20}}
    with caplog.at_level(logging.WARNING, "rayfl"):
        Parts(load_config(Experiment, private(tmp_path, **coarse), {})).check()
    assert "and with normal noise of the same size" in caplog.text and "raise compression.bits" in caplog.text
