"""Runs of recommendation: methods, stops, options, own data and models, and what is refused before the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.partitions.stats import dataset_stats
from rayfl.data.sources.base import Samples
from rayfl.errors import ConfigError, DataError
from rayfl.examples import InputSpec
from rayfl.experiment.parts import Parts
from rayfl.metrics.ranking import RankingLoss
from rayfl.plots.partition import label_matrix
from rayfl.randomness import RandomStreams
from rayfl.results.schemas import metrics_of
from rayfl.runs.rows import where
from tests.support.experiments import Interrupt, assert_same, outcome
from tests.tasks.test_recommendation_steps import SPEC, rows

torch.set_num_threads(1)
DATA: dict[str, Any] = {
    "name": "synthetic_interactions",
    "num_clients": 8,
    "items": 40,
    "interactions": 10,
    "factors": 2,
    "negatives": 20,
}

ADAM = {"batch_size": 16, "optimizer": "adam", "lr": 0.05}


def sections(**changes: Any) -> dict[str, Any]:
    return {
        "dataset": DATA,
        "task": "recommendation",
        "model": {"name": "neural_cf", "factors": 4, "embedding": 4, "hidden": [6]},
        "algorithm": "fedavg",
        "train": {"rounds": 3, "clients_per_round": 2, "local_epochs": 2, "batch_size": 4, "lr": 0.5},
        "evaluation": {"every": 3},
        "cluster": {"backend": "inline", "device": "cpu"},
        **changes,
    }


def checked(content: dict[str, Any]) -> Parts:
    parts = Parts(load_config(Experiment, content, {}))
    parts.check()
    return parts


METHODS: dict[str, Any] = {
    "fedavg": "fedavg",
    "fedper": {"name": "fedper", "head_group": "user"},
    "fedrep": {"name": "fedrep", "head_group": "user", "head_epochs": 1},
    "fedrap": {"name": "fedrap", "head_group": "user", "ramp": 1.0},
    "gpfedrec": {"name": "gpfedrec", "head_group": "all_but_items"},
    "ditto": "ditto",
    "superfed": {"name": "superfed", "mode": "mm", "start": 0.3},
}


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=() if name in ("fedrap", "gpfedrec", "superfed") else pytest.mark.slow)
        for name in METHODS
    ],
)
@pytest.mark.first_case
def test_runs_are_the_same_looped_and_stacked(method: str, tmp_path: Path) -> None:
    content = sections(algorithm=METHODS[method])
    runs = {
        mode: rayfl.run(content, **{"engine.mode": mode, "storage_path": str(tmp_path), "name": mode})
        for mode in ("looped", "vectorized")
    }
    metrics = metrics_of(runs["looped"].rounds)
    assert [(one.name, one.label) for one in metrics] == [("hit_rate", "HR@10"), ("ndcg", "NDCG@10"), ("loss", "loss")]
    kept = {mode: where(run.clients, round=3, cohort="all", split="test") for mode, run in runs.items()}
    for metric in metrics:
        values, others = (np.array(kept[mode][metric.name], dtype=float) for mode in runs)
        np.testing.assert_allclose(values, others, rtol=1e-3, atol=1e-3)
        assert np.isfinite(values).all()


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.first_case
def test_a_stop_changes_no_bit(mode: str, tmp_path: Path) -> None:
    content = sections(algorithm=METHODS["fedper"], engine={"mode": mode}, tracking={"tensorboard": False})
    rayfl.run(content, storage_path=str(tmp_path), name="whole")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(content, callbacks=[Interrupt(1)], storage_path=str(tmp_path), name="stopped")
    rayfl.run(content, storage_path=str(tmp_path), name="stopped")
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "stopped"))


def test_fedrep_with_one_batch_a_round_is_the_update_of_pfedrec(tmp_path: Path) -> None:
    """Zhang et al., IJCAI 2023: a step on the user's score function, one on the items, and the mean of the items."""
    rate = 0.7
    content = sections(
        task={"name": "recommendation", "negatives": 20},
        model={"name": "matrix_factorization", "embedding": 3},
        algorithm={"name": "fedrep", "head_epochs": 1, "body_epochs": 1, "aggregation": "uniform"},
        train={"rounds": 2, "clients_per_round": "all", "local_epochs": 1, "batch_size": None, "lr": rate},
        tracking={"tensorboard": False},
    )
    rayfl.run(content, storage_path=str(tmp_path), name="run")
    parts = checked(content)
    begun = parts.task.network.initialize(parts.streams.integer("init.global"))
    items, users = begun["items.weight"], [begun["user.weight"] for _ in range(DATA["num_clients"])]
    for _ in range(2):
        sent = []
        for client, user in enumerate(users):
            x = parts.dataset.load(client)["train"].x
            own = [user.clone().requires_grad_(), items.clone().requires_grad_()]
            for moved in own:
                losses = RankingLoss()(own[1][x] @ own[0][0])
                (slope,) = torch.autograd.grad(losses.mean(), moved)
                moved.data -= rate * slope
            users[client], found = (leaf.detach() for leaf in own)
            sent.append(found)
        items = torch.stack(sent).mean(0)
    end = outcome(tmp_path / "run")
    torch.testing.assert_close(end.server["shared"]["items.weight"], items, rtol=1e-4, atol=1e-5)
    for client, user in enumerate(users):
        torch.testing.assert_close(end.states[str(client)]["personal"]["user.weight"], user, rtol=1e-4, atol=1e-5)


