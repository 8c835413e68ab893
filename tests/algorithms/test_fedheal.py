"""FedHEAL: an oracle in plain PyTorch, federated averaging, elements that turn back, weights, and what travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedheal import FedHEAL
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, num_bytes
from tests.support.partial_toys import COHORTS, TRAIN, initial, three_layers, toy_of
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

ROUNDS = ([0, 1, 2, 3], [1, 3], [0, 2, 3], [0, 1, 2, 3], [2], [0, 1])


def trained(toy: Toy, model: Tree, client: int, round: int) -> Tree:
    """The client's model after a local update."""
    part = toy.dataset.load(client)["train"]
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
    generator = toy.context.streams.generator("batches", round, client)
    for index in plan_batches(len(part.y), 4, 2 * -(-len(part.y) // 4), generator).batches(CPU):
        optimizer.zero_grad()
        F.cross_entropy(toy.task.network.logits(leaves, part.x[index]), part.y[index]).backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def kept(rise: bool, history: list[bool], threshold: float | None) -> bool:
    """Whether one element counts."""
    if threshold is None or not history:
        return True
    return sum(rise is before for before in history) / len(history) > threshold


class Plain:
    """The server's round, element by element."""

    def __init__(self, method: FedHEAL, model: Tree) -> None:
        self.method, self.model = method, model
        self.history: dict[int, dict[str, list[list[bool]]]] = {}
        self.share: dict[int, float] = {}
        self.step: dict[int, float] = {}
        self.far: dict[int, float] = {}

    def masked(self, client: int, after: Tree) -> dict[str, Tensor]:
        """m_k, and how far the client went."""
        masks, past = {}, self.history.setdefault(client, {})
        self.far[client] = 0.0
        for name, leaf in self.model.items():
            change = leaf - after[name]
            rows = past.setdefault(name, [[] for _ in range(leaf.numel())])
            rises = [bool(value >= 0) for value in change.flatten()]
            bits = [kept(rise, row, self.method.threshold) for rise, row in zip(rises, rows, strict=True)]
            for rise, row in zip(rises, rows, strict=True):
                row.append(rise)
            masks[name] = torch.tensor(bits, dtype=torch.float64).view(leaf.shape)
            self.far[client] += float(torch.linalg.vector_norm(masks[name] * change))
        return masks

    def round(self, models: dict[int, Tree]) -> None:
        masks = {client: self.masked(client, model) for client, model in models.items()}
        beta, whole = self.method.momentum, sum(self.far.values())
        for client in models:
            self.step[client] = (1 - beta) * self.step.get(client, 0.0) + beta * self.far[client] / whole
            self.share[client] = self.share.get(client, 1 / len(models)) + self.step[client]
        mass = {client: self.share[client] / sum(self.share[one] for one in models) for client in models}
        new = {}
        for name, leaf in self.model.items():
            total = torch.stack([mass[client] * masks[client][name] for client in models]).sum(0)
            ways = [masks[client][name] * (leaf - model[name]) for client, model in models.items()]
            step = torch.zeros_like(leaf)
            for client, way in zip(models, ways, strict=True):
                weight = torch.where(total == 0, mass[client], mass[client] * masks[client][name] / total)
                step = step + weight * way
            new[name] = leaf - step
        self.model = new


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "both": {"threshold": 0.6, "momentum": 0.7},
    "weights": {"threshold": None, "momentum": 1.0},
    "elements": {"threshold": 0.5, "momentum": 0.0},
    "few": {"threshold": 0.95},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_heal_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = FedHEAL(**SETTINGS[name])
    toy = toy_of(method, task=two_layers())
    plain = Plain(method, initial(toy))
    for round, cohort in enumerate(ROUNDS):
        plain.round({client: trained(toy, plain.model, client, round) for client in cohort})
        toy.step(cohort)
        assert_close(toy.server["model"], plain.model, 1e-12)
        weights = toy.server["weights"]
        for key, expected in (("shares", plain.share), ("steps", plain.step), ("far", plain.far)):
            assert weights[key].tolist() == pytest.approx([expected.get(client, 0) for client in range(4)], abs=1e-12)


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_heal_2_where_all_counts_alike_it_is_federated_averaging_to_the_bit(make: Any) -> None:
    ours = toy_of(FedHEAL(threshold=None, momentum=0), task=make())
    theirs = toy_of(FedAvg(aggregation="uniform"), task=make())
    for cohort in COHORTS:
        assert_equal(ours.step(cohort)["model"], theirs.step(cohort)["model"])


def test_inv_heal_3_one_client_alone_moves_the_model_where_it_goes_on() -> None:
    """Of a single client the mean is its own value, or the old one."""
    toy = toy_of(FedHEAL(threshold=0.6), task=two_layers())
    before, stayed = initial(toy), 0
    for _ in range(4):
        after = toy.step([1])["model"]
        other = toy_of(FedHEAL(threshold=None), task=two_layers())
        other.round, other.server["model"] = toy.round - 1, before
        free = other.step([1])["model"]
        for name, leaf in after.items():
            assert ((leaf == before[name]) | (leaf - free[name]).abs().le(1e-14)).all()
            stayed += int((leaf == before[name]).sum())
        before = dict(after)
    assert stayed


def test_inv_heal_4_weights_are_distances_where_momentum_is_one_and_shares_grow_by_them() -> None:
    method = FedHEAL(momentum=1.0)
    zeros = {name: torch.zeros(3, dtype=torch.float64) for name in ("shares", "steps", "far")}
    one = method.renewed(zeros, {0: 3.0, 2: 1.0})
    assert one["steps"].tolist() == [0.75, 0, 0.25]
    assert one["shares"].tolist() == [1.25, 0, 0.75]
    two = method.renewed(one, {1: 4.0, 2: 1.0})
    assert two["steps"].tolist() == [0.75, 0.5, 0.125]
    assert two["shares"].tolist() == [1.25, 1.0, 0.875]
    assert method.renewed(zeros, {0: 0.0})["shares"].tolist() == [1.0, 0, 0]


def test_inv_heal_5_an_element_counts_where_it_goes_as_before() -> None:
    rise, count = torch.tensor([True, True, False, False]), torch.tensor([3, 1, 3, 1], dtype=torch.int32)
    for threshold, expected in ((0.2, [True, True, True, True]), (0.3, [True, False, False, True])):
        assert FedHEAL(threshold=threshold).consistent(rise, count, 4).tolist() == expected
    assert FedHEAL(threshold=0.75).consistent(rise, count, 4).tolist() == [False] * 4
    assert FedHEAL(threshold=0.9).consistent(rise, 0 * count, 0).all()
    assert FedHEAL(threshold=0.3).consistent(rise[:1], torch.tensor([3]), 10).tolist() == [False], "3 of 10 is not more"


def test_messages_have_the_elements_that_count_and_a_bit_for_each() -> None:
    toy = toy_of(FedHEAL(threshold=0.9), task=two_layers())
    size = num_bytes(initial(toy))
    toy.step([0, 1])
    assert toy.federation.traffic.by_client == dict.fromkeys((0, 1), (size + 8, size + 8))
    toy.step([0, 1])
    for down, up in toy.federation.traffic.by_client.values():
        assert down == size + 8
        assert up < size, "some elements turned back"
    assert {client: set(state) for client, state in toy.states().items() if state} == {0: {"history"}, 1: {"history"}}
    assert set(toy.algorithm.served(toy.server, toy.context)[0]) == {"model"}


def test_a_client_left_out_between_both_passes_leaves_no_trace_in_the_next_round() -> None:
    toy, other = toy_of(FedHEAL(), task=two_layers()), toy_of(FedHEAL(), task=two_layers())
    toy.federation.begin_round(0)
    toy.federation.map(toy.algorithm.local_update, [0, 1], {"model": toy.server["model"]})
    toy.federation.begin_round(0)
    assert_equal(toy.step([2, 3])["model"], other.step([2, 3])["model"])


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "momentum": 0.0, "lr": 0.01}])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_vectorized_agrees_with_looped(make: Any, optimizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    train = TrainConfig.model_validate({**TRAIN.model_dump(), **optimizer})
    looped, stacked = (toy_of(FedHEAL(), train, make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ROUNDS[:4]:
        assert_close(looped.step(cohort)["model"], stacked.step(cohort)["model"], 1e-8)
    assert "failed together" not in caplog.text
