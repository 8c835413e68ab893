"""FLwF-2T: rounds in plain PyTorch, what it is without stages and teachers, what clients keep, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.flwf import FLwF
from rayfl.data.partitions.arriving import SampleStages
from rayfl.data.partitions.stage import NoStages
from rayfl.errors import ConfigError
from rayfl.params import Tree, num_bytes
from tests.support.partial_toys import initial, three_layers
from tests.support.staged_toys import COHORTS, cross_entropy, descended, logits_of, samples_of, staged_toy, summed
from tests.support.toy_networks import two_layers
from tests.support.toys import assert_close, assert_equal

SETTINGS: dict[str, dict[str, Any]] = {
    "both": {"classification_weight": 0.5, "client_weight": 0.2},
    "client": {"teachers": "client", "temperature": 3.0},
    "server": {"teachers": "server", "temperature": 1.0, "aggregation": "uniform"},
    "separate": {"outputs": "separate", "client_weight": 0.6},
    "separate-client": {"outputs": "separate", "teachers": "client", "classification_weight": 0.7},
}


def taught(
    model: Tree, x: Tensor, y: Tensor, method: FLwF, teachers: list[tuple[float, Tree]], earlier: list[int], memory: Any
) -> Tensor:
    """The loss under weighted teachers, with PyTorch's own divergence of the columns that count."""
    z, tau = logits_of(model, x), method.temperature
    compared = earlier if method.outputs == "separate" else [0, 1, 2]
    if method.outputs == "separate" and memory != "all":
        others = [label for label in range(3) if label not in earlier]
        found = F.cross_entropy(z[:, others], torch.tensor([others.index(int(label)) for label in y]))
    else:
        found = F.cross_entropy(z, y)
    found = method.classification_weight * found
    for weight, teacher in teachers:
        wanted = F.softmax(logits_of(teacher, x)[:, compared] / tau, 1)
        found = found + weight * F.kl_div(F.log_softmax(z[:, compared] / tau, 1), wanted, reduction="batchmean")
    return found


@pytest.mark.parametrize(("name", "memory"), [*((name, 0) for name in SETTINGS), ("both", "all"), ("separate", "all")])
def test_inv_flwf_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str, memory: Any) -> None:
    method = FLwF(**SETTINGS[name])
    toy = staged_toy(method, memory)
    model, alpha = initial(toy), method.classification_weight
    last: dict[int, tuple[int, Tree]] = {}
    past: dict[int, Tree] = {}
    had: dict[int, set[int]] = {k: set() for k in range(4)}
    for round, cohort in enumerate(COHORTS):
        stage, mean, total = round // 2, {key: torch.zeros_like(leaf) for key, leaf in model.items()}, 0
        for k in cohort:
            samples = samples_of(k, stage, memory)
            if k in last and last[k][0] < stage:
                past[k] = last[k][1]
            earlier = sorted(had[k] - {stage})
            weights: list[tuple[float, Tree]] = []
            if stage and method.teachers != "server" and k in past:
                weights.append((method.client_weight if method.teachers == "both" else 1 - alpha, past[k]))
            if stage and method.teachers != "client":
                weights.append((1 - alpha - sum(weight for weight, _ in weights), model))
            if method.outputs == "separate" and not earlier:
                weights = []

            def value(at: Tree, x: Tensor, y: Tensor, weights: Any = weights, earlier: Any = earlier) -> Tensor:
                return taught(at, x, y, method, weights, earlier, memory) if weights else cross_entropy(at, x, y)

            trained = descended(toy, round, k, model, samples, value)
            last[k] = (stage, trained)
            had[k] |= set(samples[1].tolist())
            weight = 1 if method.aggregation == "uniform" else len(samples[1])
            mean, total = summed(mean, trained, weight), total + weight
        model = {key: leaf / total for key, leaf in mean.items()}
        assert_close(toy.step(cohort)["model"], model, 1e-12)