def test_in_fedper_only_the_users_own_vectors_stay_at_the_client() -> None:
    parts = checked(sections(algorithm=METHODS["fedper"]))
    method, network = parts.config.algorithm, parts.task.network
    assert method.personal(network) == ("user.factors", "user.embedding")
    assert set(method.shared(network)) == set(network.parameter_names) - {"user.factors", "user.embedding"}


@pytest.mark.parametrize(
    "changes",
    [
        {"task": {"name": "recommendation", "loss": "bpr"}},
        {"task": {"name": "recommendation", "negatives": 9}},
        {"task": {"name": "recommendation", "k": 2}},
        {"dataset": {**DATA, "unknown": "all"}},
        {"dataset": {**DATA, "validation": False}},
    ],
    ids=["loss", "negatives", "k", "unknown", "validation"],
)
@pytest.mark.two_cases
def test_options_have_an_effect(changes: dict[str, Any], tmp_path: Path) -> None:
    results = [
        rayfl.run(sections(**given), storage_path=str(tmp_path), name=str(number))
        for number, given in enumerate(({}, changes))
    ]
    tables = [where(one.rounds, round=3, cohort="all", split="test").to_pylist() for one in results]
    names = ("pooled_hit_rate", "pooled_ndcg", "pooled_loss")
    assert [[row[name] for name in names] for row in tables[0]] != [[row[name] for name in names] for row in tables[1]]


def own_samples(streams: RandomStreams) -> Samples:
    """Rows of a user's own function, whose clients are divided by the section holdout."""
    data = rows(40)
    return Samples(data.x.numpy(), data.y.numpy(), SPEC, np.repeat(["a", "b"], 20))


def another_place(streams: RandomStreams) -> Samples:
    return replace(own_samples(streams), y=np.full(40, 3))


def test_a_function_may_return_rows_of_its_own(tmp_path: Path) -> None:
    result = rayfl.run(sections(dataset=f"{__name__}:own_samples"), storage_path=str(tmp_path), name="run")
    assert where(result.rounds, round=3, cohort="all", split="test").num_rows == 1
    with pytest.raises(DataError, match=r"y: the place of the chosen item of sample 0 is 3, .* 1 place, 0 to 0"):
        checked(sections(dataset=f"{__name__}:another_place"))


def test_data_sets_are_described(tmp_path: Path) -> None:
    parts = checked(sections())
    about = dict(dataset_stats(parts.dataset).rows())
    assert about["clients"] == "8" and about["test samples"] == "8"
    assert label_matrix(parts.dataset).tolist() == parts.dataset.sizes().sum(1, keepdims=True).tolist()


