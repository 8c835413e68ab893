from __future__ import annotations

import numpy as np
import pytest
import torch

from rayfl.metrics import STATISTICS_SIZE, Statistics, batch_statistics
from rayfl.metrics.classification import ClassificationMeasures
from rayfl.metrics.nodes import NodeMeasures
from rayfl.results.schemas import CLIENTS_SCHEMA, ROUNDS_SCHEMA
from rayfl.results.summaries import ScoreTable
from rayfl.results.tables import ResultTables
from rayfl.storage.tables import from_parquet, to_parquet


def scored(n: int, correct: int) -> Statistics:
    """n samples of which a number is predicted rightly, with confidence 0.8."""
    logits = torch.log(torch.tensor([[0.8, 0.2]])).repeat(n, 1)
    labels = torch.tensor([0] * correct + [1] * (n - correct))
    return Statistics.from_vector(batch_statistics(logits, labels))


def test_one_row_per_client_and_one_summary_per_model() -> None:
    tables = ResultTables(["ann", "bob"], None)
    scores = {1: {"test": {"global": scored(10, 5)}}, 0: {"test": {"global": scored(30, 30)}}}
    rows = tables.add(3, "all", "received", scores, (100, 50))
    assert tables.clients.schema == CLIENTS_SCHEMA
    assert tables.rounds.schema == ROUNDS_SCHEMA
    assert tables.clients.column("client").to_pylist() == [0, 1]
    assert tables.clients.column("name").to_pylist() == ["ann", "bob"]
    assert tables.clients.column("top1").to_pylist() == [1.0, 0.5]
    (row,) = rows
    assert row["top1"] == 0.75
    assert row["top1_std"] == 0.25
    assert row["top1_worst5"] == 0.5
    assert row["pooled_top1"] == 35 / 40
    assert (row["clients"], row["n"], row["bytes_down"], row["bytes_up"]) == (2, 40, 100, 50)
    assert tables.rounds.num_rows == 1


def test_clients_without_samples_in_a_split_have_no_row() -> None:
    tables = ResultTables(["a", "b"], None)
    empty = Statistics(np.zeros(STATISTICS_SIZE))
    scores = {0: {"validation": {"global": empty}, "test": {"global": scored(4, 1)}}, 1: {"test": {"global": empty}}}
    tables.add(1, "all", "received", scores, (0, 0))
    assert tables.clients.column("split").to_pylist() == ["test"]
    assert tables.rounds.column("clients").to_pylist() == [1]
    assert tables.add(2, "all", "received", {0: {"test": {"global": empty}}}, (0, 0)) == []


def test_a_metric_that_no_client_has_alone_may_be_that_of_all_samples_together() -> None:
    """Each client has samples of one class: none has an area under the ROC curve, their union has."""
    measures = ClassificationMeasures(("auroc",), 2, 101)
    outputs = torch.log(torch.tensor([[0.9, 0.1], [0.4, 0.6]]))
    vectors = [measures.statistics(outputs, torch.full((2,), label)) for label in (0, 1)]
    scores = [Statistics.from_vector(vector, measures) for vector in vectors]
    ((row, _),) = ScoreTable({c: {"test": {"global": one}} for c, one in enumerate(scores)}, measures).summaries(None)
    assert (row["auroc"], row["auroc_std"]) == (None, None)
    assert row["pooled_auroc"] == (scores[0] + scores[1]).metrics()["auroc"] == pytest.approx(0.5)


@pytest.fixture
def swept() -> dict[str, dict[str, object]]:
    """Two clients: validation prefers lambda=0.5, test prefers lambda=1.0 for both and 0.5 for client 0 alone."""
    grid = {
        "lambda=0.0": ((6, 2), (6, 2)),
        "lambda=0.5": ((8, 7), (6, 5)),
        "lambda=1.0": ((7, 6), (9, 9)),
    }
    scores = {
        client: {
            "validation": {"global": scored(10, 1)} | {name: scored(10, v[client]) for name, (v, _) in grid.items()},
            "test": {"global": scored(10, 1)} | {name: scored(10, t[client]) for name, (_, t) in grid.items()},
        }
        for client in (0, 1)
    }
    rows = ResultTables(["a", "b"], "lambda").add(1, "all", "received", scores, (0, 0))
    return {row["selected_on"]: row for row in rows if row["model"] == "lambda=best"}


def test_the_sweep_is_chosen_on_validation_and_the_choice_on_test_is_marked(
    swept: dict[str, dict[str, object]],
) -> None:
    assert set(swept) == {"validation", "validation per client", "test", "test per client"}
    assert swept["validation"]["choice"] == "lambda=0.5"
    assert swept["validation"]["top1"] == pytest.approx(0.55)
    assert swept["test"]["choice"] == "lambda=1.0"
    assert swept["test"]["top1"] == pytest.approx(0.9)
    assert swept["validation per client"]["top1"] == pytest.approx(0.55)
    assert swept["test per client"]["top1"] >= swept["test"]["top1"]
    assert all(row["split"] == "test" for row in swept.values())


def test_without_validation_samples_only_marked_choices_remain() -> None:
    scores = {0: {"test": {"lambda=0.0": scored(5, 1), "lambda=1.0": scored(5, 2)}}}
    rows = ResultTables(["a"], "lambda").add(1, "all", "received", scores, (0, 0))
    assert {row["selected_on"] for row in rows} == {"", "test", "test per client"}


