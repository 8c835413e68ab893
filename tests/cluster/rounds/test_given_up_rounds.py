"""Rounds in which too few clients answer for what the server does with their messages: nothing is trained in them."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import rayfl
from algorithms.ditto import Ditto
from algorithms.registry import Experiment
from rayfl import Client
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError, RayflError
from rayfl.experiment.parts import Parts
from rayfl.params import Tree
from tests.cluster.rounds.test_unseen_clients import experiment as twelve_clients
from tests.support.experiments import Interrupt, assert_equal, assert_same, outcome

DEVICES = {"name": "given", "computation": [40.0] * 12, "communication": [5000.0] * 12}
SKIPPING: dict[str, Any] = {"clients": {"on_error": "skip"}, "system": {"name": "none"}}
RULES: dict[str, dict[str, Any]] = {
    "secure": {"compression": {"name": "secure_aggregation", "bits": 20, "threshold": 0.6}},
    "krum": {"aggregator": {"name": "krum", "malicious": 1}},
}


def experiment(folder: Path, name: str = "run", method: Any = "ditto", **changes: Any) -> dict[str, Any]:
    """Eight of twelve clients in each of ten rounds, of which some drop out."""
    train = {"clients_per_round": 8, "rounds": 10, **changes.pop("train", {})}
    evaluation = {"every": 10}
    sections: dict[str, Any] = {"system": {**DEVICES, "dropout": 0.4}, "evaluation": evaluation, **changes}
    content = twelve_clients(folder, name, method, **sections)
    return {**content, "train": {**content["train"], **train}}


def cohorts(folder: Path) -> Counter[int]:
    """How many clients took part, by round."""
    return Counter(pq.read_table(folder / "cohorts.parquet")["round"].to_pylist())


def given_up(folder: Path) -> dict[int, int]:
    """How many clients were left out of rounds that were given up, by round."""
    rows = pq.read_table(folder / "skipped.parquet").to_pylist()
    assert all("clients answer" in row["reason"] for row in rows if row["procedure"] == "round given up")
    return Counter(row["round"] for row in rows if row["procedure"] == "round given up")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.first_case
def test_nothing_is_trained_in_a_round_with_too_few_clients_and_it_says_so(
    rule: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rayfl"):
        rayfl.run(experiment(tmp_path, **RULES[rule]))
    lost, trained = given_up(tmp_path / "run"), cohorts(tmp_path / "run")
    assert lost and trained and not set(lost) & set(trained)
    assert set(lost) | set(trained) == set(range(1, 11))
    assert max(lost.values()) < 5 <= min(trained.values())
    assert f"in about {len(lost)} of 10 rounds too few clients answer" in caplog.text
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(experiment(tmp_path, "parts", **RULES[rule]), callbacks=[Interrupt(after=min(lost))])
    rayfl.run(experiment(tmp_path, "parts", **RULES[rule]))
    assert_same(outcome(tmp_path / "parts"), outcome(tmp_path / "run"))


class Fails(Ditto):
    """Two clients of the second round fail, once they have trained."""

    name: Any = "fails"

    async def local_update(self, client: Client, model: Tree) -> Any:
        sent = await super().local_update(client, model)
        if client.round == 1 and client.id < 8:
            raise RuntimeError("out of order")
        return sent


def test_clients_that_have_trained_in_a_round_that_is_given_up_have_their_states_from_before(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "clients": {"on_error": "skip"},
        "train": {"rounds": 2, "clients_per_round": "all"},
        **RULES["krum"],
    }
    first = {**changes, "train": {**changes["train"], "rounds": 1}}
    rayfl.run(experiment(tmp_path, "one", f"{__name__}:Fails", **{**first, "system": {"name": "none"}}))
    rayfl.run(experiment(tmp_path, "two", f"{__name__}:Fails", **{**changes, "system": {"name": "none"}}))
    assert given_up(tmp_path / "two") == {2: 4}
    one, two = (outcome(tmp_path / name) for name in ("one", "two"))
    assert_equal(one.states, two.states)
    assert_equal(one.server, two.server)


@pytest.mark.parametrize("rule", RULES)
def test_devices_of_which_too_few_can_be_done_in_time_are_refused(rule: str, tmp_path: Path) -> None:
    system = {**DEVICES, "computation": [1.0] * 4 + [1e6] * 8, "deadline_s": 100.0}
    with pytest.raises(ConfigError, match="clients in a round, and 4 of the 12 simulated devices can ever be done"):
        Parts(load_config(Experiment, experiment(tmp_path, system=system, **RULES[rule]), {})).check()


def test_runs_in_no_round_of_which_enough_answer_are_refused(tmp_path: Path) -> None:
    content = experiment(tmp_path, system={**DEVICES, "dropout": 0.95}, **RULES["krum"])
    with pytest.raises(ConfigError, match=r"in no round enough clients answer on these devices: lower aggregator\.mal"):
        rayfl.run(content)


class AlwaysFails(Fails):
    """Eight clients fail from the beginning."""

    name: Any = "always_fails"

    async def local_update(self, client: Client, model: Tree) -> Any:
        if client.id < 8:
            raise RuntimeError("out of order")
        return await super().local_update(client, model)


def test_a_first_round_that_failing_clients_make_too_small_ends_the_run(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "clients": {"on_error": "skip"},
        "train": {"clients_per_round": "all"},
        "system": {"name": "none"},
    }
    with pytest.raises(
        RayflError, match=r"8 of 12 clients of the first round failed.*4 clients answer, and aggregator=k"
    ):
        rayfl.run(experiment(tmp_path, method=f"{__name__}:AlwaysFails", **changes, **RULES["krum"]))
