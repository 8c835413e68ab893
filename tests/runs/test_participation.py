"""Who took part in the rounds of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import rayfl
from algorithms.registry import METHODS
from cluster.rounds.forking import fork
from rayfl.report.process import cohorts
from rayfl.results.schemas import SKIPPED_SCHEMA
from rayfl.runs.finding import load_run
from rayfl.runs.loading import Run
from rayfl.runs.participation import begun_after, participants
from rayfl.runs.rows import attendance
from tests.support.experiments import small_experiment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which all clients have samples to score."""
    path = tmp_path_factory.mktemp("runs")
    rayfl.run(small_experiment(path, "whole", "fedavg", backend="inline"))
    return path / "whole"


@pytest.fixture
def changed(folder: Path) -> Callable[..., Run]:
    """The run, had it other tables or another configuration."""

    def change(content: dict[str, object] | None = None, **tables: pa.Table) -> Run:
        run = load_run(str(folder), METHODS)
        run.content = {**run.content, **(content or {})}
        for name, table in tables.items():
            run.__dict__[name] = table  # of the cached property
        return run

    return change


def pairs(table: pa.Table | None) -> set[tuple[int, int]]:
    assert table is not None
    return {(row["round"], row["client"]) for row in table.to_pylist()}


def test_cohorts_are_those_that_trained(changed: Callable[..., Run]) -> None:
    run = changed()
    assert pairs(participants(run)) == pairs(attendance(run.clients)) != set()


def test_clients_without_samples_to_score_took_part_all_the_same(changed: Callable[..., Run]) -> None:
    everybody, some = changed(), changed().clients
    some = some.filter(pc.field("client") > 1)
    assert len(attendance(some)) < len(attendance(everybody.clients))
    assert pairs(participants(changed(clients=some))) == pairs(participants(everybody))
    whole, without = cohorts(everybody), cohorts(changed(clients=some))
    assert whole is not None and without is not None and whole.caption == without.caption


def test_clients_that_failed_took_no_part(changed: Callable[..., Run]) -> None:
    everybody = changed()
    (round, client), (other, another), *_ = sorted(pairs(participants(everybody)))
    rows = [(round, client, "train"), (other, another, "predictors")]
    skipped = [
        {"round": number, "client": who, "name": str(who), "procedure": procedure, "reason": "it diverged"}
        for number, who, procedure in rows
    ]
    run = changed(
        clients=everybody.clients.filter(pc.field("client") != client),
        skipped=pa.Table.from_pylist(skipped, schema=SKIPPED_SCHEMA),
    )
    assert pairs(participants(everybody)) - pairs(participants(run)) == {(round, client)}


def test_what_is_not_known_exactly_is_said_to_be_of_scored_clients(changed: Callable[..., Run]) -> None:
    """On simulated devices, in a fork, and where what was recorded says otherwise."""
    simulated = changed({"system": {"name": "lognormal"}})
    forked, other = changed(), changed({"seed": 99})
    forked.__dict__["environment"] = [{"rounds_completed": 2}]
    for run in (simulated, forked, other):
        assert participants(run) is None
        drawn = cohorts(run)
        assert drawn is not None and drawn.caption.startswith("Clients of the cohorts that were scored in")
        assert "never" not in drawn.caption


def test_a_fork_is_not_taken_to_have_had_its_cohorts_from_the_beginning(tmp_path: Path) -> None:
    options = {"train.clients_per_round": 1, "train.rounds": 2, "evaluation.cohort_every": 0, "storage.keep_commits": 2}
    rayfl.run(small_experiment(tmp_path, "source", "fedavg", backend="inline"), **options)
    fork(str(tmp_path / "source"), "forked", 1, {"train.clients_per_round": 3, "evaluation.cohort_every": 1})
    rayfl.run(tmp_path / "forked")
    source, forked = (load_run(str(tmp_path / name), METHODS) for name in ("source", "forked"))
    assert len(pairs(participants(source))) == 2
    assert (begun_after(source), begun_after(forked)) == (0, 1)
    assert participants(forked) is None
    drawn = cohorts(forked)
    assert drawn is not None and drawn.caption.startswith("Clients of the cohorts that were scored in 1 rounds")