def test_models_that_have_diverged_are_named() -> None:
    tables = ResultTables(["a", "b"], None)
    diverged = Statistics.from_vector(batch_statistics(torch.full((4, 2), torch.nan), torch.tensor([0, 1, 1, 1])))
    tables.add(1, "all", "received", {0: {"test": {"global": scored(4, 2)}}, 1: {"test": {"global": diverged}}}, (0, 0))
    (sentence,) = [one for one in tables.undefined if one.startswith("loss")]
    assert "undefined for 1 of 2 clients on test data (what their models say is not finite: their train" in sentence


def test_divergence_is_the_reason_where_a_task_has_others() -> None:
    measures, y = NodeMeasures(2), torch.tensor([[0, 1, -100]])
    logs = torch.full((1, 3, 2), -0.7)
    found = {
        0: measures.statistics(logs, y),
        1: measures.statistics(logs.fill_(torch.nan), y),
    }
    tables = ResultTables(["a", "b"], None, measures=measures)
    scores = {client: {"test": {"global": Statistics(vector, measures)}} for client, vector in found.items()}
    tables.add(1, "all", "received", scores, (0, 0))
    (sentence,) = tables.undefined
    assert sentence.startswith("loss is undefined for 1 of 2 clients on test data (what their models say is not finite")


def test_the_choice_by_validation_is_on_the_official_part_without_test_rows_of_clients_too() -> None:
    scores = {
        client: {
            "validation": {"lambda=0.0": scored(5, 4), "lambda=1.0": scored(5, 2)},
            "official": {"lambda=0.0": scored(9, 1 + client), "lambda=1.0": scored(9, 8)},
        }
        for client in (0, 1)
    }
    rows = ResultTables(["a", "b"], "lambda").add(1, "all", "received", scores, (0, 0))
    (chosen,) = [row for row in rows if row["selected_on"]]
    assert (chosen["split"], chosen["model"], chosen["selected_on"]) == ("official", "lambda=best", "validation")
    assert (chosen["choice"], chosen["top1"]) == ("lambda=0.0", pytest.approx(1.5 / 9))


def test_ties_go_to_the_first_of_the_sweep() -> None:
    scores = {0: {s: {"lambda=0.0": scored(5, 2), "lambda=1.0": scored(5, 2)} for s in ("validation", "test")}}
    rows = ResultTables(["a"], "lambda").add(1, "all", "received", scores, (0, 0))
    assert [row["choice"] for row in rows if row["selected_on"] == "validation"] == ["lambda=0.0"]


def test_equal_means_whose_last_bits_differ_are_ties() -> None:
    """0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 are two numbers: three clients swap what two lambdas give them."""
    hits = {"lambda=0.0": (3, 2, 1), "lambda=0.5": (1, 2, 3), "lambda=1.0": (2, 2, 2)}
    scores = {
        client: {split: {name: scored(10, h[client]) for name, h in hits.items()} for split in ("validation", "test")}
        for client in range(3)
    }
    for order in (hits, dict(reversed(hits.items()))):
        ranked = {c: {s: {name: models[name] for name in order} for s, models in v.items()} for c, v in scores.items()}
        rows = ResultTables(["a", "b", "c"], "lambda").add(1, "all", "received", ranked, (0, 0))
        means = {row["model"]: row["top1"] for row in rows if row["split"] == "test" and not row["selected_on"]}
        assert len(set(means.values())) > 1
        found = {row["selected_on"]: row["choice"] for row in rows if row["selected_on"]}
        assert found["validation"] == found["test"] == next(iter(order))


def test_parquet_round_trip_is_exact_and_deterministic() -> None:
    tables = ResultTables(["a"], None)
    for round in (1, 2):
        tables.add(round, "all", "received", {0: {"test": {"global": scored(7, round)}}}, (0, 0))
    again = from_parquet(to_parquet(tables.rounds))
    assert again.equals(tables.rounds)
    assert to_parquet(again) == to_parquet(tables.rounds)
    grown = tables.after({})
    before = tables.rounds.num_rows
    grown.add(3, "all", "received", {0: {"test": {"global": scored(7, 3)}}}, (0, 0))
    assert tables.rounds.num_rows == before
    assert grown.rounds.num_rows == before + 1


def test_what_follows_is_without_the_rows_on_storage() -> None:
    tables = ResultTables(["a"], None, "hash")
    for round in (1, 2, 3):
        tables.add(round, "all", "received", {0: {"test": {"global": scored(7, round)}}}, (0, 0))
    later = tables.after({"clients": 2}).after({"clients": 1}).after({})
    assert later.committed == {"clients": 2, "rounds": 0, "skipped": 0, "calibration": 0}
    assert later.clients.equals(tables.clients.slice(2))
    assert later.clients.schema.metadata == tables.clients.schema.metadata
    assert later.rounds.equals(tables.rounds)
    assert later.after({"clients": 3}).clients.num_rows == 0
    resumed = ResultTables(["a"], None, "hash").after({"clients": 9})
    assert resumed.committed["clients"] == 9
    assert resumed.clients.num_rows == 0
