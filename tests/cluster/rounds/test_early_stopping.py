"""Runs that end before their last round: when, with which rows, and what goes on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from cluster.rounds.early_stopping import EarlyStopping
from cluster.sweep.run import SweepOptions, run_sweep
from rayfl.cli.entry import app
from rayfl.config.early_stopping import EarlyStoppingConfig
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError, RunError
from rayfl.metrics import CLASSIFICATION
from rayfl.report.rows import rounds_done
from rayfl.runs.folder import open_run
from rayfl.runs.watching import standing
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.sweeps.measures import Measure
from rayfl.sweeps.space import parse_space
from rayfl.sweeps.trials import plan_sweep
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment
from tests.support.toys import assert_equal

ROUNDS = 12


def experiment(place: Path, name: str = "run", method: Any = "fedavg", **sections: Any) -> dict[str, Any]:
    content = small_experiment(place, name, "fedavg", backend="inline")
    content |= {"algorithm": method, "holdout": {"validation": 0.2}, "evaluation": {"every": 1}}
    train = {**content["train"], "rounds": ROUNDS, **sections.pop("train", {})}
    return {**content, **sections, "train": train}


def validation(rounds: pa.Table, model: str = "global") -> dict[int, float]:
    rows = [row for row in rounds.to_pylist() if (row["cohort"], row["split"]) == ("all", "validation")]
    return {row["round"]: row["top1"] for row in rows if row["model"] == model and not row["selected_on"]}


def ends(values: list[float | None], metric: str = "top1", **options: Any) -> int | None:
    """After which of the evaluations, one a round, a run ends."""
    rule = EarlyStoppingConfig(metric=metric, **options)
    config = load_config(Experiment, experiment(Path("."), early_stopping=rule.model_dump()), {})
    early = EarlyStopping(config, CLASSIFICATION.metrics)
    for at, value in enumerate(values, 1):
        key = {"round": at, "cohort": "all", "phase": "received", "split": "validation", "model": "global"}
        if early.ends(at, [{**key, "selected_on": "", metric: value}]):
            return at
    return None


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([0.1, 0.2, 0.2, 0.2, 0.9], {"patience": 2}, 4),
        ([0.1, 0.2, 0.2, 0.3, 0.3], {"patience": 2}, None),
        ([0.5, 0.4, 0.45, 0.49, 0.6], {"patience": 3}, 4),
        ([0.1, 0.15, 0.21, 0.25], {"patience": 2, "min_delta": 0.1}, None),
        ([0.1, 0.15, 0.19, 0.25], {"patience": 2, "min_delta": 0.1}, 3),
        ([0.9, 0.1, 0.1, 0.2, 0.3], {"patience": 1, "min_rounds": 2}, None),
        ([0.9, 0.1, 0.1, 0.05, 0.3], {"patience": 1, "min_rounds": 2}, 4),
        ([0.1, 0.5, 0.6], {"target": 0.5}, 2),
        ([0.6, 0.5, 0.5], {"target": 0.5, "min_rounds": 1}, 2),
        ([0.1, 0.1, 0.6], {"target": 0.5, "patience": 1}, 2),
        ([None, 0.1, None, None, 0.05], {"patience": 1}, 5),
    ],
)
def test_when_a_run_ends(values: list[float | None], options: dict[str, Any], expected: int | None) -> None:
    assert ends(values, **options) == expected
    turned = options | ({"target": -options["target"]} if "target" in options else {})
    less = [None if value is None else -value for value in values]
    assert ends(less, "loss", **turned) == expected  # of a loss less is better


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(rayfl.run(experiment(tmp_path_factory.mktemp("long"), storage={"keep_commits": ROUNDS})).path)


def expected_end(folder: Path, patience: int) -> int:
    best, at = -1.0, 0
    for round, value in validation(open_run(str(folder), Experiment).rounds).items():
        if value > best:
            best, at = value, round
        elif round - at == patience:
            return round
    raise AssertionError("the run has no such end")


@pytest.mark.slow
def test_an_early_end_is_that_moment_of_the_whole_run(tmp_path: Path, long: Path) -> None:
    at = expected_end(long, 1)
    assert 1 < at < ROUNDS
    result = rayfl.run(experiment(tmp_path, early_stopping={"patience": 1}))
    assert (result.rounds_completed, result.ended_early) == (at, True)
    whole = open_run(str(long), Experiment)
    for mine, other in ((result.rounds, whole.rounds), (result.clients, whole.clients)):
        assert mine.to_pylist() == [row for row in other.to_pylist() if row["round"] <= at]
    stores = [CommitStore(Storage(str(folder))) for folder in (result.path, long)]
    manifests = [stores[0].latest(), whole.manifest(at)]
    trees = [store.read_server(manifest) for store, manifest in zip(stores, manifests, strict=True) if manifest]
    assert_equal(*trees)


class Silent(rayfl.Callback):
    def on_round(self, *told: Any) -> None:
        raise AssertionError("a round was trained")


def test_a_run_that_has_ended_stays_ended(tmp_path: Path) -> None:
    content = experiment(tmp_path, early_stopping={"patience": 1})
    first = rayfl.run(content)
    again = rayfl.run(content, callbacks=[Silent()])
    assert again.ended_early and again.rounds.equals(first.rounds)
    found, view = standing(first.path, Experiment)
    assert (found.state, found.rounds_completed) == ("finished", first.rounds_completed)
    assert (found.seconds_left, view.seconds_left) == (0, 0)
    run = open_run(first.path, Experiment)
    assert run.finished and rounds_done(run) == f"{first.rounds_completed} of {ROUNDS}, ended early"
    with pytest.raises(RunError, match=r"has ended early, after round .* rayfl fork"):
        rayfl.run(first.path, train__rounds=20)
    with pytest.raises(RunError, match=r"holds another run: train\.rounds") as refused:
        rayfl.run(content, train__rounds=20)
    assert "gives it more rounds" not in str(refused.value)


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ({"name": "ditto"}, {"patience": 2, "min_rounds": 5}),
        pytest.param({"name": "superfed"}, {"target": 0.01, "min_rounds": 8}, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_ends_where_an_undisturbed_one_does(
    tmp_path: Path, method: dict[str, Any], rule: dict[str, Any]
) -> None:
    options = {"method": method, "early_stopping": rule}
    whole = rayfl.run(experiment(tmp_path, "whole", **options))
    assert 7 < whole.rounds_completed < ROUNDS
    pieces = experiment(tmp_path, "pieces", **options)
    for after in (6, whole.rounds_completed - 1):
        with pytest.raises(KeyboardInterrupt):
            rayfl.run(pieces, callbacks=[Interrupt(after)])
    result = rayfl.run(pieces)
    assert (result.rounds_completed, result.ended_early) == (whole.rounds_completed, True)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))


def test_the_last_evaluation_is_a_last_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All clients are scored, and methods do what they do after the last round."""
    method = {"name": "fedavg", "finetune_epochs": 1}
    evaluation = {"every": 2, "clients": 2}
    result = rayfl.run(experiment(tmp_path, method=method, evaluation=evaluation, early_stopping={"target": 0.01}))
    assert result.rounds_completed == 2 and "ends early, after round 2 of 12" in caplog.text
    assert "no evaluation had the number" not in caplog.text  # it had, and it was enough at once
    assert "early_stopping: evaluations before the last round are of 2 drawn clients" in caplog.text
    rows = [row for row in result.rounds.to_pylist() if (row["cohort"], row["split"]) == ("all", "test")]
    assert {row["model"]: row["clients"] for row in rows} == {"global": 5, "finetuned": 5}


