"""FedEWC: rounds in plain PyTorch, what it is without stages and in the first, what clients keep, quadratic terms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedewc import FedEWC
from rayfl.data.partitions.arriving import SampleStages
from rayfl.data.partitions.stage import NoStages
from rayfl.params import Tree, num_bytes
from tests.support.partial_toys import TRAIN, initial, three_layers
from tests.support.staged_toys import COHORTS, cross_entropy, descended, fisher_of, samples_of, staged_toy, summed
from tests.support.toy_networks import two_layers
from tests.support.toys import assert_close, assert_equal

SETTINGS: dict[str, dict[str, Any]] = {
    "limited": {"consolidation_weight": 20.0, "fisher_limit": 0.02},
    "decayed": {"consolidation_weight": 3.0, "decay": 0.4, "fisher_limit": None},
    "received": {"consolidation_weight": 3.0, "anchor": "received", "fisher_limit": None, "aggregation": "uniform"},
    "last": {"consolidation_weight": 3.0, "decay": 0.0},
}


@pytest.mark.parametrize(("name", "memory"), [*((name, 0) for name in SETTINGS), ("decayed", "all")])
def test_inv_ewc_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str, memory: Any) -> None:
    method = FedEWC(**SETTINGS[name])
    toy = staged_toy(method, memory)
    model = initial(toy)
    last: dict[int, tuple[int, Tree, Tree]] = {}
    held: dict[int, tuple[Tree, Tree]] = {}
    for round, cohort in enumerate(COHORTS):
        stage, mean, total = round // 2, {key: torch.zeros_like(leaf) for key, leaf in model.items()}, 0
        for k in cohort:
            samples = samples_of(k, stage, memory)
            if k in last and last[k][0] < stage:
                _, fisher, there = last.pop(k)
                if k in held:
                    fisher = summed(fisher, held[k][0], method.decay)
                held[k] = (fisher, model if method.anchor == "received" else there)

            term = held.get(k)

            def value(at: Tree, x: Tensor, y: Tensor, term: Any = term) -> Tensor:
                found = cross_entropy(at, x, y)
                for key, leaf in at.items() if term else ():
                    apart = term[0][key] * (leaf - term[1][key]) ** 2
                    found = found + method.consolidation_weight / 2 * apart.sum()
                return found

            trained = descended(toy, round, k, model, samples, value)
            fisher = fisher_of(trained, samples)
            if method.fisher_limit is not None:
                fisher = {key: leaf.clamp(max=method.fisher_limit) for key, leaf in fisher.items()}
            last[k] = (stage, fisher, trained)
            weight = 1 if method.aggregation == "uniform" else len(samples[1])
            mean, total = summed(mean, trained, weight), total + weight
        model = {key: leaf / total for key, leaf in mean.items()}
        assert_close(toy.step(cohort)["model"], model, 1e-12)


def test_inv_ewc_2_in_the_first_stage_it_is_federated_averaging_to_the_bit() -> None:
    stages = SampleStages(count=2, rounds=4)
    ours, theirs = (staged_toy(method, task=three_layers(), stages=stages) for method in (FedEWC(), FedAvg()))
    for round, cohort in enumerate(COHORTS):
        assert torch.equal(ours.step(cohort)["model"]["head.bias"], theirs.step(cohort)["model"]["head.bias"]) == (
            round < 4
        )


@pytest.mark.parametrize("changed", [{"stages": NoStages()}, {}])
def test_inv_ewc_3_without_stages_or_weight_it_is_federated_averaging_and_keeps_nothing(changed: Any) -> None:
    method = FedEWC(consolidation_weight=50.0 if changed else 0.0)
    ours, theirs = (staged_toy(one, task=three_layers(), **changed) for one in (method, FedAvg()))
    for cohort in COHORTS:
        assert_equal(ours.step(cohort), theirs.step(cohort))
    assert not any(ours.states().values())


@pytest.mark.parametrize("anchor", ["trained", "received"])
def test_inv_ewc_4_a_single_step_from_the_anchor_is_a_plain_one(anchor: Any) -> None:
    """A client alone receives what it has trained."""
    train = TRAIN.model_copy(update={"local_epochs": 1, "batch_size": 12})
    methods = (FedEWC(consolidation_weight=1e4, fisher_limit=1e-3, anchor=anchor), FedAvg())
    ours, theirs = (staged_toy(method, train=train) for method in methods)
    for round in range(4):
        found, plain = (toy.step([1])["model"] for toy in (ours, theirs))
        if round < 3:
            assert_equal(found, plain)
        else:
            assert (found["head.weight"] - plain["head.weight"]).abs().max() > 1e-4


def test_inv_ewc_5_fisher_information_of_stages_adds_up_and_decays() -> None:
    toys = {decay: staged_toy(FedEWC(decay=decay, consolidation_weight=1e-12)) for decay in (0.0, 0.5, 1.0)}
    for round in range(6):
        for toy in toys.values():
            toy.step([1])
        if round == 3:
            # of one stage; that of the second was found last
            first = {decay: toy.states()[1]["held"]["fisher"] for decay, toy in toys.items()}
            second = {decay: toy.states()[1]["last"]["fisher"] for decay, toy in toys.items()}
    for decay, toy in toys.items():
        held = toy.states()[1]["held"]["fisher"]
        assert_close(held, {key: decay * leaf + second[decay][key] for key, leaf in first[decay].items()}, 1e-12)
        assert max(float(leaf.max()) for leaf in held.values()) <= 0.01 * (1 + decay)


def test_inv_ewc_6_clients_keep_what_the_next_stage_needs() -> None:
    toy = staged_toy(FedEWC())
    keys = []
    for _ in range(6):
        toy.step([1])
        keys.append(set(toy.states()[1]))
    first, later = {"stage", "last"}, {"stage", "last", "held"}
    assert keys == [first, first, later, later, {"held"}, {"held"}]


def test_only_the_model_travels() -> None:
    toy = staged_toy(FedEWC())
    size = num_bytes(initial(toy))
    for cohort in COHORTS:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))


@pytest.mark.parametrize("form", ["samples", "batches"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_vectorized_agrees_with_looped(make: Any, form: Any, caplog: pytest.LogCaptureFixture) -> None:
    method = FedEWC(fisher_form=form)
    looped, stacked = (staged_toy(method, task=make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort)["model"], stacked.step(cohort)["model"], 1e-8)
    assert "failed together" not in caplog.text


def test_what_is_idle() -> None:
    idle = FedEWC(consolidation_weight=0, decay=0.5, fisher_limit=None, anchor="received", fisher_form="batches")
    assert len(idle.idle_settings()) == 3
