"""``rayfl clients``, ``export`` and ``diff`` on finished runs."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from rayfl.cli.entry import app
from rayfl.config.differences import differences
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError, DamageError, RayflError, RunError
from rayfl.runs.committed import CommittedModels
from rayfl.runs.folder import RunFolder
from rayfl.runs.listing import COLUMNS, chosen_rows, listed_clients
from rayfl.runs.measured import Cohort
from tests.support.commands import command
from tests.support.experiments import small_experiment
from tests.support.inspecting import Finished, opened


class Net(nn.Module):
    """The run's architecture, written without rayfl."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.ModuleList([nn.Linear(64, 12)])
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden[0](x.flatten(1))))  # type: ignore[no-any-return]


@pytest.mark.two_cases
@pytest.mark.parametrize(
    ("method", "model", "row"),
    [
        ("superfed-mm", "global", "global"),
        ("superfed-mm", "personalized", None),
        ("fedphp", "personalized", "hpm"),
        ("floco", "personalized", "personalized"),
    ],
)
def test_an_exported_model_needs_no_rayfl(
    finished: Finished, tmp_path: Path, method: str, model: str, row: str | None
) -> None:
    run, out = finished(method), tmp_path / "model.safetensors"
    said = command("export", str(run), "--client", "3", "--model", model, "--out", str(out))
    with safetensors.safe_open(out, "pt") as file:
        told = json.loads(file.metadata()["rayfl"])
    network = Net()
    network.load_state_dict(safetensors.torch.load_file(out))
    examples = opened(run).parts.dataset.load(3)["test"]
    with torch.no_grad():
        accuracy = float((network(examples.x).argmax(1) == examples.y).double().mean())
    rows = pq.read_table(run / "clients.parquet").to_pylist()
    name = told["row"]
    recorded = [
        r["top1"]
        for r in rows
        if (r["client"], r["model"], r["round"], r["split"], r["phase"], r["cohort"])
        == (3, name, 3, "test", "received", "all")
    ]
    assert [accuracy] == recorded
    assert told["metrics"]["test"]["top1"] == accuracy
    assert row in (None, name) and name in said
    assert (told["model"]["name"], told["model"]["hidden"], told["client"], told["round"]) == ("two_nn", [12], 3, 3)
    assert told["inputs"]["classes"] == 10 and "Linear" in told["modules"]


def test_export_knows_a_clients_architecture(finished: Finished, tmp_path: Path) -> None:
    run, out = opened(finished("fedme")), tmp_path / "m.safetensors"
    command("export", run.storage.uri, "--client", "0", "--out", str(out))
    number = CommittedModels(run).server["architectures"]["0"]
    with safetensors.safe_open(out, "pt") as file:
        told = json.loads(file.metadata()["rayfl"])
        shape = tuple(file.get_tensor("hidden.0.weight").shape)
    assert told["model"]["hidden"] == [[12], [8, 8]][number]
    assert shape == ([12, 8][number], 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--client", "5", "--out", "m.safetensors"], "numbered 0 to 4"),
        (["--client", "0", "--out", "m.pt"], "must end in .safetensors"),
        (["--client", "0", "--out", "m.safetensors", "--model", "hpm"], "there are global, lambda=0.0"),
        (["--client", "0", "--out", "m.safetensors", "--round", "7"], "kept are those of rounds: 1, 2, 3"),
    ],
)
def test_what_cannot_be_exported(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RayflError, match=message):
        CliRunner().invoke(app, ["export", str(finished("superfed-mm")), *options], catch_exceptions=False)
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_several_is_not_exported(tmp_path: Path) -> None:
    mixed = {"name": "apfl", "mix": "logits"}
    rayfl.run(small_experiment(tmp_path, "mixed", "apfl", backend="inline"), algorithm=mixed, train__rounds=1)
    with pytest.raises(ConfigError, match="2 models together"):
        command("export", str(tmp_path / "mixed"), "--client", "0", "--out", str(tmp_path / "m.safetensors"))


def test_clients(superfed: RunFolder) -> None:
    rows, name, round = listed_clients(superfed, "lambda=0.5", "test", None)
    assert (name, round, [row["client"] for row in rows]) == ("lambda=0.5", 3, [0, 1, 2, 3, 4])
    cohorts = [superfed.parts.cohort(t) for t in range(3)]
    for row in rows:
        took = [t + 1 for t, cohort in enumerate(cohorts) if row["client"] in cohort]
        assert (row["selected"], row["last"], row["skipped"]) == (len(took), max(took, default=0), 0)
        assert (row["down"] > 0) == bool(took)
    total = superfed.rounds.to_pylist()[-1]
    assert sum(row["up"] for row in rows) == total["bytes_up"]


