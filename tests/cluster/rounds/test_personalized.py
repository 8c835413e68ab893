"""Runs say which row is their method's personalized model, and over how many clients their numbers are."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest

import rayfl
from algorithms.fedavg import FedAvg
from algorithms.fedbabu import FedBABU
from algorithms.registry import METHODS
from rayfl import Client, Predictor
from rayfl.errors import ConfigError, DataError
from rayfl.params import Tree
from rayfl.results.personalized import PersonalizedRows, recorded_clients
from rayfl.results.schemas import CLIENTS_KEY, PARTITION_KEY, PERSONALIZED_KEY, TABLES
from rayfl.runs.verification import verify
from rayfl.storage.files import Storage
from tests.support.experiments import small_experiment

HERE = "tests.cluster.rounds.test_personalized"


class Misspelt(FedAvg):
    """Says that a row is its personalized model that its predictors do not have."""

    name: str = "misspelt"
    personalized: ClassVar[str] = "memroy"

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = Predictor.of(server["model"])
        return {"global": model, "memory": model}


class Never(Misspelt):
    """Says so of a row that is to come, and never comes."""

    personalized_later: ClassVar[bool] = True


class Late(FedBABU):
    """Has the row of its personalized model after the last round alone, as its base has."""

    name: str = "late"


def experiment(folder: Path, method: str, **sections: Any) -> dict[str, Any]:
    return {
        **small_experiment(folder, "run", "fedavg", backend="inline"),
        "algorithm": {"name": f"{HERE}:{method}"},
        **sections,
    }


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_built_in_method_says_what_it_evaluates(method: str) -> None:
    own = PersonalizedRows.of(METHODS[method])
    assert own.summary == (("lambda=best", "validation") if own.sweep else (own.model, ""))


def test_all_tables_say_it(tmp_path: Path) -> None:
    for method, own in (("fedphp", PersonalizedRows("hpm")), ("superfed-mm", PersonalizedRows("lambda", "lambda"))):
        result = rayfl.run(small_experiment(tmp_path, method, method, backend="inline"), train__rounds=2)
        tables = {name: pq.read_table(tmp_path / method / f"{name}.parquet") for name in TABLES}
        for table in (*tables.values(), result.rounds, result.clients, result.skipped):
            assert PersonalizedRows.recorded(table) == own
            assert recorded_clients(table) == 5
            assert table.schema.metadata[PARTITION_KEY]


def test_a_row_that_the_predictors_do_not_have_ends_the_run_at_the_first_evaluation(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Misspelt says that 'memroy' .*no such row, only global, memory.*later"):
        rayfl.run(experiment(tmp_path, "Misspelt", evaluation={"every": 1}))
    rounds = (
        pq.read_table(tmp_path / "run" / "rounds.parquet") if (tmp_path / "run" / "rounds.parquet").exists() else None
    )
    assert rounds is None or "memory" not in rounds["model"].to_pylist()


def test_a_row_that_is_to_come_is_waited_for_until_the_last_evaluation(tmp_path: Path) -> None:
    result = rayfl.run(experiment(tmp_path, "Late", evaluation={"every": 1}, train={"rounds": 2, "lr": 0.1}))
    assert set(result.rounds["model"].to_pylist()) >= {"global", "finetuned"}
    with pytest.raises(ConfigError, match="Never says that 'memroy'"):
        rayfl.run(experiment(tmp_path / "b", "Never", evaluation={"every": 1}, train={"rounds": 2, "lr": 0.1}))


def test_a_run_of_an_older_rayfl_is_labelled_when_its_command_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = experiment(tmp_path, "Late", train={"rounds": 2, "lr": 0.1})
    with monkeypatch.context() as before:
        before.setattr("rayfl.results.tables.PersonalizedRows", _Silent)
        rayfl.run(config, **{"train.rounds": 2})
    path = tmp_path / "run" / "rounds.parquet"
    assert PERSONALIZED_KEY not in pq.read_schema(path).metadata
    again = rayfl.run(config)
    assert PersonalizedRows.recorded(pq.read_table(path)) == PersonalizedRows("finetuned")
    assert PersonalizedRows.recorded(again.rounds) == PersonalizedRows("finetuned")
    assert verify(Storage(str(tmp_path / "run"))).problems == []


class _Silent:
    """In place of :class:`PersonalizedRows`, as it was before there was one."""

    metadata: ClassVar[dict[bytes, bytes]] = {}

    def __init__(self, *arguments: object) -> None:
        pass


def test_an_evaluation_of_nobody_is_refused_before_the_start(tmp_path: Path) -> None:
    config = small_experiment(tmp_path, "run", "fedavg", backend="inline")
    # 1,797 samples, two for each of 898 clients: a fifth of two, rounded down, is none.
    config["partition"] = {"name": "iid", "num_clients": 898}
    with pytest.raises(
        DataError, match=r"no client has a test sample.*898 clients of at most 3 samples.*raise holdout"
    ):
        rayfl.run(config)
    config["evaluation"] = {"splits": ["validation"]}
    with pytest.raises(DataError, match="no client has a validation sample"):
        rayfl.run(config)
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_of_some_is_warned_of_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = small_experiment(tmp_path, "run", "fedavg", backend="inline")
    config["partition"] = {"name": "dirichlet", "num_clients": 14, "alpha": 0.1}
    config["holdout"] = {"test": 0.02, "validation": 0.0}
    with caplog.at_level(logging.WARNING, "rayfl"):
        result = rayfl.run(config, train__rounds=1)
    evaluated = {row["clients"] for row in result.rounds.to_pylist() if row["cohort"] == "all"}
    assert len(evaluated) == 1 and evaluated < set(range(1, 14))
    (count,) = evaluated
    assert f"{14 - count} of 14 clients have no test samples" in caplog.text
    assert result.rounds.schema.metadata[CLIENTS_KEY] == b"14"


def test_a_sweep_without_validation_data_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {**small_experiment(tmp_path, "run", "superfed-mm", backend="inline"), "holdout": {"validation": 0.0}}
    with caplog.at_level(logging.WARNING, "rayfl"):
        rayfl.run(config, train__rounds=1)
    assert "no client has a validation sample" in caplog.text and "no lambda can be chosen" in caplog.text