def test_whole_users_can_be_private(tmp_path: Path) -> None:
    uniform = {"name": "fedavg", "aggregation": "uniform"}
    train = {**sections()["train"], "sampling": "poisson", "clients_per_round": 7}
    content = sections(algorithm=uniform, train=train, privacy={"clip_norm": 0.5, "noise_multiplier": 0.3})
    result = rayfl.run(content, storage_path=str(tmp_path), name="run")
    assert where(result.rounds, round=3, cohort="all", split="test").num_rows == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"dataset": "wine", "partition": {"name": "iid", "num_clients": 3}},
            r"recommendation learns from an item .* set task=classif",
        ),
        ({"task": "classification"}, r"'synthetic_interactions' has an item that a user .* set task=recommendation"),
        ({"task": {"name": "recommendation", "negatives": 21}}, r"task.negatives is 21, but each sample has 20 items"),
        ({"task": {"name": "recommendation", "k": 21}}, r"task.k is 21, but each sample has 20 .* raise dataset.negat"),
        ({"algorithm": "fedproto"}, r"fedproto cannot learn task=recommendation"),
        (
            {
                "algorithm": {"name": "fedper", "head_group": "user"},
                "model": {"name": f"{__name__}:Scorer", "head": "head"},
            },
            r"head_group=user is for models with vectors of a user",
        ),
        ({"holdout": {"test": 0.3}}, r"holdout: dataset 'synthetic_interactions', which has clients and splits of its"),
        ({"partition": {"name": "iid", "num_clients": 3}}, r"partition.name: 'iid' cannot divide dataset 'synthetic_i"),
        ({"noise": {"kind": "pair", "ratio": 0.2}}, r"noise: dataset 'synthetic_interactions', which has"),
        ({"attack": {"clients": [1], "labels": "random"}}, r"attack.labels: .*class"),
        ({"privacy": {"example_clip_norm": 1.0}}, r"one sample changes the others: set privacy.clip_norm, which prot"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_start(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, DataError), match=words):
        checked(sections(**changes))


@pytest.mark.parametrize("name", ["parquet", "arrays"])
def test_files_of_rows_say_which_source_reads_interactions(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"what users chose is read by dataset=interactions"):
        checked(sections(dataset={"name": name, "path": str(tmp_path / "a.parquet")}))


class Scorer(torch.nn.Module):
    """A user's own module: a popularity of each item."""

    def __init__(self, spec: InputSpec) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(spec.vocabulary, 3)
        self.head = torch.nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.items(x))
        return scores


def test_a_module_of_ones_own_scores_items(tmp_path: Path) -> None:
    content = sections(model={"name": f"{__name__}:Scorer", "head": "head"})
    result = rayfl.run(content, storage_path=str(tmp_path), name="run")
    assert where(result.rounds, round=3, cohort="all", split="test").num_rows == 1


@pytest.mark.slow
def test_users_learn_what_they_like_and_a_popular_list_is_not_enough(tmp_path: Path) -> None:
    """FedPer with the user's own vectors beats FedAvg, which has one list for all, on users who differ."""
    content = sections(
        dataset={**DATA, "num_clients": 60, "items": 80, "interactions": 16},
        train={
            "rounds": 15,
            "clients_per_round": 30,
            "local_epochs": 2,
            "batch_size": 16,
            "optimizer": "adam",
            "lr": 0.05,
        },
        model="neural_cf",
        evaluation={"every": 15},
        engine={"mode": "vectorized"},
    )
    found = {}
    for method in ("fedavg", "fedper"):
        result = rayfl.run({**content, "algorithm": METHODS[method]}, storage_path=str(tmp_path), name=method)
        (row,) = where(result.rounds, round=15, cohort="all", split="test").to_pylist()
        found[method] = row["ndcg"]
    assert found["fedper"] > found["fedavg"] + 0.03


@pytest.mark.slow
def test_held_out_items_that_are_never_drawn_can_be_told_by_a_model_alone(tmp_path: Path) -> None:
    """Why dataset.unknown=training is the default: clients by themselves, who know no other user, win without it."""
    found = {}
    for unknown in ("training", "all"):
        source = {**DATA, "num_clients": 40, "unknown": unknown}
        train = {
            "rounds": 8,
            "clients_per_round": "all",
            "local_epochs": 4,
            "batch_size": 16,
            "optimizer": "adam",
            "lr": 0.05,
        }
        content = sections(dataset=source, algorithm="local", train=train, evaluation={"every": 8})
        result = rayfl.run(content, storage_path=str(tmp_path), name=unknown, **{"engine.mode": "vectorized"})
        (row,) = where(result.rounds, round=8, cohort="all", split="test").to_pylist()
        found[unknown] = row["hit_rate"]
    assert found["all"] > 0.9 > 0.6 > found["training"]
