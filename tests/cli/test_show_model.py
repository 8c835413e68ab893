"""``rayfl show model=NAME dataset=NAME``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from typer.testing import CliRunner

from rayfl.cli.entry import app
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.models.base import ClassificationModel

TWO_NN = 784 * 20 + 20 + 20 * 10 + 10
HEAD = 20 * 10 + 10


class GatedRows(ClassificationModel):
    """A gated recurrent unit over the rows of an image, which cannot be stacked."""

    def __init__(self, spec: InputSpec) -> None:
        super().__init__()
        self.rows = nn.GRU(spec.shape[-1], 4, batch_first=True)
        self.head = nn.Linear(4, spec.num_classes)

    def features(self, x: Tensor) -> Tensor:
        return self.rows(x[:, 0])[0][:, -1]  # type: ignore[no-any-return]

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


def gated(spec: InputSpec) -> GatedRows:
    return GatedRows(spec)


@pytest.fixture(autouse=True)
def without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of a data set is there: its shape is known without."""
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["show", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_parameters_and_bytes_are_counted_method_by_method() -> None:
    methods = ("fedavg", "fedper", "ditto", "scaffold", "local", "hypcluster")
    said = shown("model={name: two_nn, hidden: [20]}", "dataset=mnist", "--methods", ",".join(methods), "--json")
    found: dict[str, Any] = json.loads(said)
    (model,) = found["models"]
    assert (model["parameters"], model["head"], model["body"]) == (TWO_NN, HEAD, TWO_NN - HEAD)
    assert (model["inputs"], model["stacks"], model["why_not"]) == ([1, 28, 28], True, "")
    rows = {row["method"]: row for row in found["methods"]}
    assert not any(row["refused"] for row in rows.values())
    sizes = {name: (row["down"], row["up"], row["state"]) for name, row in rows.items()}
    model_bytes, head = 4 * TWO_NN, 4 * HEAD
    assert sizes["fedavg"] == (model_bytes, model_bytes, 0)
    assert sizes["fedper"] == (model_bytes - head, model_bytes - head, head)
    assert sizes["ditto"] == (model_bytes, model_bytes, model_bytes)
    assert sizes["scaffold"] == (2 * model_bytes, 2 * model_bytes, model_bytes)
    assert sizes["local"] == (0, 0, model_bytes)
    assert sizes["hypcluster"][0] == 2 * model_bytes


def test_what_does_not_stack_says_why_and_what_does_not_run_is_refused() -> None:
    adam = ("train.optimizer=adam", "train.momentum=0")
    said = shown("model=resnet9", "dataset=cifar10", "--methods", "pfedme", "transform.resize=28", *adam)
    assert "resnet9 for inputs of 3 x 28 x 28 and 10 outputs" in said
    assert "stacks: many clients" in said
    assert "stacks: no, " in shown(f"model={__name__}:gated", "dataset=digits", "--methods", "fedavg", *adam)
    assert "SGD" in said


@pytest.mark.parametrize(("norm", "refused"), [("batch", ""), ("none", "this model has no normalization layer")])
def test_what_a_method_sets_by_itself_is_left_to_it(norm: str, refused: str) -> None:
    model = f"model={{name: resnet9, norm: {norm}}}" if norm == "batch" else "model=two_cnn"
    (row,) = json.loads(shown(model, "dataset=cifar10", "--methods", "fedbn", "--json"))["methods"]
    assert refused in row["refused"] and (row["state"] is None) == bool(refused)


def test_data_without_classes_need_no_partition_to_be_looked_at() -> None:
    said = shown("model=tabular_mlp", "dataset=diabetes", "task=regression", "--methods", "fedproto", "--json")
    found = json.loads(said)
    assert found["models"][0]["inputs"] == [10] and found["models"][0]["classes"] == 1
    assert "prototypes are mean features by class" in found["methods"][0]["refused"]


def test_models_that_score_items_are_looked_at_with_made_up_rows() -> None:
    own = ("partition=natural", "holdout.test=null", "holdout.validation=0.1")
    model = ("model=matrix_factorization", "dataset=synthetic_interactions", "task=recommendation")
    found = json.loads(shown(*model, *own, "--methods", "fedavg,fedper", "--json"))
    assert found["models"][0]["inputs"] == [100] and found["models"][0]["parameters"] == 201 * 16
    sizes = {row["method"]: (row["down"], row["up"], row["state"]) for row in found["methods"]}
    assert sizes == {"fedavg": (201 * 64, 201 * 64, 0), "fedper": (200 * 64, 200 * 64, 64)}


def test_models_of_graphs_are_looked_at_with_made_up_graphs() -> None:
    own = ("partition=natural", "holdout.test=null", "holdout.validation=0.1", "--methods", "fedavg,fedproto", "--json")
    found = json.loads(shown("model={name: gin, layers: 1, hidden: 5}", "dataset=synthetic_graphs", *own))
    assert found["models"][0]["inputs"] == [20, 25] and found["models"][0]["stacks"]
    numbers = 5 * 5 + 5 + 5 * 5 + 5 + 1 + 4 * (5 + 5 + 1)
    assert found["models"][0]["parameters"] == numbers and found["methods"][0]["up"] == 4 * numbers
    of_nodes = ("model=gcn", "dataset=synthetic_subgraphs", "task=node_classification")
    found = json.loads(shown(*of_nodes, *own))
    assert found["models"][0]["inputs"] == [60, 69] and found["methods"][1]["refused"]


def test_unknown_methods_are_named() -> None:
    with pytest.raises(ConfigError, match=r"no method 'fedavq'.*did you mean 'fedavg'"):
        shown("model=two_nn", "dataset=mnist", "--methods", "fedavq")
    with pytest.raises(ConfigError, match="--methods is for models"):
        shown("quickstart", "--methods", "fedavg")


def test_nothing_is_remarked_about_runs_that_are_made_up_to_count(caplog: pytest.LogCaptureFixture) -> None:
    """Two rounds are too short for a point of the simplex, which is no news about the model."""
    assert "floco" in shown("model={name: two_nn, hidden: [20]}", "dataset=mnist", "--methods", "floco")
    assert not caplog.records
