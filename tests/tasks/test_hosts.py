"""What is learned and how it is scored do not depend on how many hosts share the clients, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actors.federation.federation import Federation
from actors.federation.hosts import Hosts
from actors.hosting.building import build_host
from actors.processes.pool import InlinePool
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.experiment.parts import Parts
from rayfl.results.tables import ResultTables
from scripts.docs.task_table import TASKS, sections
from tests.support.toys import assert_equal

SLOW = ("preference",)
"""The tasks for which a language model is trained first, which takes longer than all the rest of these tests."""
EACH = [pytest.param(task, marks=pytest.mark.slow if task in SLOW else ()) for task in TASKS]


def played(method: str, task: str, hosts: int) -> tuple[Any, Any, ResultTables]:
    """Two rounds and an evaluation on some hosts: the server's tree, the scores, and the tables."""
    content = sections(method, task)
    content["train"]["rounds"] = 2
    config = load_config(Experiment, content, {})
    parts = Parts(config)
    pool = InlinePool([build_host(config, number, "cpu", tell=lambda line: None) for number in range(hosts)])
    federation = Federation(Hosts(pool), parts.task, parts.context, parts.check())
    server = parts.initial_server()
    for number in range(2):
        cohort = parts.cohort(number)
        federation.begin_round(number, ("test",), cohort)
        server = {**server, **federation.play(config.algorithm, server, cohort)}
    common, own = config.algorithm.served(server, parts.context)
    scores = federation.evaluate(common, ("validation", "test"), True, own)
    tables = ResultTables(parts.dataset.names, config.algorithm.sweep, measures=parts.task.measures)
    tables.add(2, "all", "received", scores, (0, 0))
    return server, scores, tables


@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "superfed"])
@pytest.mark.parametrize("task", EACH)
@pytest.mark.first_case
def test_one_host_and_three(task: str, method: str) -> None:
    (server, scores, tables), (other, others, same) = played(method, task, 1), played(method, task, 3)
    assert_equal(server, other)
    for client, splits in scores.items():
        for split, models in splits.items():
            for model, statistics in models.items():
                assert np.array_equal(statistics.vector, others[client][split][model].vector)
    assert tables.rounds.equals(same.rounds)
    assert tables.clients.equals(same.clients)


@pytest.mark.parametrize("task", EACH)
@pytest.mark.two_cases
def test_pooled_metrics_are_those_of_all_samples_together(task: str) -> None:
    _, scores, tables = played("fedavg", task, 2)
    parts = [splits["test"]["global"] for splits in scores.values() if splits["test"]["global"].n]
    whole = sum(parts[1:], start=parts[0]).metrics()
    (row,) = (row for row in tables.rounds.to_pylist() if (row["split"], row["model"]) == ("test", "global"))
    for name, value in whole.items():
        assert row[f"pooled_{name}"] == pytest.approx(value, rel=1e-12)
        assert row[name] == pytest.approx(np.mean([part.metrics()[name] for part in parts]), rel=1e-9)


def test_undefined_metrics_are_null_and_said() -> None:
    content = sections("fedavg", "regression")
    _, scores, _ = played("fedavg", "regression", 1)
    config = load_config(Experiment, content, {})
    measures = Parts(config).task.measures
    one = scores[0]["test"]["global"]
    constant = type(one)(np.array([2.0, 0.5, 0.5, 1.0, 6.0, 18.0]), measures)  # two samples with the target 3
    tables = ResultTables(["a", "b"], None, measures=measures)
    tables.add(1, "all", "received", {0: {"test": {"global": one}}, 1: {"test": {"global": constant}}}, (0, 0))
    assert tables.clients["r2"].to_pylist() == [pytest.approx(one.metrics()["r2"]), None]
    (row,) = tables.rounds.to_pylist()
    assert row["r2"] == pytest.approx(one.metrics()["r2"])
    assert row["top1"] is None and row["pooled_r2"] is not None
    (sentence,) = tables.undefined
    assert sentence.startswith("r2 is undefined for 1 of 2 clients on test data (all targets are the same)")
