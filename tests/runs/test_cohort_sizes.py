"""Cohorts whose size changes from round to round."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import rayfl
from algorithms.registry import METHODS, Experiment
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.randomness import RandomStreams
from rayfl.runs.finding import load_run
from rayfl.runs.participation import participants
from rayfl.runs.rows import attendance
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment


def varying(folder: Path, name: str, least: int = 1, method: str = "scaffold", **train: Any) -> dict[str, Any]:
    made = small_experiment(folder, name, method, backend="inline")
    return {**made, "train": {**made["train"], "clients_per_round": 4, "min_clients_per_round": least, **train}}


def test_sizes_are_equally_likely_and_clients_too() -> None:
    streams, sizes, clients = RandomStreams(0), Counter[int](), Counter[int]()
    for round in range(3000):
        cohort = streams.drawn("sampling", round, 10, 5, 2)
        sizes[len(cohort)] += 1
        clients.update(cohort)
    assert set(sizes) == {2, 3, 4, 5}
    assert all(abs(count - 750) < 100 for count in sizes.values())
    assert all(abs(count - 1050) < 110 for count in clients.values())
    assert [streams.drawn("sampling", 7, 10, 5, 5)] == [streams.drawn("sampling", 7, 10, 5)]


def test_a_run_says_who_took_part_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    rayfl.run(varying(tmp_path, "whole"))
    run = load_run(str(tmp_path / "whole"), METHODS)
    found = participants(run)
    assert found is not None
    took_part = {(row["round"], row["client"]) for row in found.to_pylist()}
    assert took_part >= {(row["round"], row["client"]) for row in attendance(run.clients).to_pylist()}
    sizes = [found["round"].to_pylist().count(round) for round in range(1, run.rounds_completed + 1)]
    streams = RandomStreams(run.seed)
    assert run.num_clients is not None
    assert sizes == [
        len(streams.drawn("sampling", round, run.num_clients, 4, 1)) for round in range(run.rounds_completed)
    ]
    assert len(set(sizes)) > 1
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(varying(tmp_path, "stopped"), callbacks=[Interrupt(2)])
    rayfl.run(varying(tmp_path, "stopped"))
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "stopped"))


@pytest.mark.parametrize(
    ("method", "train", "message"),
    [
        ("scaffold", {"min_clients_per_round": 5}, "min_clients_per_round=5 is more than clients_per_round=4"),
        ("cfl", {"clients_per_round": "all"}, r"CFL compares .* is all \(at least 2\) of \d+ clients: set .*=null"),
        ("l2gd", {"clients_per_round": "all", "momentum": 0}, "L2GD needs .* and train.min_clients_per_round=null"),
        ("fedme", {"clients_per_round": "all"}, "in fedme every client .* and train.min_clients_per_round=null"),
    ],
)
def test_who_needs_all_clients_refuses(method: str, train: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Parts(load_config(Experiment, varying(tmp_path, "run", 2, method, **train), {})).check()


def test_simulated_devices_have_cohorts_of_their_own(tmp_path: Path) -> None:
    content = {**varying(tmp_path, "run"), "system": {"name": "sampled"}}
    with pytest.raises(ConfigError, match=r"train.min_clients_per_round: on simulated devices \(system\) cohorts lose"):
        Parts(load_config(Experiment, content, {})).check()


def test_hpms_of_fedphp_count_on_the_mean_size(tmp_path: Path) -> None:
    parts = Parts(load_config(Experiment, varying(tmp_path, "run", 2, "fedphp", rounds=40), {}))
    context, method = parts.context, parts.config.algorithm
    expected = 3 * 40 // context.num_clients
    assert method.momentum(1, context) == pytest.approx(method.macro_momentum / expected)
