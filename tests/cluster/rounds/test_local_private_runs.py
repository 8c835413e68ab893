"""Runs in which each client adds noise to its own message (``privacy.noise_at=clients``)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import rayfl
from algorithms.registry import METHODS
from rayfl.engine.privacy import local_epsilon
from rayfl.engine.updates.cohorts import attendances
from rayfl.errors import ConfigError
from rayfl.runs.finding import load_run
from rayfl.runs.participation import participants
from rayfl.runs.summary import summary_table
from rayfl.runs.verification import verify
from rayfl.storage.files import Storage
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment

NOISY = {"clip_norm": 0.5, "noise_multiplier": 4.0, "delta": 0.1, "noise_at": "clients"}


def private(place: Path, name: str, method: str = "fedavg", **sections: Any) -> dict[str, Any]:
    content = small_experiment(place, name, method, backend="inline")
    train = {**content["train"], "clients_per_round": 3, **sections.pop("train", {})}
    algorithm = {**content["algorithm"], "aggregation": "uniform", **sections.pop("algorithm", {})}
    return {**content, "privacy": NOISY, **sections, "train": train, "algorithm": algorithm}


@pytest.mark.slow
def test_an_interrupted_run_continues_to_the_same_bits(tmp_path: Path) -> None:
    rayfl.run(private(tmp_path, "whole", "superfed-mm"))
    pieces = private(tmp_path, "pieces", "superfed-mm")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(pieces, callbacks=[Interrupt(2)])
    rayfl.run(pieces)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))


@pytest.mark.parametrize("sampling", ["fixed", "poisson", "cyclic"])
@pytest.mark.first_case
def test_epsilon_is_that_of_the_client_that_was_in_the_most_rounds(tmp_path: Path, sampling: str) -> None:
    attendances.cache_clear()
    result = rayfl.run(private(tmp_path, "run", train={"sampling": sampling}))
    took_part = participants(load_run(result.path, METHODS))
    assert took_part is not None
    clients = took_part["client"].to_pylist()
    most = max(clients.count(client) for client in clients)
    assert result.epsilon == local_epsilon(result.config.privacy, 5, most)
    written = io.StringIO()
    Console(file=written, width=400).print(summary_table(result))
    printed = " ".join(written.getvalue().split())
    said = f"local epsilon = {result.epsilon:.2f} for the client that is in most of the 4 rounds ({most})"
    assert said in printed
    assert "at delta = 0.1, against everybody who sees its messages, the server too" in printed
    assert attendances.cache_info().misses == 1  # all rounds are drawn once for checks, log, result and summary


def test_a_round_without_clients_changes_nothing(tmp_path: Path) -> None:
    result = rayfl.run(private(tmp_path, "run", train={"sampling": "poisson", "clients_per_round": 1, "rounds": 8}))
    assert result.rounds_completed == 8
    assert verify(Storage(result.path)).problems == []


@pytest.mark.parametrize(
    "sections",
    [
        {"compression": {"name": "top_k"}},
        {"compression": {"name": "secure_aggregation"}},
        {"aggregator": {"name": "median"}, "attack": {"share": 0.2, "message": "sign_flip"}},
    ],
    ids=["compressed", "secure", "attacked"],
)
@pytest.mark.first_case
def test_what_becomes_of_noisy_messages_costs_nothing(tmp_path: Path, sections: dict[str, Any]) -> None:
    found = rayfl.run(private(tmp_path, "run", **sections))
    assert found.epsilon == rayfl.run(private(tmp_path, "plain")).epsilon


def test_what_the_server_adds_noise_to_is_still_not_compressed(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"privacy": {**NOISY, "noise_at": "server"}, "train": {"clients_per_round": "all"}}
    with pytest.raises(ConfigError, match=r"compression=top_k: .*, or set privacy.noise_at=clients"):
        rayfl.run(private(tmp_path, "run", compression={"name": "top_k"}, **sections))


def test_methods_that_send_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="floco cannot be made private by clipping and noise"):
        rayfl.run(private(tmp_path, "run", "floco"))
