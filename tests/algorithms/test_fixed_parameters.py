"""With part of the model fixed, every method does what it does on data that went through that part before."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from rayfl.cli.entry import app
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.models.base import Network
from rayfl.params import num_bytes
from rayfl.tasks.classification import Classification
from tests.support.cases import CASES_OF_KINDS, toy_of
from tests.support.cases.base import SIZES, Case
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment
from tests.support.own_models import Frozen
from tests.support.toy_networks import TwoLayers
from tests.support.toys import ListDataset, assert_close, assert_equal, random_clients

torch.set_num_threads(1)

SCALE = torch.tensor([0.5, -2.0, 1.5, 3.0, -0.25])


class Scaled(TwoLayers):
    """Inputs times numbers that require no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(SCALE.clone(), requires_grad=False)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x * self.scale)


CUT = {"heterofl", "fedrolex", "fjord", "depthfl", "fedmlb", "inclusivefl", "scalefl"}


def clients_of(case: Case, factor: Tensor) -> ListDataset:
    drawn = random_clients(SIZES, dtype=torch.float32, public=6 if case.public else 0)
    parts = [drawn.load(client)["train"] for client in range(len(SIZES))]
    return ListDataset([(part.x * factor, part.y) for part in parts], public=drawn.load_public() * factor)


@pytest.mark.two_cases
@pytest.mark.parametrize("mode", [pytest.param("looped", marks=pytest.mark.slow), "vectorized"])
@CASES_OF_KINDS
def test_as_if_the_data_had_been_transformed_before(case: Case, mode: str) -> None:
    """To the bit: what is trained, sent, averaged, kept and scored, and how many bytes travel.

    Where a mini-batch is cut into parts, these lie at other addresses in memory, and sums are in another order; a
    quotient of differences magnifies that. Where inputs are mixed, the same is so of products.
    """
    close = ("per_fedavg", "fedcorr")
    same = partial(assert_close, atol=1e-3) if case.algorithm.name in close else assert_equal
    if getattr(case.algorithm, "gate_input", "") == "raw":
        pytest.skip("its gate reads the inputs as they are")
    if case.algorithm.name in CUT:
        pytest.skip("it cuts networks, and refuses numbers of which it does not know whose they are")
    if case.algorithm.name in ("pacfl", "fedfed", "fedpub", "target", "dense", "fat", "gear", "calfat"):
        pytest.skip("its signatures, autoencoder, or random, made or attacked inputs are of the inputs as they are")
    inside = toy_of(case, double=False, dataset=clients_of(case, torch.ones(5)), mode=mode, task=task_of(Scaled))
    before = toy_of(case, double=False, dataset=clients_of(case, SCALE), mode=mode, task=task_of(TwoLayers))
    for _ in case.cohorts():
        same(inside.step(), before.step())
        assert inside.federation.traffic.by_client == before.federation.traffic.by_client
        same(inside.states(), before.states())
    found, expected = inside.scores(final=True), before.scores(final=True)
    for client, rows in expected.items():
        assert found[client].keys() == rows.keys()
        for row, statistics in rows.items():
            same(torch.from_numpy(found[client][row].vector), torch.from_numpy(statistics.vector))


def task_of(model: type[TwoLayers]) -> Classification:
    return Classification(Network(model))


FROZEN = {"name": "tests.support.own_models:Frozen"}
SAMPLE = [
    *("superfed-mm", "fedper"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("fedavg", "ditto", "superfed-lm", "floco", "fedbabu", "scaffold", "l2gd")
    ),
]


def settings(folder: Path, name: str, method: str, **cluster: Any) -> dict[str, Any]:
    return {**small_experiment(folder, name, method, **cluster), "model": FROZEN}


@pytest.mark.parametrize("method", SAMPLE)
@pytest.mark.first_case
def test_runs_continue_replay_and_export(method: str, tmp_path: Path) -> None:
    keep = {"storage.keep_commits": 9, "evaluation.every": 1}
    rayfl.run(settings(tmp_path, "whole", method, backend="inline"), **keep)
    pieces = settings(tmp_path, "pieces", method, backend="inline")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(pieces, callbacks=[Interrupt(2)], **keep)
    rayfl.run(pieces, **keep)
    whole = outcome(tmp_path / "whole")
    assert_same(whole, outcome(tmp_path / "pieces"))
    assert not any("project" in path for path in _paths({"server": whole.server, "states": whole.states}))

    client = _participant(tmp_path / "whole", 3)
    replayed = CliRunner().invoke(app, ["replay", str(tmp_path / "whole"), "--round", "3", "--client", str(client)])
    assert replayed.exit_code == 0, replayed.output

    file = tmp_path / "model.safetensors"
    export = ["export", str(tmp_path / "whole"), "--client", str(client), "--out", str(file)]
    assert "--trust" in str(CliRunner().invoke(app, export).exception)
    made = CliRunner().invoke(app, [*export, "--trust"])
    assert made.exit_code == 0, made.output
    parts = Parts(load_config(Experiment, tmp_path / "whole" / "config.yaml", []))
    module = Frozen(parts.dataset.spec)
    module.load_state_dict(safetensors.torch.load_file(file))
    test = parts.dataset.load(client)["test"]
    accuracy = float((module(test.x).argmax(1) == test.y).float().mean())
    rows = whole.clients.filter(
        (whole.clients["client"].to_numpy() == client)
        & (whole.clients["round"].to_numpy() == 4)
        & (whole.clients["split"].to_numpy(zero_copy_only=False) == "test")
    ).to_pylist()
    assert accuracy in [pytest.approx(row["top1"]) for row in rows]


