"""Runs whose clients are chosen by their updates, or count several times in a mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

import rayfl
from algorithms.base import Averaging, Clients
from algorithms.fedavg import FedAvg
from algorithms.registry import Experiment
from cluster.replay import replay
from cluster.rounds.forking import fork
from rayfl.aggregation.memory import without_memory
from rayfl.config.loading import load_config
from rayfl.engine.client import Client
from rayfl.errors import ConfigError, MethodError
from rayfl.experiment.parts import Parts
from rayfl.params import Tree, num_bytes
from rayfl.runs.folder import open_run
from rayfl.selection.clustered import Clustered
from rayfl.selection.known import Known
from tests.cluster.rounds.test_selection import assert_same_run, cohorts, experiment
from tests.support.experiments import Interrupt, outcome

EACH: dict[str, dict[str, Any]] = {
    "size": {"name": "clustered"},
    "updates": {"name": "clustered", "by": "updates"},
    "divfl": {"name": "divfl"},
    "represented": {"name": "divfl", "weights": "represented", "sampled": 5},
}


def run_of(folder: Path, name: str = "run", **changes: Any) -> dict[str, Any]:
    """As ``experiment``, with plain means."""
    changes.setdefault("algorithm", {"name": "fedavg", "aggregation": "uniform"})
    changes.setdefault("selection", EACH["updates"])
    return experiment(folder, name, **changes)


def remembered(folder: Path, strategy: str, rounds: int | None = None) -> Tree:
    """What the last commit has of the strategy's own."""
    run = open_run(str(folder), Experiment)
    manifest = run.manifest(rounds or run.config.train.rounds)
    found: Tree = without_memory(run.store.read_server(manifest))[1][f"(selection) {strategy}"]["own"]
    return found


def updates_of(folder: Path, strategy: str = "clustered") -> dict[int, Tensor]:
    return {int(client): update for client, update in remembered(folder, strategy)["updates"].items()}


@pytest.mark.parametrize("selection", EACH.values(), ids=EACH.keys())
@pytest.mark.first_case
def test_an_interrupted_run_chooses_the_same_clients(tmp_path: Path, selection: dict[str, Any]) -> None:
    rayfl.run(run_of(tmp_path, "whole", selection=selection))
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(run_of(tmp_path, "parts", selection=selection), callbacks=[Interrupt(after=3)])
    rayfl.run(run_of(tmp_path, "parts", selection=selection))
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("selection", ["size", "updates", "represented"])
def test_actors_choose_the_clients_of_one_process(tmp_path: Path, selection: str) -> None:
    rayfl.run(run_of(tmp_path, "inline", selection=EACH[selection]))
    rayfl.run(run_of(tmp_path, "ray", selection=EACH[selection], cluster={"num_actors": 2}))
    assert_same_run(tmp_path / "inline", tmp_path / "ray")


@pytest.mark.slow
def test_a_fork_and_an_extension_go_on_with_the_updates(tmp_path: Path) -> None:
    rayfl.run(run_of(tmp_path, "long", train={"rounds": 9}))
    rayfl.run(run_of(tmp_path))
    fork(str(tmp_path / "run"), "fork", 5, ["train.rounds=9"])
    fork(str(tmp_path / "run"), "other", 5, ["train.rounds=9", "selection.similarity=l1"])
    for name in ("fork", "other"):
        rayfl.run(str(tmp_path / name))
    rayfl.run(str(tmp_path / "run"), **{"train.rounds": 9})
    assert cohorts(tmp_path / "fork") == cohorts(tmp_path / "run") == cohorts(tmp_path / "long")
    assert list(remembered(tmp_path / "other", "clustered")["distances"]) == ["l1"]


def test_the_server_keeps_what_each_client_changed_and_counts_it_as_often_as_it_was_drawn(tmp_path: Path) -> None:
    content = run_of(tmp_path, train={"rounds": 1, "clients_per_round": 9})
    rayfl.run(content)
    parts = Parts(load_config(Experiment, content, {}))
    strategy, before = parts.config.selection, parts.initial_server()["model"]
    assert isinstance(strategy, Clustered)
    known = replace(
        Known.before(parts.dataset.sizes()[:, 0]), size=9, generator=parts.context.streams.generator("selection", 0)
    )
    drawn = strategy.choose(known).tolist()
    assert len(set(drawn)) < 9
    rows = pq.read_table(tmp_path / "run" / "cohorts.parquet").to_pylist()
    assert [(row["client"], row["count"]) for row in rows] == sorted(Counter(drawn).items())
    found = updates_of(tmp_path / "run")
    assert sorted(found) == sorted(set(drawn))
    assert_change(before, tmp_path / "run", sum(found[client].double() for client in drawn) / 9)
    rayfl.run({**content, "name": "alone", "selection": f"{__name__}:seven"})
    assert cohorts(tmp_path / "alone")[1] == [7]
    assert_change(before, tmp_path / "alone", found[7].double())


