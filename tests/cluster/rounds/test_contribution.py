"""Runs that value their clients: what is recorded, what survives, what it changes, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.nn.functional as F
from rich.console import Console

import rayfl
from algorithms.fedavg import FedAvg
from algorithms.registry import METHODS, Experiment
from cluster.replay import replay
from cluster.rounds.forking import fork
from rayfl.config.loading import load_config
from rayfl.engine.client import Client
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.params import Tree
from rayfl.plots.contributions import draw
from rayfl.report.blocks import Figure
from rayfl.report.contributions import section
from rayfl.results.contributions import contributions_of
from rayfl.runs.finding import load_run
from rayfl.runs.folder import open_run
from rayfl.runs.further import further_tables
from tests.cluster.rounds.test_selection import experiment
from tests.cluster.rounds.test_selection_by_updates import updates_of
from tests.support.experiments import Interrupt, assert_equal, outcome

DRAWN = {"name": "shapley", "exact_up_to": 0, "passes": 2, "within": 0.001, "between": 0.0, "tolerance": None}
EACH: dict[str, dict[str, Any]] = {
    "shapley": {"name": "shapley", "metric": "loss"},
    "drawn": DRAWN,
    "without": {"name": "leave_one_out", "samples": "public"},
    "cosine": {"name": "cosine"},
}
OFTEN = ["drawn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("shapley", "without", "cosine"))]
UNIFORM = {"name": "fedavg", "aggregation": "uniform"}
PRIVATE = {"clip_norm": 1.0, "noise_multiplier": 0.5}


def run_of(folder: Path, name: str = "run", **changes: Any) -> dict[str, Any]:
    """As ``experiment``, with clients that are valued, and samples of the server's own."""
    options = {"selection": {"name": "uniform"}, "contribution": EACH["shapley"], "holdout": {"public": 50}, **changes}
    return experiment(folder, name, **options)


def values(folder: Path) -> pa.Table:
    return pq.read_table(folder / "contributions.parquet")


def assert_same(left: Path, right: Path) -> None:
    assert values(left).equals(values(right))
    one, other = outcome(left), outcome(right)
    assert_equal(one.server, other.server)
    assert one.rounds.equals(other.rounds)


@pytest.mark.parametrize("contribution", OFTEN)
def test_an_interrupted_run_finds_the_same_values(tmp_path: Path, contribution: str) -> None:
    options = {"contribution": EACH[contribution], "train": {"rounds": 4}, "evaluation": {"every": 4}}
    rayfl.run(run_of(tmp_path, "whole", **options))
    parts = run_of(tmp_path, "parts", **options, storage={"commit_every": 2})
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(parts, callbacks=[Interrupt(after=3)])
    rayfl.run(parts)
    assert_same(tmp_path / "whole", tmp_path / "parts")
    known = Parts(load_config(Experiment, parts, {}))
    found = values(tmp_path / "whole").to_pylist()
    cohorts = [(round + 1, client) for round in range(4) for client in known.cohort(round)]
    assert [(row["round"], row["client"]) for row in found] == cohorts
    for row in found:
        own = known.sizes[[client for round, client in cohorts if round == row["round"]], 0]
        assert row["weight"] == pytest.approx(known.sizes[row["client"], 0] / own.sum(), abs=1e-15)


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("contribution", ["shapley", "drawn", "cosine"])
def test_actors_find_the_values_of_one_process(tmp_path: Path, contribution: str) -> None:
    rayfl.run(run_of(tmp_path, "inline", contribution=EACH[contribution]))
    rayfl.run(run_of(tmp_path, "ray", contribution=EACH[contribution], cluster={"num_actors": 2}))
    assert_same(tmp_path / "inline", tmp_path / "ray")


def test_models_and_traffic_are_those_of_a_run_without(tmp_path: Path) -> None:
    short = {"train": {"rounds": 2}}
    rayfl.run(run_of(tmp_path, "valued", **short))
    rayfl.run(run_of(tmp_path, "plain", contribution={"name": "none"}, **short))
    one, other = outcome(tmp_path / "valued"), outcome(tmp_path / "plain")
    assert_equal(one.server, other.server)
    assert one.rounds.equals(other.rounds) and one.clients.equals(other.clients)
    assert not (tmp_path / "plain" / "contributions.parquet").exists()


def test_values_of_a_round_sum_to_what_it_has_added(tmp_path: Path) -> None:
    rayfl.run(run_of(tmp_path, train={"rounds": 3}))
    found, rounds = values(tmp_path / "run").to_pylist(), {}
    for row in found:
        rounds.setdefault(row["round"], []).append(row)
    for those in rounds.values():
        assert sum(row["value"] for row in those) == pytest.approx(those[0]["after"] - those[0]["before"], abs=1e-12)
        assert {(row["kind"], row["metric"], row["found"], row["evaluations"]) for row in those} == {
            ("shapley", "loss", "exact", 8)
        }
    for before, after in zip(list(rounds.values()), list(rounds.values())[1:], strict=False):
        assert before[0]["after"] == after[0]["before"]


