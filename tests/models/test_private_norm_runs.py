"""Runs with private normalization layers: refused, checked, continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts


def parts(**changes: Any) -> Parts:
    content = {
        "dataset": "digits",
        "partition": {"name": "iid", "num_clients": 4},
        "model": {"name": "tests.support.own_norm:normalized", "head": "4"},
        "algorithm": "fedavg",
        "train": {"rounds": 2, "clients_per_round": 2, "private_norm": "statistics"},
        **changes,
    }
    return Parts(load_config(Experiment, content, []))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "two_nn"}, "no normalization layer with running statistics"),
        ({"algorithm": "local"}, "statistics, which local cannot have here: nothing of a normalization layer is sent"),
        ({"algorithm": "lg_fedavg"}, "lg_fedavg cannot have here: nothing of a normalization layer is sent anyway"),
        ({"algorithm": "centralized"}, "one client trains on everybody's samples"),
        (
            {"algorithm": "scaffold", "train": {"clients_per_round": 2, "private_norm": "all"}},
            "no mean control variate of a parameter that is never sent; statistics is possible",
        ),
        (
            {"algorithm": "feddyn", "train": {"clients_per_round": 2, "private_norm": "all"}},
            "the displacement of a parameter needs a server that has it",
        ),
        ({"algorithm": "fedme", "train": {"clients_per_round": "all", "private_norm": "all"}}, "models of others"),
        ({"evaluation": {"official_test": True}}, "the server's model lacks what evaluation.official_test needs"),
    ],
)
def test_what_cannot_have_it_is_refused_before_anything_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parts(**changes).check()


def test_possible_methods_pass_the_check() -> None:
    for name in ("fedavg", "scaffold", "fedper", "floco"):
        algorithm = {"name": name, **({"simplex_dimension": 2} if name == "floco" else {})}
        parts(algorithm=algorithm).check()


@pytest.mark.parametrize("method", ["fedavg", "floco"])
def test_a_run_is_continued_from_its_commit(method: str, tmp_path: Path) -> None:
    algorithm: dict[str, Any] = {"name": method, **({"simplex_dimension": 1} if method == "floco" else {})}
    content = {
        "storage_path": str(tmp_path),
        "dataset": "tests.support.own_data:from_seed",
        "partition": {"name": "iid", "num_clients": 2},
        "model": {"name": "tests.support.own_norm:normalized", "head": "4"},
        "algorithm": algorithm,
        "cluster": {"backend": "inline"},
        "tracking": {"tensorboard": False},
    }
    train = {"clients_per_round": 1, "local_epochs": 1, "private_norm": "all"}
    whole = rayfl.run({**content, "name": "whole", "train": {**train, "rounds": 3}})

    class Halt(rayfl.Callback):
        def on_round(self, rounds_completed: int, cohort: Any, seconds: float) -> None:
            if rounds_completed == 2:
                raise RuntimeError("halt")

    interrupted = {**content, "name": "interrupted", "train": {**train, "rounds": 3}}
    with pytest.raises(RuntimeError, match="halt"):
        rayfl.run(interrupted, callbacks=[Halt()])
    assert rayfl.run(interrupted).clients.equals(whole.clients)