def seven(known: Known) -> list[int]:
    return [7]


def assert_change(before: Tree, folder: Path, expected: Tensor) -> None:
    after = outcome(folder).server["model"]
    change = torch.cat([(after[name].double() - before[name].double()).flatten() for name in sorted(after)])
    assert torch.allclose(change, expected, atol=1e-6)


def test_messages_cost_what_they_cost_without(tmp_path: Path) -> None:
    for name in ("size", "divfl"):
        rayfl.run(run_of(tmp_path, name, selection=EACH[name]))
        last = pq.read_table(tmp_path / name / "rounds.parquet").to_pylist()[-1]
        took_part = sum(map(len, cohorts(tmp_path / name).values()))
        model = num_bytes(Parts(load_config(Experiment, run_of(tmp_path), {})).initial_server()["model"])
        assert last["bytes_down"] == took_part * model
        assert last["bytes_up"] == took_part * model


def test_updates_are_those_that_the_server_receives(tmp_path: Path) -> None:
    content = run_of(tmp_path, selection=EACH["divfl"], train={"rounds": 1, "clients_per_round": 11})
    changed = {
        "honest": {},
        "attacked": {"attack": {"clients": [3, 4], "message": "sign_flip"}},
        "compressed": {"compression": {"name": "top_k", "share": 0.1}},
    }
    found = {}
    for name, sections in changed.items():
        rayfl.run({**content, "name": name, **sections})
        found[name] = updates_of(tmp_path / name, "divfl")
    for client, update in found["honest"].items():
        sign = -1 if client in (3, 4) else 1
        assert torch.allclose(found["attacked"][client], sign * update, atol=1e-6)
        kept = found["compressed"][client].nonzero()
        assert len(kept) <= 0.11 * update.numel()
        assert torch.allclose(found["compressed"][client][kept], update[kept], atol=1e-6)


def test_stacked_clients_send_the_updates_of_clients_one_by_one(tmp_path: Path) -> None:
    for mode in ("looped", "vectorized"):
        rayfl.run(run_of(tmp_path, mode, engine={"mode": mode}, train={"rounds": 2}))
    one, other = (updates_of(tmp_path / mode) for mode in ("looped", "vectorized"))
    assert list(one) == list(other)
    assert all(torch.allclose(one[client], other[client], atol=1e-5) for client in one)


@pytest.mark.two_cases
@pytest.mark.parametrize("method", ["superfed", "fedrep", "fedprox", "fedavgm", "fedbn"])
def test_methods_whose_clients_send_one_model_have_chosen_clients(tmp_path: Path, method: str) -> None:
    model = (
        {"name": "tests.support.own_norm:normalized", "head": "4"}
        if method == "fedbn"
        else {"name": "two_nn", "hidden": [12]}
    )
    algorithm = {"name": method, "aggregation": "uniform"}
    train = {"rounds": 3, "clients_per_round": 7}
    rayfl.run(run_of(tmp_path, algorithm=algorithm, selection=EACH["represented"], train=train, model=model))
    assert len(cohorts(tmp_path / "run")) == 3


def test_a_round_with_repeats_is_replayed_to_the_bit(tmp_path: Path) -> None:
    content = run_of(tmp_path, storage={"keep_commits": 9}, train={"rounds": 3, "clients_per_round": 9})
    rayfl.run(content)
    run = open_run(str(tmp_path / "run"), Experiment)
    for round in (1, 3):
        found = replay(run, round, cohorts(tmp_path / "run")[round][0], whole=True)
        assert found.whole
        assert not found.differences


def test_devices_may_leave_out_clients_of_divfl(tmp_path: Path) -> None:
    system = {"name": "sampled", "over_sampling": 1.5, "dropout": 0.2}
    rayfl.run(run_of(tmp_path, selection=EACH["divfl"], system=system))
    took_part = {client for cohort in cohorts(tmp_path / "run").values() for client in cohort}
    assert set(updates_of(tmp_path / "run", "divfl")) == took_part