@pytest.mark.parametrize("teachers", ["both", "client", "server"])
def test_inv_flwf_2_in_the_first_stage_it_is_federated_averaging_to_the_bit(teachers: Any) -> None:
    stages = SampleStages(count=2, rounds=4)
    ours, theirs = (
        staged_toy(method, task=three_layers(), stages=stages) for method in (FLwF(teachers=teachers), FedAvg())
    )
    for round, cohort in enumerate(COHORTS):
        assert torch.equal(ours.step(cohort)["model"]["head.bias"], theirs.step(cohort)["model"]["head.bias"]) == (
            round < 4
        )


@pytest.mark.parametrize("outputs", ["all", "separate"])
def test_inv_flwf_3_without_stages_it_is_federated_averaging_and_keeps_nothing(outputs: Any) -> None:
    method = FLwF(outputs=outputs, classification_weight=0.1)
    ours, theirs = (staged_toy(one, task=three_layers(), stages=NoStages()) for one in (method, FedAvg()))
    for cohort in COHORTS:
        assert_equal(ours.step(cohort), theirs.step(cohort))
    assert not any(ours.states().values())


@pytest.mark.parametrize("outputs", ["all", "separate"])
def test_inv_flwf_4_of_alpha_1_it_is_federated_averaging_to_the_bit(outputs: Any) -> None:
    ours = staged_toy(FLwF(classification_weight=1, client_weight=0, outputs=outputs), task=three_layers())
    theirs = staged_toy(FedAvg(), task=three_layers())
    for cohort in COHORTS:
        assert_equal(ours.step(cohort)["model"], theirs.step(cohort)["model"])


def test_inv_flwf_5_both_teachers_of_a_client_alone_are_one_as_a_stage_begins() -> None:
    found = [staged_toy(FLwF(client_weight=weight)) for weight in (0.1, 0.5)]
    for round in range(4):
        one, other = (toy.step([1])["model"] for toy in found)
        if round < 3:
            assert_close(one, other, 1e-12)
        else:
            assert (one["head.weight"] - other["head.weight"]).abs().max() > 1e-6


def test_inv_flwf_6_the_teacher_is_the_model_of_the_last_round_before_the_stage() -> None:
    toy = staged_toy(FLwF())
    last: dict[int, Tree] = {}
    before: dict[int, Tree] = {}
    for round, cohort in enumerate(COHORTS):
        toy.step(cohort)
        for k in cohort:
            state = toy.states()[k]
            if k in last and last[k]["stage"] < round // 2:
                before[k] = last[k]["trained"]
            last[k] = {"stage": state["stage"], "trained": state["last"]}
            assert state["stage"] == round // 2 and ("past" in state) == (k in before)
            if k in before:
                assert_equal(state["past"], before[k])
    assert toy.states()[3]["present"].tolist() == [False, False, True]
    assert toy.states()[3]["earlier"].tolist() == [False, True, False]


def test_only_the_model_travels_and_the_servers_teacher_needs_no_other() -> None:
    for teachers in ("both", "server"):
        toy = staged_toy(FLwF(teachers=teachers))
        size = num_bytes(initial(toy))
        for cohort in COHORTS:
            toy.step(cohort)
            assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))
        assert all(("last" in state) == (teachers == "both") for state in toy.states().values())


@pytest.mark.parametrize("options", [{}, {"outputs": "separate"}, {"teachers": "client"}])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_vectorized_agrees_with_looped(make: Any, options: Any, caplog: pytest.LogCaptureFixture) -> None:
    looped, stacked = (staged_toy(FLwF(**options), task=make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort)["model"], stacked.step(cohort)["model"], 1e-8)
    assert "failed together" not in caplog.text


def test_what_is_refused_and_what_is_idle() -> None:
    toy = staged_toy(FedAvg())
    with pytest.raises(ConfigError, match=r"classification_weight=0.8 .* lower one of the two"):
        FLwF(classification_weight=0.8).check(toy.task, toy.context)
    FLwF(classification_weight=0.8, teachers="client").check(toy.task, toy.context)
    idle = FLwF(classification_weight=1, client_weight=0, temperature=3.0, outputs="separate").idle_settings()
    assert len(idle) == 2
    assert len(FLwF(teachers="server", client_weight=0.1).idle_settings()) == 1
