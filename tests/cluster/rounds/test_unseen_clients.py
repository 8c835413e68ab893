"""Clients held out from training, and personalized models on the official test part: options, tables, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from rayfl.cli.entry import app
from rayfl.config.loading import load_config
from rayfl.errors import ClientError, ConfigError, DataError, RunError
from rayfl.experiment.parts import Parts
from rayfl.experiment.result import Result
from rayfl.results.personalized import recorded_clients, recorded_unseen
from rayfl.runs.rows import where
from rayfl.tracking.callback import Callback
from tests.data.sources.test_official_test import TEST_ROWS, settings

HELD = 3


def experiment(folder: Path, name: str = "run", method: str = "fedper", **changes: Any) -> dict[str, Any]:
    """Twelve clients of digits, of which three are held out, for two rounds."""
    return {
        "name": name,
        "storage_path": str(folder),
        "dataset": {"name": "digits"},
        "partition": {"name": "classes", "num_clients": 12, "classes_per_client": 2},
        "model": {"name": "two_nn", "hidden": [8]},
        "algorithm": {"name": method},
        "train": {"rounds": 2, "clients_per_round": 4, "local_epochs": 1, "lr": 0.1, "batch_size": 16},
        "evaluation": {"every": 1, "unseen_clients": 0.25},
        "tracking": {"tensorboard": False},
        "cluster": {"backend": "inline"},
        **changes,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return rayfl.run(experiment(tmp_path_factory.mktemp("runs")))


def parts_of(content: dict[str, Any], **changes: Any) -> Parts:
    return Parts(load_config(Experiment, content, {key.replace("__", "."): value for key, value in changes.items()}))


def test_a_run_that_takes_the_partition_over_holds_out_the_same_clients(
    run: Result, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = Path(run.path) / "partition.parquet"
    taken = experiment(tmp_path, partition={"name": "file", "path": str(file)}, seed=7)
    parts = parts_of(taken)
    parts.check()
    assert parts.partition_hash == run.partition and "so they are drawn" not in caplog.text
    with pytest.raises(ConfigError, match=r"which is 6 of 12 clients, but the run .* held out 3: set it to 0.25"):
        parts_of(taken, evaluation__unseen_clients=0.5).dataset  # noqa: B018
    # A file that does not say so: from another program, or of an older rayfl.
    pq.write_table(pq.read_table(file).replace_schema_metadata(None), tmp_path / "silent.parquet")
    parts_of(taken, partition__path=str(tmp_path / "silent.parquet")).check()
    assert "silent.parquet does not say that its run held clients out, so they are drawn" in caplog.text


def test_rows_of_the_cohort_unseen_are_of_clients_that_never_trained(run: Result) -> None:
    unseen, everybody = where(run.clients, cohort="unseen"), where(run.clients, cohort="all")
    assert set(unseen["client"].to_pylist()) == {9, 10, 11}
    assert set(everybody["client"].to_pylist()) == set(range(9))
    trained = set(where(run.clients, cohort="selected")["client"].to_pylist())
    assert trained <= set(range(9))
    rows = where(run.rounds, cohort="unseen", split="test").to_pylist()
    assert [(row["round"], row["phase"], row["model"], row["clients"]) for row in rows] == [
        (1, "received", "personalized", HELD),
        (2, "received", "personalized", HELD),
    ]
    own = where(unseen, round=2, split="test")
    assert rows[-1]["top1"] == pytest.approx(np.mean(own["top1"].to_pylist()))
    assert pc.all(pc.is_null(unseen["bytes_up"])).as_py(), "they send nothing"
    assert (recorded_clients(run.rounds), recorded_unseen(run.rounds)) == (9, HELD)


def test_a_run_goes_on_with_the_same_newcomers_to_the_same_bits(tmp_path: Path) -> None:
    longer = rayfl.run(rayfl.run(experiment(tmp_path, name="short")).path, train__rounds=3)
    content = experiment(tmp_path, name="whole")
    whole = rayfl.run({**content, "train": {**content["train"], "rounds": 3}})
    assert longer.rounds.equals(whole.rounds) and longer.clients.equals(whole.clients)


def test_who_is_held_out_is_drawn_by_the_seed_and_names_stay_with_their_clients(tmp_path: Path) -> None:
    parts = parts_of(experiment(tmp_path))
    names = parts.dataset.names
    assert sorted(names) == sorted(str(client) for client in range(12)) and names[9:] != ("9", "10", "11")
    assert parts_of(experiment(tmp_path, method="fedavg")).dataset.names == names
    assert parts_of(experiment(tmp_path, seed=1)).dataset.names[9:] != names[9:]
    whole = parts_of(experiment(tmp_path), evaluation__unseen_clients=0)
    place = {name: client for client, name in enumerate(whole.dataset.names)}
    for client, name in enumerate(names):
        for split, found in parts.dataset.places(client).items():
            assert found.tolist() == whole.dataset.places(place[name])[split].tolist()
        assert parts.dataset.labels(client)["test"].tolist() == whole.dataset.labels(place[name])["test"].tolist()
    assert parts.partition_hash != whole.partition_hash, "runs with other clients in training are not compared"
    assert all(client < 9 for round in range(20) for client in parts.cohort(round))


def test_the_fingerprint_counts_them_only_where_there_are_some(tmp_path: Path) -> None:
    plain = experiment(tmp_path)
    del plain["evaluation"]["unseen_clients"]
    config = load_config(Experiment, plain, {})
    identity = config.identity()["evaluation"]
    assert not {"unseen_clients", "unseen_epochs", "official_personalized"} & set(identity)
    with_some = [
        load_config(Experiment, plain, {"evaluation.unseen_clients": 0.25}),
        load_config(Experiment, plain, {"evaluation.unseen_clients": 0.25, "evaluation.unseen_epochs": 2}),
        load_config(Experiment, plain, {"evaluation.official_personalized": True}),
    ]
    assert len({config.fingerprint(), *(one.fingerprint() for one in with_some)}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation": {"unseen_clients": 0.01}}, "of 12 clients is not a single one"),
        ({"evaluation": {"unseen_clients": 0.25, "unseen_epochs": 3}, "method": "fedavg"}, "trains nothing: leave it"),
        ({"method": "apple"}, "apple has nothing for a newcomer: its model is a mixture"),
        ({"train": {"clients_per_round": 10, "lr": 0.1}}, "only 9 clients: 3 are held out"),
        (
            {
                "model": {"name": "tests.support.own_norm:normalized", "head": "4"},
                "train": {"private_norm": "all", "lr": 0.1, "clients_per_round": 4},
                "method": "fedavg",
            },
            "a newcomer has no normalization layers of its own",
        ),
    ],
)
def test_what_cannot_be_held_out_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parts_of(experiment(tmp_path, **changes)).check()


def test_epochs_of_nobody_and_newcomers_without_test_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unseen_epochs needs unseen_clients"):
        parts_of(experiment(tmp_path, evaluation={"unseen_epochs": 3}))
    from rayfl.experiment.evaluated import check_newcomers

    config = load_config(Experiment, experiment(tmp_path), {})
    with pytest.raises(DataError, match="none of the 2 clients held out has a test sample"):
        check_newcomers(config, np.array([[3, 1, 0], [2, 1, 0]]))


def test_a_method_of_ones_own_that_fails_newcomers_is_found_out_before_the_first_round(tmp_path: Path) -> None:
    rounds: list[int] = []

    class Watch(Callback):
        def on_round(self, rounds_completed: int, *others: Any) -> None:
            rounds.append(rounds_completed)

    content = experiment(tmp_path, method="tests.support.own_methods:NoNewcomers")
    with pytest.raises(ClientError, match=r"client 9, round 1, newcomer_predictors: IndexError"):
        rayfl.run(content, callbacks=[Watch()])
    assert not rounds


def test_a_fork_holds_out_the_same_clients(run: Result) -> None:
    done = CliRunner().invoke(
        app, ["fork", run.path, "--name", "other", "evaluation.unseen_clients=0.5", "train.rounds=3"]
    )
    assert "evaluation.unseen_clients: a fork goes on with the clients" in str(done.exception)


@pytest.mark.slow
def test_commands_know_the_cohort(run: Result, tmp_path: Path) -> None:
    def said(*arguments: str, status: int = 0) -> str:
        done = CliRunner().invoke(app, list(arguments))
        assert done.exit_code == status, (done.output, done.exception)
        return done.output

    assert "3 held-out clients" in said("clients", run.path, "--cohort", "unseen")
    listed = json.loads(said("clients", run.path, "--cohort", "unseen", "--json"))
    assert listed["cohort"] == "unseen" and [one["client"] for one in listed["clients"]] == [9, 10, 11]
    other = rayfl.run(experiment(Path(run.path).parent, name="ditto", method="ditto"))
    table = json.loads(said("compare", run.path, other.path, "--cohort", "unseen", "--json"))
    assert "held out from training" in said("compare", run.path, other.path, "--cohort", "unseen", "--format", "latex")
    assert {(line["cohort"], line["clients"]) for line in table["numbers"]} == {("unseen", HELD)}
    assert "clients held out: test accuracy" in said("watch", run.path, "--once")
    said("plot", "curves", run.path, "--cohort", "unseen", "--out", str(tmp_path / "curves.png"))
    said("plot", "clients", run.path, "--cohort", "unseen", "--out", str(tmp_path / "clients.png"))
    said("report", run.path, "--cohort", "unseen", "--out", str(tmp_path / "report"))
    assert "all 3 clients held out from training" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    said("report", run.path, "--out", str(tmp_path / "plain"))
    page = (tmp_path / "plain" / "report.html").read_text(encoding="utf-8")
    assert "Clients held out from training, on their own test data, after round 2" in page
    # Of those that may take part.
    assert "of 9 clients never did" in page


def test_a_run_without_them_says_what_makes_them(tmp_path: Path) -> None:
    plain = experiment(tmp_path)
    plain["evaluation"] = {"every": 1}
    path = rayfl.run(plain).path
    from rayfl.runs.folder import open_run
    from rayfl.runs.listing import listed_clients

    with pytest.raises(RunError, match=r"run it with evaluation\.unseen_clients"):
        listed_clients(open_run(path, Experiment), None, "test", None, "unseen")
    for options in (["--cohort", "unseen"], ["--split", "official"]):
        done = CliRunner().invoke(app, ["report", path, "--out", str(tmp_path / "report"), *options])
        assert "they come with evaluation." in str(done.exception)


@pytest.mark.slow
def test_personalized_models_on_the_official_test_part(tmp_path: Path) -> None:
    content = settings(tmp_path, algorithm={"name": "ditto"}, name="run")
    content["evaluation"] = {"every": 3, "official_personalized": True, "official_test": True}
    result = rayfl.run(content)
    clients = where(result.clients, split="official")
    assert set(clients["model"].to_pylist()) == {"personalized"} and set(clients["n"].to_pylist()) == {TEST_ROWS}
    assert clients["client"].to_pylist() == [0, 1, 2, 3] and set(clients["cohort"].to_pylist()) == {"all"}
    (row,) = where(result.rounds, split="official", cohort="all").to_pylist()
    assert row["model"] == "personalized" and row["clients"] == 4
    assert row["top1"] == pytest.approx(np.mean(clients["top1"].to_pylist()))
    for options in ([], ["--split", "official"]):
        done = CliRunner().invoke(app, ["report", result.path, "--out", str(tmp_path / "report"), *options])
        assert done.exit_code == 0, (done.output, done.exception)
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "Official data of all 4 clients after round 3" in page and "on the official test part" in page
    from rayfl.runs.committed import CommittedModels
    from rayfl.runs.folder import open_run

    models = CommittedModels(open_run(result.path, Experiment))
    part = models.parts.official_test.load(0, TEST_ROWS)
    for client, found in zip(clients["client"].to_pylist(), clients["top1"].to_pylist(), strict=True):
        predictor = models.predictor(client, "personalized")
        guesses = predictor.predictions(predictor.built(), part.x, models.parts.task).argmax(-1)
        assert float((guesses == part.y).double().mean()) == pytest.approx(found)


def test_of_a_sweep_the_choice_by_validation_is_scored_there(tmp_path: Path) -> None:
    content = settings(tmp_path, algorithm={"name": "superfed", "start": 0.0}, name="run")
    content["evaluation"] = {"every": 3, "official_personalized": True}
    content["holdout"] = {"validation": 0.2}
    result = rayfl.run(content)
    official = where(result.rounds, split="official", cohort="all", selected_on="validation").to_pylist()
    chosen = where(result.rounds, split="test", cohort="all", selected_on="validation").to_pylist()
    assert [row["choice"] for row in official] == [row["choice"] for row in chosen] != []
    content["evaluation"]["splits"] = ["validation"]
    result = rayfl.run({**content, "name": "without"})
    without = where(result.rounds, split="official", cohort="all", selected_on="validation").to_pylist()
    assert [(row["choice"], row["top1"]) for row in without] == [(row["choice"], row["top1"]) for row in official]
    from rayfl.runs.folder import open_run
    from rayfl.runs.listing import listed_clients

    rows, name, _ = listed_clients(open_run(result.path, Experiment), None, "official", None)
    assert name == without[0]["choice"] and len(rows) == without[0]["clients"]


def test_a_method_without_personalized_models_is_refused(tmp_path: Path) -> None:
    content = settings(tmp_path)
    content["evaluation"] = {"official_personalized": True}
    with pytest.raises(ConfigError, match=r"fedavg has no personalized models; evaluation\.official_test scores"):
        parts_of(content).check()
    content["algorithm"] = {"name": "fedavg", "finetune_epochs": 1}
    result = rayfl.run({**content, "name": "tuned"})
    assert set(where(result.clients, split="official")["model"].to_pylist()) == {"finetuned"}
    content["dataset"] = {"name": "digits"}
    with pytest.raises(ConfigError, match="official_test"):
        parts_of({**content, "algorithm": {"name": "ditto"}}).check()
