"""Runs whose rule of aggregation remembers earlier rounds: what is committed, and what goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rayfl
from algorithms.registry import Experiment
from cluster.replay import replay
from cluster.rounds.forking import fork
from cluster.run import run_config
from rayfl.aggregation.memory import KEY, with_memory, without_memory
from rayfl.errors import ConfigError, MethodError
from rayfl.params import Tree
from rayfl.runs.committed import CommittedModels
from rayfl.runs.folder import open_run
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from tests.cluster.rounds.test_malicious_clients import experiment, parts
from tests.support.experiments import Interrupt, assert_same, outcome

RULES: dict[str, dict[str, Any]] = {
    "centered_clipping": {"name": "centered_clipping", "radius": 0.05, "iterations": 2},
    "foolsgold": {"name": "foolsgold", "confidence": 0.8},
    "dnc": {"name": "dnc", "malicious": 2, "filtered": 1.5, "coordinates": 50, "iterations": 3},
    "bucketing": {"name": "bucketing", "then": {"name": "centered_clipping", "radius": 0.05}},
    "nnm": {"name": "nnm", "malicious": 2, "then": {"name": "dnc", "malicious": 1, "coordinates": 50}},
    "flame": {"name": "flame", "noise": 0.01},
    "flanders": {
        "name": "flanders",
        "kept": 6,
        "coordinates": 40,
        "then": {"name": "centered_clipping", "radius": 0.05},
    },
}
REMEMBERING = {"centered_clipping", "foolsgold", "bucketing", "flanders"}
UNIFORM = {"name": "fedavg", "aggregation": "uniform"}
ATTACK = {"clients": [1, 4, 7], "message": "min_max", "perturbation": "unit"}


def of_rule(place: Path, rule: str, **changes: Any) -> dict[str, Any]:
    train = {"rounds": 4, **changes.pop("train", {})}
    return experiment(
        place, rule, "fedavg", attack=ATTACK, aggregator=RULES[rule], evaluation={"every": 2}, train=train, **changes
    )


def remembered(folder: Path) -> Tree:
    store = CommitStore(Storage(str(folder)))
    manifest = store.latest()
    assert manifest is not None
    return without_memory(store.read_server(manifest))[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("whole")
    for rule in RULES:
        rayfl.run(of_rule(place, rule, storage={"keep_commits": 9}))
    return place


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.first_case
def test_an_interrupted_run_continues_to_the_same_bits(rule: str, whole: Path, tmp_path: Path) -> None:
    pieces = of_rule(tmp_path, rule)
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(pieces, callbacks=[Interrupt(2)])
    rayfl.run(pieces)
    assert_same(outcome(whole / rule), outcome(tmp_path / rule))
    assert set(remembered(tmp_path / rule)) == ({f"{rule} 1"} if rule in REMEMBERING else set())
    assert verify(Storage(str(tmp_path / rule))).problems == []


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.first_case
def test_more_rounds_and_a_fork_go_on_with_what_is_remembered(rule: str, whole: Path, tmp_path: Path) -> None:
    rayfl.run(of_rule(tmp_path, rule, train={"rounds": 2}))
    rayfl.run(tmp_path / rule, **{"train.rounds": 4})
    assert_same(outcome(whole / rule), outcome(tmp_path / rule))
    config, begun = fork(str(whole / rule), "forked", 2, {"storage_path": str(tmp_path)})
    run_config(config)
    assert begun == 2
    assert_same(outcome(whole / rule), outcome(tmp_path / "forked"))


@pytest.mark.parametrize("other", [{**RULES["centered_clipping"], "start": "received"}, {"name": "mean"}])
def test_a_fork_with_another_rule_keeps_no_memory(other: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    changed = {"storage_path": str(tmp_path), "aggregator": other}
    config, _ = fork(str(whole / "centered_clipping"), "forked", 2, changed)
    run_config(config)
    assert remembered(tmp_path / "forked") == {}
    with pytest.raises(AssertionError):
        assert_same(outcome(whole / "centered_clipping"), outcome(tmp_path / "forked"))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("alone", [True, False], ids=["a client", "the whole round"])
def test_a_round_is_replayed_with_what_is_remembered(rule: str, alone: bool, whole: Path) -> None:
    run = open_run(str(whole / rule), Experiment)
    found = replay(run, 3, run.parts.cohort(2)[0], whole=not alone)
    # one message is enough for clipping, so that its client can be repeated alone
    assert found.differences == {}
    assert ("server" in found.compared) is not (alone and rule in ("centered_clipping", "bucketing"))


@pytest.mark.parametrize("rule", RULES)
def test_what_reads_a_run_sees_the_server_alone(rule: str, whole: Path) -> None:
    models = CommittedModels(open_run(str(whole / rule), Experiment))
    assert set(models.server) == {"model"} and models.predictors(0)


def test_a_method_cannot_have_the_key() -> None:
    with pytest.raises(MethodError, match="which rayfl uses itself"):
        with_memory({KEY: {}}, {})


@pytest.mark.parametrize(
    ("rule", "changes", "message"),
    [
        ("dnc", {"train": {"clients_per_round": 4}}, "dnc needs 5 clients in a round, and there are 4: raise"),
        ("foolsgold", {"train": {"clients_per_round": 1}}, "foolsgold needs 2 clients in a round, and there are 1"),
        ("centered_clipping", {"method": "scaffold"}, "centered_clipping: it is for changes of one model.*; scaffold"),
        (
            "foolsgold",
            {"privacy": {"clip_norm": 1}, "algorithm": UNIFORM},
            "foolsgold: together with noise that the server adds it is not",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    rule: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        parts(tmp_path, aggregator=RULES[rule], **changes).check()