def test_utilities_are_the_pooled_metric_of_the_global_model(tmp_path: Path) -> None:
    rayfl.run(run_of(tmp_path, train={"rounds": 2}, evaluation={"every": 1}))
    pooled = {
        row["round"]: row["pooled_loss"]
        for row in outcome(tmp_path / "run").rounds.to_pylist()
        if (row["split"], row["cohort"], row["model"]) == ("validation", "all", "global")
    }
    for row in values(tmp_path / "run").to_pylist():
        assert -row["after"] == pytest.approx(pooled[row["round"]], rel=1e-6)


@pytest.mark.slow
def test_a_fork_an_extension_and_a_replay_go_on(tmp_path: Path) -> None:
    rayfl.run(run_of(tmp_path, "long"))
    content = run_of(tmp_path, train={"rounds": 4}, storage={"keep_commits": 9})
    rayfl.run(content)
    fork(str(tmp_path / "run"), "fork", 3, ["train.rounds=6"])
    fork(str(tmp_path / "run"), "other", 3, ["contribution.metric=top1"])
    fork(str(tmp_path / "run"), "without", 3, ["contribution=none"])
    for name in ("fork", "other", "without"):
        rayfl.run(str(tmp_path / name))
    rayfl.run(str(tmp_path / "run"), **{"train.rounds": 6})
    assert values(tmp_path / "run").equals(values(tmp_path / "long"))
    forked = values(tmp_path / "fork").to_pylist()
    assert forked[:9] == values(tmp_path / "run").to_pylist()[:9] and len(forked) == 18
    assert [row["metric"] for row in values(tmp_path / "other").to_pylist()] == ["loss"] * 9 + ["top1"] * 3
    assert max(values(tmp_path / "without")["round"].to_pylist()) == 3
    run = open_run(str(tmp_path / "run"), Experiment)
    client = values(tmp_path / "run")["client"][-1].as_py()
    again = replay(run, 6, client, whole=True)
    assert again.whole and not again.differences


def test_cosines_are_those_of_updates_with_their_mean(tmp_path: Path) -> None:
    attack = {"clients": [4, 6], "message": "sign_flip", "strength": 3.0}
    kept = {"selection": {"name": "divfl"}, "train": {"rounds": 1, "clients_per_round": 11}}  # which keeps updates
    rayfl.run(run_of(tmp_path, contribution=EACH["cosine"], attack=attack, **kept))
    updates, rows = updates_of(tmp_path / "run", "divfl"), values(tmp_path / "run").to_pylist()
    mean = sum(row["weight"] * updates[row["client"]].double() for row in rows)
    assert sorted(updates) == [row["client"] for row in rows]
    for row in rows:
        expected = F.cosine_similarity(updates[row["client"]].double(), mean, dim=0)
        assert row["value"] == pytest.approx(float(expected), abs=1e-6)
        assert (row["metric"], row["evaluations"]) == (None, 0)


class Failing(FedAvg):
    """Client 6 fails, always."""

    name: Any = "failing"

    async def local_update(self, client: Client, model: Tree) -> Any:
        if client.id == 6:
            raise RuntimeError("out of order")
        return await super().local_update(client, model)


def test_clients_that_are_left_out_have_no_value(tmp_path: Path) -> None:
    algorithm, skip = {"name": f"{__name__}:Failing"}, {"on_error": "skip"}
    rayfl.run(run_of(tmp_path, algorithm=algorithm, clients=skip, train={"rounds": 3}))
    found = values(tmp_path / "run").to_pylist()
    assert all(row["client"] != 6 for row in found)
    assert {row["evaluations"] for row in found} == {4, 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"name": "fedprox"}},
        {"algorithm": {"name": "superfed"}},
        {"algorithm": {"name": "ditto", "aggregation": "uniform"}},
        {"compression": {"name": "top_k", "share": 0.1}},
        {
            "privacy": {**PRIVATE, "noise_at": "clients"},
            "train": {"sampling": "poisson", "clients_per_round": 9},
            "algorithm": UNIFORM,
        },
        {"system": {"name": "sampled", "dropout": 0.3}},
        {"stages": {"name": "classes", "count": 2, "rounds": 3}},
        {"selection": {"name": "clustered"}, "algorithm": UNIFORM},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_goes_together(tmp_path: Path, changes: dict[str, Any]) -> None:
    result = rayfl.run(run_of(tmp_path, **changes))
    for row in result.contributions.to_pylist():
        assert row["found"] in ("exact", "drawn") and np.isfinite(row["value"])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": {"name": "fedavgm"}}, "the server of fedavgm makes something else of what clients send"),
    ({"algorithm": {"name": "fedamp"}}, "contribution=shapley: it is for changes of one model"),
    ({"algorithm": {"name": "fltrust"}}, "fltrust has a rule of its own"),
    ({"algorithm": {"name": "fedper"}}, "the server of fedper makes something else"),
    ({"algorithm": {"name": "fedavg", "aggregation": "population"}}, "not with algorithm.aggregation=population"),
    ({"aggregator": {"name": "median"}}, "which aggregator=median does not take"),
    ({"compression": {"name": "secure_aggregation", "clip": 1.0}}, "the server sees sums alone"),
    (
        {"privacy": PRIVATE, "train": {"sampling": "poisson", "clients_per_round": 9}, "algorithm": UNIFORM},
        "together with noise that the server adds it is not defined",
    ),
    (
        {"algorithm": {"name": "fedbn"}, "model": {"name": "tests.support.own_norm:normalized", "head": "4"}},
        "the server has no whole model",
    ),
    (
        {"contribution": {"name": "shapley", "metric": "mse"}},
        "contribution.metric: there is no 'mse'; the task has top1",
    ),
    ({"contribution": EACH["without"], "holdout": {"public": 0}}, "the server has no samples: set holdout.public"),
    ({"holdout": {"validation": 0.0}}, "goes by validation samples, and no client has any"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[words[:30] for _, words in REFUSED])
