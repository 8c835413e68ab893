"""FedEMA: target networks that follow, and mixtures by divergence; what FedU shares with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rayfl
from algorithms.fedavg import FedAvg
from algorithms.fedema import FedEMA
from algorithms.fedu import FedU
from algorithms.parts.targets import predictor_names
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.params import Tree
from rayfl.tasks.base import Batch
from rayfl.tasks.self_supervised import ObjectiveName, SelfSupervised
from tests.support.siamese import TRAIN, learned, sections, starts, toy
from tests.support.toys import assert_close, assert_equal


def test_inv_fedema_1_the_target_network_follows_after_each_step() -> None:
    """BYOL step by step: the loss has the target network of the step before, which then moves to the new weights."""
    train = TRAIN.model_copy(update={"momentum": 0.0, "batch_size": 5, "rounds": 1})
    run = toy(FedEMA(target_momentum=0.6), train=train)
    task, start = run.task, run.server["model"]
    seen: list[Batch] = []
    original = SelfSupervised.loss_towards

    def recorded(self: SelfSupervised, outputs: Tensor, target: Tensor, batch: Batch) -> Tensor:
        seen.append(batch)
        return original(self, outputs, target, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelfSupervised, "loss_towards", recorded)
        run.step([1])
    online, target = ({name: leaf.clone() for name, leaf in start.items()} for _ in range(2))
    assert len(seen) == 3
    for batch in seen:
        moving = {name: leaf.clone().requires_grad_() for name, leaf in online.items()}
        with torch.no_grad():
            aimed = task.logits(target, batch)
        loss = task.loss_towards(task.logits(moving, batch), aimed, batch)
        slopes = torch.autograd.grad(loss, list(moving.values()))
        online = {n: leaf - 0.1 * s for (n, leaf), s in zip(online.items(), slopes, strict=True)}
        target = {name: 0.6 * target[name] + 0.4 * online[name] for name in target}
    state = run.states()[1]
    assert_close(state["online"], online, atol=1e-6)
    assert_close(state["target"], target, atol=1e-6)


@pytest.mark.parametrize("objective", ["byol", "simsiam", "simclr"])
def test_inv_fedema_2_a_mixture_by_divergence_whose_first_mu_is_tau(
    objective: ObjectiveName, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = starts(monkeypatch)
    task = learned(objective)
    run = toy(FedEMA(scale_target=0.6), task)
    first = run.server["model"]
    run.step([0, 1])
    own, received = run.states()[0]["online"], run.server["model"]
    assert "divergence" not in run.states()[0]
    run.step([0, 2])
    assert_close(started[0], {name: 0.4 * received[name] + 0.6 * own[name] for name in own}, atol=1e-6)
    assert_equal(started[2], received)
    assert not all(torch.equal(first[name], received[name]) for name in first)
    names = [name for name in task.network.parameter_names if name not in predictor_names(task.network)]

    def distance(one: Tree, other: Tree) -> float:
        return float(sum((one[name] - other[name]).square().sum() for name in names) ** 0.5)

    scale = 0.6 / distance(received, own)
    assert float(run.states()[0]["divergence"]) == pytest.approx(0.6 / scale, rel=1e-5)
    own, received = run.states()[0]["online"], run.server["model"]
    run.step([0])
    mu = min(scale * distance(received, own), 1)
    assert_close(started[0], {name: (1 - mu) * received[name] + mu * own[name] for name in own}, atol=1e-6)


@pytest.mark.parametrize(("scale", "like"), [(0.0, "global"), (1e9, "local")])
def test_inv_fedema_3_scale_0_is_federated_averaging_and_a_large_one_training_alone(
    scale: float, like: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = starts(monkeypatch)
    task = learned("simsiam", "batch")
    run, averaging = toy(FedEMA(scale=scale), task), toy(FedAvg(), task)
    for _ in range(2):
        run.step([0, 1, 2])
        averaging.step([0, 1, 2])
    if like == "global":
        assert_equal(run.server["model"], averaging.server["model"])
        return
    own = run.states()[1]["online"]
    run.step([0, 1, 2])
    assert_equal(started[1], own)


@pytest.mark.parametrize("method", [FedEMA(), FedU()])
@pytest.mark.parametrize(("objective", "norm"), [("byol", "none"), ("byol", "batch"), ("simsiam", "none")])
def test_looped_and_stacked_are_the_same_and_clients_that_wait_keep_what_they_have(
    method: Any, objective: ObjectiveName, norm: str
) -> None:
    runs = [toy(method, learned(objective, norm), mode=mode) for mode in ("looped", "vectorized")]
    for cohort in ([0, 1], [1, 2], [0, 1, 2]):
        before = [{k: state for k, state in run.states().items() if k not in cohort} for run in runs]
        for run, kept in zip(runs, before, strict=True):
            run.step(cohort)
            now = run.states()
            for client, state in kept.items():
                assert_equal(now[client], state)
    assert_close(runs[0].server["model"], runs[1].server["model"], atol=1e-4)


@pytest.mark.parametrize(
    ("method", "task", "train", "words"),
    [
        ("fedu", {"objective": "simclr"}, {}, "fedu decides about predictors, and task.objective=simclr has none"),
        ("fedema", {"objective": "byol"}, {"max_grad_norm": 1.0}, "task.objective=byol adds up over its local steps"),
    ],
)
def test_what_cannot_be_had_is_refused(method: str, task: Any, train: Any, words: str) -> None:
    content = sections(method, task, train)
    with pytest.raises(ConfigError, match=words):
        Parts(load_config(Experiment, content, {})).check()


@pytest.mark.parametrize("method", ["fedema", pytest.param("fedu", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_byol_runs_and_goes_on_to_the_bit(method: str, tmp_path: Path) -> None:
    content = sections(method, {"objective": "byol"}, {"rounds": 4})
    whole = rayfl.run(content, storage_path=str(tmp_path), name="whole")
    half = {**content, "train": {**content["train"], "rounds": 2}}
    rayfl.run(half, storage_path=str(tmp_path), name="parts")
    parts = rayfl.run(str(tmp_path / "parts"), **{"train.rounds": 4})
    rows = [run.clients.filter(run.clients["round"].to_numpy() == 4).to_pylist() for run in (whole, parts)]
    assert rows[0] and rows[0] == rows[1]