def test_devices_that_leave_nobody_out_can_have_clustered_sampling(tmp_path: Path) -> None:
    rayfl.run(run_of(tmp_path, "simulated", selection=EACH["size"], system={"name": "sampled"}))
    rayfl.run(run_of(tmp_path, "plain", selection=EACH["size"]))
    assert cohorts(tmp_path / "simulated") == cohorts(tmp_path / "plain")


SAMPLES = {"name": "fedavg", "aggregation": "samples"}
SECURE = {"compression": {"name": "secure_aggregation", "clip": 1.0}}
ROBUST = {"aggregator": {"name": "median"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"selection": EACH["size"], "algorithm": SAMPLES}, "algorithm.aggregation is samples: set it to uniform"),
    ({"selection": EACH["represented"], "algorithm": SAMPLES}, r"or set selection.weights=method"),
    ({"algorithm": {"name": "fedavg", "aggregation": "population"}}, "not with algorithm.aggregation=population"),
    ({"selection": EACH["size"], "algorithm": {"name": "fedamp"}}, "it is for changes of one model"),
    ({"algorithm": {"name": "fltrust"}, "holdout": {"public": 50}}, "has a rule of its own"),
    ({"selection": EACH["size"], **SECURE}, "a round may have one client"),
    ({"selection": EACH["divfl"], **SECURE}, "the server sees sums alone"),
    ({"selection": EACH["size"], **ROBUST}, "which aggregator=median does not take"),
    ({"privacy": {"example_clip_norm": 1.0, "example_noise_multiplier": 1.0}}, "leave selection or privacy out"),
    ({"system": {"name": "sampled", "dropout": 0.1, "over_sampling": 2}}, "set system.dropout=0, system.over_sampling"),
    ({"system": {"name": "sampled", "mode": "buffered"}, "algorithm": "fedbuff"}, "set system.mode=synchronous"),
    ({"train": {"clients_per_round": "all"}}, "all 12 clients take part in each round"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[words[:30] for _, words in REFUSED])
def test_what_cannot_be_had_is_refused_before_a_start(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rayfl.run(run_of(tmp_path, **changes))
    assert not (tmp_path / "run" / "commits").exists()


class Twice(Averaging):
    """Its clients send two means a round."""

    name: str = "twice"

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        first = clients.mean(self.local_update, cohort, {"model": server["model"]})
        return {"model": clients.mean(self.local_update, cohort, {"model": first})}


class Mapped(Averaging):
    """Its server weighs messages by itself."""

    name: str = "mapped"

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        clients.map(self.look, cohort, {"model": server["model"]})
        return {}

    async def look(self, client: Client, model: Tree) -> Tree:
        return {"n": client.num_samples}


@pytest.mark.parametrize(
    ("method", "selection", "words"),
    [("Twice", "divfl", "this is Clients.mean, call 2"), ("Mapped", "size", "this is Clients.map, call 1")],
)
def test_methods_of_ones_own_are_checked_in_each_round(tmp_path: Path, method: str, selection: str, words: str) -> None:
    algorithm = {"name": f"{__name__}:{method}", "aggregation": "uniform"}
    with pytest.raises(MethodError, match=words):
        rayfl.run(run_of(tmp_path, algorithm=algorithm, selection=EACH[selection]))


class NeverAnswers(FedAvg):
    """Its first four clients fail, always."""

    name: Any = "never_answers"

    async def local_update(self, client: Client, model: Tree) -> Any:
        if client.id < 4:
            raise RuntimeError("out of order")
        return await super().local_update(client, model)


@pytest.mark.slow
def test_clients_that_never_answer_are_asked_less_and_less_often(tmp_path: Path) -> None:
    content = run_of(
        tmp_path,
        algorithm={"name": f"{__name__}:NeverAnswers"},
        selection=EACH["divfl"],
        clients={"on_error": "skip"},
        train={"rounds": 24},
        evaluation={"every": 24},
    )
    rayfl.run(content)
    rows = pq.read_table(tmp_path / "run" / "skipped.parquet").to_pylist()
    asked: dict[int, list[int]] = {}
    for row in rows:
        asked.setdefault(row["client"], []).append(row["round"])
    assert set(asked) == {0, 1, 2, 3}
    for rounds in asked.values():
        assert len(rounds) <= 5  # of 24; in all of them, if nothing were known of failures
        assert all(later - earlier >= 2 ** (n + 1) for n, (earlier, later) in enumerate(pairwise(rounds)))
    with pytest.raises(KeyboardInterrupt):
        rayfl.run({**content, "name": "parts"}, callbacks=[Interrupt(after=7)])
    rayfl.run({**content, "name": "parts"})
    assert_same_run(tmp_path / "run", tmp_path / "parts")