def test_a_fork_goes_on_beyond_an_early_end(tmp_path: Path) -> None:
    ended = rayfl.run(experiment(tmp_path, early_stopping={"patience": 1}))
    options = ["early_stopping={}", f"train.rounds={ended.rounds_completed + 2}"]
    made = CliRunner().invoke(app, ["fork", ended.path, "--name", "forked", *options], catch_exceptions=False)
    assert made.exit_code == 0, made.output
    result = rayfl.run(str(tmp_path / "forked"))
    assert (result.rounds_completed, result.ended_early) == (ended.rounds_completed + 2, False)


@pytest.mark.slow
def test_a_longer_run_ends_where_it_does_without_having_been_extended(tmp_path: Path) -> None:
    """The evaluation after the last round ends nothing, but it would have ended a run of more rounds."""
    rule = {"early_stopping": {"patience": 1}}
    whole = rayfl.run(experiment(tmp_path, "whole", **rule))
    at = whole.rounds_completed
    assert at < ROUNDS
    reached = rayfl.run(experiment(tmp_path, "reached", train={"rounds": at}, **rule))
    assert (reached.rounds_completed, reached.ended_early) == (at, False)
    with pytest.raises(RunError, match=rf"a longer run would have ended early, after round {at}: .* rayfl fork"):
        rayfl.run(reached.path, train__rounds=ROUNDS)
    for every in (1, 2):  # where two do not divide the former last round, its evaluation does not count
        options = {**rule, "evaluation": {"every": every}}
        whole = rayfl.run(experiment(tmp_path, f"whole-{every}", **options))
        lengths = range(2 * every + 1, whole.rounds_completed)  # shorter runs cannot end early, and are refused
        assert lengths
        for rounds in lengths:
            parts = experiment(tmp_path, f"{rounds}-of-{every}", train={"rounds": rounds}, **options)
            extended = rayfl.run(rayfl.run(parts).path, train__rounds=ROUNDS)
            assert extended.rounds_completed == whole.rounds_completed, (every, rounds)