def test_clients_with_different_architectures(tmp_path: Path) -> None:
    """FedMe: two candidates of each of which another part is fixed."""
    models = {"candidates": [FROZEN, {"name": "tests.support.own_models:probed"}]}
    whole, pieces = (
        {**small_experiment(tmp_path, name, "fedme", backend="inline"), "model": models} for name in ("whole", "pieces")
    )
    rayfl.run(whole)
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(pieces, callbacks=[Interrupt(2)])
    rayfl.run(pieces)
    found = outcome(tmp_path / "whole")
    assert_same(found, outcome(tmp_path / "pieces"))
    kept = {path.rpartition("/")[2] for path in _paths({"server": found.server, "states": found.states})}
    assert "head.weight" in kept
    assert not any(name.startswith("project") for name in kept)


@pytest.mark.slow
def test_actors_and_this_process_have_the_same(tmp_path: Path) -> None:
    """A random layer is drawn in every process, and must be one."""
    for backend in ("inline", "ray"):
        cluster = {"backend": backend, **({"num_actors": 2} if backend == "ray" else {})}
        rayfl.run(settings(tmp_path, backend, "fedavg", **cluster))
    assert_same(outcome(tmp_path / "inline"), outcome(tmp_path / "ray"))


def test_traffic_counts_what_is_trained(tmp_path: Path) -> None:
    result = rayfl.run(settings(tmp_path, "run", "fedavg", backend="inline"))
    network = Parts(load_config(Experiment, tmp_path / "run" / "config.yaml", [])).task.network
    model = num_bytes(network.initialize(0))
    assert model == 4 * (16 * 8 + 8 + 8 * 10 + 10)
    sent = result.rounds.filter(result.rounds["round"].to_numpy() == 2).column("bytes_up").to_pylist()
    assert set(sent) == {2 * 3 * model}


HEAD_NEEDED = {
    "depthfl",
    "inclusivefl",
    "scalefl",
    "creff",
    "fedah",
    "ccvr",
    "fedpft",
    "fedgen",
    "fedgh",
    "floco",
    "floco_plus",
    "fedgc",
    "fedpac",
    "pfedvem",
    "pfedsim",
    "fedper",
    "lg_fedavg",
    "pfl_da",
    "fedrap",
    "gpfedrec",
    "fedrep",
    "fedrecon",
    "fedbabu",
    "fedrod",
    "fedloge",
    "fedthe",
    "feddbe",
    "gpfl",
    "fedcp",
    "fedas",
    "pfedfda",
    "flute",
    "fedmrl",
    "fedsr",
    "fedhkd",
    "turbosvm",
    "kafe",
    "fedcr",
    "fediir",
}


MORE_NEEDED = {"fedap", "pfedpara"} | CUT - {"depthfl", "fedmlb", "inclusivefl"}
"""Batch normalization, factors, or that all layers are trained."""

BODY_NEEDED = {
    "fedweit",
    "fedloge",
    "fedah",
    "fedper",
    "lg_fedavg",
    "pfl_da",
    "fedrap",
    "gpfedrec",
    "fedrep",
    "fedrecon",
    "fedbabu",
    "fedetf",
    "fednh",
    "fedaws",
    "fedgc",
    "fedpac",
    "pfedvem",
    "fedpcl",
    "fedhp",
    "gpfl",
    "fedcp",
    "fedas",
    "pfedfda",
    "pfedgp",
    "flute",
    "fedcr",
}


@CASES_OF_KINDS
@pytest.mark.parametrize(
    ("frozen", "refused", "named"),
    [
        (("head",), HEAD_NEEDED | MORE_NEEDED, r"head|batch normalization|factors"),
        (
            ("project", "inner"),
            BODY_NEEDED | MORE_NEEDED,
            r"no body is left|no layer|trains none|batch normalization|cut by width|factors",
        ),
    ],
    ids=["head", "probe"],
)
def test_what_is_left_to_train_is_enough_or_refused(
    case: Case, frozen: tuple[str, ...], refused: set[str], named: str
) -> None:
    spec = random_clients(SIZES).spec
    task = Classification(Network(lambda: Frozen(spec, frozen)))
    dataset = random_clients(SIZES, dtype=torch.float32, public=6 if case.public else 0)
    if case.algorithm.name in refused or getattr(case.algorithm, "private_head", False):
        with pytest.raises(ConfigError, match=named):
            case.algorithm.check(task, toy_of(case, double=False, dataset=dataset).context)
        return
    toy = toy_of(case, double=False, dataset=dataset, task=task)
    case.algorithm.check(task, toy.context)
    toy.run()
    for rows in toy.scores(final=True).values():
        assert all(statistics.n for statistics in rows.values())


def _paths(tree: Any, prefix: str = "") -> list[str]:
    if not isinstance(tree, dict):
        return [prefix]
    return [path for key, value in tree.items() for path in _paths(value, f"{prefix}/{key}")]


def _participant(folder: Path, round: int) -> int:
    """A client of the round's cohort."""
    parts = Parts(load_config(Experiment, folder / "config.yaml", []))
    return parts.cohort(round - 1)[0]
