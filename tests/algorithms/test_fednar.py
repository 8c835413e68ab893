"""FedNAR: rounds in plain PyTorch, limits that are federated averaging, how far a step goes, the section train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.fednar import FedNAR
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, squared_norm, subtract
from tests.support.partial_toys import COHORTS, SIZES, TRAIN, initial, three_layers, toy_of
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, assert_close, assert_equal

SETTINGS: dict[str, dict[str, Any]] = {
    "clipped": {"weight_decay": 0.5, "max_norm": 0.3},
    "annealed": {"weight_decay": 0.8, "annealing": 0.5, "max_norm": 1.5, "aggregation": "uniform"},
}
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_nar_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = FedNAR(**SETTINGS[name])
    toy = toy_of(method, task=two_layers())
    model = initial(toy)
    lengths = []
    for round, cohort in enumerate(COHORTS):
        sizes = {k: 1 if method.aggregation == "uniform" else SIZES[k] for k in cohort}
        mean: Tree = {key: torch.zeros_like(leaf) for key, leaf in model.items()}
        for k in cohort:
            part = toy.dataset.load(k)["train"]
            leaves = {key: leaf.clone().requires_grad_() for key, leaf in model.items()}
            optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5)
            generator = toy.context.streams.generator("batches", round, k)
            for index in plan_batches(SIZES[k], 4, 2 * -(-SIZES[k] // 4), generator).batches(CPU):
                optimizer.zero_grad()
                hidden = torch.relu(part.x[index] @ leaves["inner.weight"].T + leaves["inner.bias"])
                loss = F.cross_entropy(hidden @ leaves["head.weight"].T + leaves["head.bias"], part.y[index])
                loss.backward()  # type: ignore[no-untyped-call]
                for leaf in leaves.values():
                    assert leaf.grad is not None
                    leaf.grad += method.weight_decay * method.annealing**round * leaf.detach()
                lengths.append(float(torch.nn.utils.clip_grad_norm_(leaves.values(), method.max_norm)))
                optimizer.step()
            mean = {key: mean[key] + sizes[k] / sum(sizes.values()) * leaf.detach() for key, leaf in leaves.items()}
        model = mean
        assert_close(toy.step(cohort)["model"], model, 1e-12)
    assert max(lengths) > method.max_norm


@MODES
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_nar_2_without_weight_decay_it_is_federated_averaging_with_clipped_gradients(make: Any, mode: str) -> None:
    clipped = TRAIN.model_copy(update={"weight_decay": 0.0, "max_grad_norm": 0.4})
    ours = toy_of(FedNAR(weight_decay=0, max_norm=0.4), TRAIN, make(), mode=mode)
    theirs = toy_of(FedAvg(), clipped, make(), mode=mode)
    for cohort in COHORTS:
        assert_equal(ours.step(cohort)["model"], theirs.step(cohort)["model"])


@MODES
@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_nar_3_where_nothing_is_clipped_it_is_usual_weight_decay(make: Any, mode: str) -> None:
    ours = toy_of(FedNAR(weight_decay=0.05, max_norm=1e9), TRAIN, make(), mode=mode)
    theirs = toy_of(FedAvg(), TRAIN.model_copy(update={"weight_decay": 0.05}), make(), mode=mode)
    for cohort in COHORTS:
        assert_close(ours.step(cohort)["model"], theirs.step(cohort)["model"], 1e-10)


def test_inv_nar_4_no_step_is_longer_than_the_rate_times_the_largest_norm() -> None:
    train = TrainConfig(rounds=1, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.1)
    toy = toy_of(FedNAR(weight_decay=1e4, max_norm=2.0), train, two_layers())
    before = copy(toy.server["model"])
    # of one client and one step; the norm's 1e-6 is PyTorch's
    moved = subtract(toy.step([1])["model"], before)
    assert float(squared_norm(moved).sqrt()) == pytest.approx(0.1 * 2.0, rel=1e-6)


def test_inv_nar_5_the_section_train_has_no_part_in_it_but_is_remarked_on() -> None:
    quiet = TRAIN.model_copy(update={"weight_decay": 0.0})
    loud = TRAIN.model_copy(update={"weight_decay": 3.0, "max_grad_norm": 1e-3})
    left, right = (toy_of(FedNAR(), train, two_layers()) for train in (quiet, loud))
    assert_equal(left.step([0, 1])["model"], right.step([0, 1])["model"])
    assert not FedNAR().remarks(left.context)
    found = FedNAR().remarks(right.context)
    assert [remark.split()[0] for remark in found] == ["train.weight_decay", "train.max_grad_norm"]


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_vectorized_agrees_with_looped(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    method = FedNAR(**SETTINGS["annealed"])
    looped, stacked = (toy_of(method, TRAIN, make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 2]):
        assert_close(looped.step(cohort)["model"], stacked.step(cohort)["model"], 1e-9)
    assert "failed together" not in caplog.text


def test_what_is_idle() -> None:
    assert len(FedNAR(weight_decay=0, annealing=0.9).idle_settings()) == 1