@pytest.mark.slow
def test_experiments_of_a_sweep_that_end_early_are_finished(local_ray: None, tmp_path: Path) -> None:
    content = {**experiment(tmp_path, "sweep"), "early_stopping": {"patience": 1}, "cluster": {"backend": "inline"}}
    sweep = plan_sweep(Experiment, content, parse_space(["seed=0:2"]), None, 0)
    said: list[str] = []
    options = SweepOptions(at_once=2, measure=Measure())
    result = run_sweep(sweep, options, said.append)
    assert result.trials["status"].to_pylist() == ["finished"] * 2
    assert all(rounds < ROUNDS for rounds in result.trials["rounds"].to_pylist())
    assert sum("finished early, after" in line for line in said) == 2
    again: list[str] = []
    run_sweep(sweep, options, again.append)
    assert again == []


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"early_stopping": {"min_delta": 0.1}}, "nothing ends the run early without patience or target"),
        ({"early_stopping": {"target": 0.5, "min_delta": 0.1}}, "min_delta: it is about patience"),
        ({"early_stopping": {"patience": 1, "metric": "auroc"}}, r"early_stopping\.metric: there is no 'auroc'"),
        (
            {
                "early_stopping": {"patience": 1, "metric": "asr"},
                "attack": {"clients": [1], "backdoor": {"target": 0}},
            },
            r"early_stopping\.metric: there is no 'asr'",
        ),
        ({"early_stopping": {"target": 90}}, r"early_stopping\.target: 90 is 9000\.00%.*for 90 % set 0\.9"),
        ({"early_stopping": {"patience": 1}, "holdout": {"validation": 0}}, "goes by validation samples"),
        (
            {"early_stopping": {"patience": 1}, "evaluation": {"every": 1, "splits": ["test"]}},
            "goes by validation samples",
        ),
        ({"early_stopping": {"patience": 11}}, "the earliest end would be after round 12"),
        ({"early_stopping": {"target": 0.5}, "evaluation": {"every": 6}, "train": {"rounds": 6}}, "earliest end"),
        ({"early_stopping": {"patience": 1, "min_rounds": 10}}, "the earliest end would be after round 12"),
        ({"method": {"name": "local"}, "early_stopping": {"patience": 1, "model": "global"}}, "local has no global"),
        ({"method": {"name": "fedbabu"}, "early_stopping": {"patience": 1}}, r"early_stopping\.model=global"),
        (
            {"method": {"name": "superfed", "start": 0.5}, "early_stopping": {"patience": 1}},
            r"set early_stopping\.min_rounds=6",
        ),
        (
            {"method": {"name": "ccvr"}, "early_stopping": {"patience": 1, "model": "global"}},
            "ccvr does in the last of its train.rounds=12 rounds",
        ),
        (
            {
                "method": {"name": "fedavg", "aggregation": "uniform"},
                "early_stopping": {"patience": 1},
                "privacy": {"clip_norm": 1},
                "train": {"clients_per_round": "all"},
            },
            "scores are not private",
        ),
    ],
)
def test_what_cannot_be_decided_is_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rayfl.run(experiment(tmp_path, **sections))
    assert not (tmp_path / "run").exists()


def test_of_a_method_of_ones_own_nobody_knows_its_course(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    method = {"name": "tests.support.own_methods:NoNewcomers"}
    assert rayfl.run(experiment(tmp_path, method=method, early_stopping={"target": 0.01})).ended_early
    assert "does not say whether a round depends on train.rounds" in caplog.text


@pytest.mark.slow
def test_a_number_that_never_comes_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The area under the ROC curve of clients with one class each."""
    partition = {"name": "classes", "num_clients": 10, "classes_per_client": 1}
    sections = {"task": {"name": "classification", "metrics": ["auroc"]}, "partition": partition}
    result = rayfl.run(experiment(tmp_path, **sections, early_stopping={"patience": 1, "metric": "auroc"}))
    assert (result.rounds_completed, result.ended_early) == (ROUNDS, False)
    assert "early_stopping: no evaluation had the number that it watches" in caplog.text


@pytest.mark.parametrize("name", ["fedphp", "apple", "ditto"])
def test_a_course_over_all_rounds_is_named(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert rayfl.run(experiment(tmp_path, method={"name": name}, early_stopping={"target": 0.01})).ended_early
    assert (f"what {name} does in a round depends on train.rounds=12" in caplog.text) == (name != "ditto")