def test_clients_held_out_have_the_member_of_a_sweep_that_was_chosen_for_them(tmp_path: Path) -> None:
    options = {"evaluation.unseen_clients": 0.4, "train.rounds": 3, "evaluation.every": 1}
    rayfl.run(small_experiment(tmp_path, "held", "superfed-mm", backend="inline"), **options)
    run = opened(tmp_path / "held")
    chosen = {
        row["cohort"]: row
        for row in run.rounds.to_pylist()
        if (row["round"], row["split"], row["phase"], row["selected_on"]) == (3, "test", "received", "validation")
    }
    assert chosen["all"]["choice"] != chosen["unseen"]["choice"]
    cohorts: tuple[Cohort, ...] = ("all", "unseen")
    for cohort in cohorts:
        rows, name, _ = listed_clients(run, None, "test", None, cohort)
        assert name == chosen[cohort]["choice"]
        assert np.mean([row["top1"] for row in rows]) == pytest.approx(chosen[cohort]["top1"])
    last = rows[-1]
    out = tmp_path / "model.safetensors"
    command("export", str(run.uri), "--client", str(last["client"]), "--out", str(out))
    with safetensors.safe_open(out, "pt") as file:
        told = json.loads(file.metadata()["rayfl"])
    assert (told["row"], told["metrics"]["test"]["top1"]) == (name, last["top1"])


def test_clients_are_filtered_sorted_and_written_as_csv(superfed: RunFolder) -> None:
    rows, *_ = listed_clients(superfed, "personalized", "test", None)
    middle = sorted(row["loss"] for row in rows)[2]
    text = command(
        "clients", superfed.storage.uri, "--csv", "--sort", "loss", "--descending", "--filter", f"loss>={middle!r}",
        "--filter", "client!=0",
    )  # fmt: skip
    found = list(csv.DictReader(io.StringIO(text)))
    expected = [row for row in rows if row["loss"] >= middle and row["client"] != 0]
    assert [int(row["client"]) for row in found] == [r["client"] for r in sorted(expected, key=lambda r: -r["loss"])]
    assert tuple(found[0]) == COLUMNS
    assert "3 of 5 clients" in command("clients", superfed.storage.uri, "--limit", "3")
    assert chosen_rows(rows, ["name=4"], None, False, None) == [rows[4]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sort": "accuracy"}, "there is no column 'accuracy'"),
        ({"conditions": ["top1"]}, "must look like top1<0.5"),
        ({"conditions": ["top1<high"]}, "a number on its right side"),
        ({"conditions": ["size<3"]}, "there is no column 'size'"),
    ],
)
def test_conditions_that_cannot_be_read(superfed: RunFolder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen_rows([], **({"conditions": [], "sort": None, "descending": False, "limit": None} | options))


def test_clients_that_were_not_evaluated(superfed: RunFolder) -> None:
    for arguments, message in (
        (("hpm", "test", None), "there are: global, lambda=0.0"),
        (("global", "train", None), "on the split train"),
        (("global", "test", 9), "after rounds 1, 2, 3, not after 9"),
    ):
        with pytest.raises(RunError, match=message):
            listed_clients(superfed, *arguments)


def test_diff(finished: Finished, superfed: RunFolder) -> None:
    first, second = superfed.content, opened(finished("fedavg")).content
    found = {path: values for path, *values in differences(first, second)}
    assert found["algorithm.name"] == ["superfed", "fedavg"]
    assert found["algorithm.mode"] == ["mm", "-"]
    assert found["algorithm.finetune_epochs"] == ["-", 1]
    assert "train.lr" not in found
    text = command("diff", superfed.storage.uri, str(finished("superfed-mm") / "config.yaml"))
    assert "0 differences; the same results are to be expected" in text
    text = command("diff", "quickstart", superfed.storage.uri, status=1)
    assert "train.rounds" in text and "other results" in text
    with pytest.raises(ConfigError, match="diff takes no overrides"):
        command("diff", "quickstart", "train.rounds=3")


def test_diff_of_a_configuration_with_itself_is_empty() -> None:
    config, other = (
        load_config(Experiment, "quickstart", overrides).model_dump(mode="json")
        for overrides in ([], ["seed=1", "cluster.backend=inline"])
    )
    assert differences(config, config) == []
    assert [path for path, *_ in differences(config, other)] == ["seed", "cluster.backend"]


def test_folders_that_are_no_runs(tmp_path: Path, superfed: RunFolder) -> None:
    with pytest.raises(RunError, match=r"has no config\.yaml"):
        opened(tmp_path)
    (tmp_path / "config.yaml").write_text("[]")
    with pytest.raises(RunError, match="it has no sections"):
        opened(tmp_path)
    path = Path(shutil.copytree(superfed.storage.uri, tmp_path / "run"))
    (path / "clients.parquet").write_bytes(b"nothing")
    with pytest.raises(DamageError, match=r"clients\.parquet .* is damaged"):
        command("clients", str(path))
    (path / "clients.parquet").unlink()
    with pytest.raises(RunError, match="has not been committed yet"):
        command("clients", str(path))


def test_a_run_on_other_data_is_refused(superfed: RunFolder, tmp_path: Path) -> None:
    path = Path(shutil.copytree(superfed.storage.uri, tmp_path / "run"))
    text = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(text.replace("num_clients: 5", "num_clients: 6"))
    with pytest.raises(RunError, match="was made on other data"):
        CommittedModels(opened(path))