def test_what_cannot_be_had_is_refused_before_a_start(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rayfl.run(run_of(tmp_path, **changes))
    assert not (tmp_path / "run" / "commits").exists()


def test_costs_and_options_without_effect_are_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, "rayfl")
    Parts(load_config(Experiment, run_of(tmp_path, contribution={"name": "shapley", "passes": 3}), {})).check()
    assert "up to 8 models of a round of 3 clients are evaluated" in caplog.text
    assert "nothing is drawn: no effect of passes" in caplog.text
    caplog.clear()
    Parts(load_config(Experiment, run_of(tmp_path, contribution=DRAWN), {})).check()
    assert "no effect" not in caplog.text


def test_contribution_is_short_for_its_name(tmp_path: Path) -> None:
    config = load_config(Experiment, run_of(tmp_path), ["contribution=leave_one_out"])
    assert config.contribution.name == "leave_one_out"
    plain = load_config(Experiment, run_of(tmp_path), ["contribution=none"])
    assert "contribution" not in plain.identity() and "contribution" in config.identity()


@pytest.mark.slow
def test_tables_reports_and_figures_have_the_values(tmp_path: Path) -> None:
    attack = {"clients": [5], "labels": "random"}
    short = {"train": {"rounds": 3}}
    both = [rayfl.run(run_of(tmp_path, f"seed{seed}", seed=seed, attack=attack, **short)) for seed in (0, 1)]
    rayfl.run(run_of(tmp_path, "cosine", contribution=EACH["cosine"], **short))
    plain = rayfl.run(run_of(tmp_path, "plain", contribution={"name": "none"}, **short))
    found = contributions_of(both[0].contributions)
    assert found is not None
    console = Console(width=100, record=True)
    for table in further_tables(both[0]):
        console.print(table)
    text = console.export_text()
    best = int(found.clients[np.argmax(found.values)])
    assert "Shapley value of a client for minus loss (nats), summed over rounds" in text and "5, malicious" in text
    first = next(line.split() for line in text.splitlines() if line.split()[:1] == [str(best)])
    assert (first[1], first[-1]) == (str(both[0].samples[best]), f"{found.values.max():.3f}")
    assert f"models evaluated: {3 * 8}" in text
    assert not further_tables(plain)
    facts, figure, table = section(load_run(str(tmp_path / "seed0"), METHODS))
    assert (facts.kind, figure.kind, table.kind) == ("facts", "figure", "table")
    assert [cell.text for cell in table.rows[0]][::2] == [str(best), f"{found.values.max():.3f}"]
    assert not section(load_run(str(tmp_path / "plain"), METHODS))
    opened = [open_run(str(tmp_path / name), Experiment) for name in ("seed0", "seed1", "cosine")]
    drawn, numbers = draw(opened)
    assert len(drawn.axes) == 2
    rows = [row for row in numbers.to_pylist() if row["kind"] == "shapley"]
    other = contributions_of(both[1].contributions)
    assert other is not None
    for row in rows:
        own = [one.values[one.clients == row["client"]] for one in (found, other)]
        assert row["value"] == pytest.approx(np.concatenate(own).mean())
        assert row["seeds"] == sum(map(len, own))
    with pytest.raises(ConfigError, match="plain has not valued its clients"):
        draw([open_run(str(tmp_path / "plain"), Experiment)])
    # as of a fork that went on with another kind: a curve of both would be of nothing
    later = values(tmp_path / "cosine")
    later = later.set_column(
        0, later.schema.field("round"), pa.array([n + 3 for n in later["round"].to_pylist()], pa.int32())
    )
    pq.write_table(pa.concat_tables([values(tmp_path / "seed0"), later]), tmp_path / "cosine" / "contributions.parquet")
    _, figure, _ = section(load_run(str(tmp_path / "cosine"), METHODS))
    assert isinstance(figure, Figure)
    curves = [line.get_xdata() for line in figure.drawing.figure.axes[1].lines]
    assert curves and all(min(rounds) > 3 for rounds in curves)
