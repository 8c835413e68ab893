"""DRFA: an oracle in plain PyTorch, federated averaging, who is drawn, the worst mixture, what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.drfa import DRFA
from algorithms.fedavg import FedAvg
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy
from rayfl.randomness import RandomStreams
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 1, 10)
TRAIN = TrainConfig(
    rounds=5, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01, lr_decay=0.8
)
COHORTS = ([0], [1, 2], [0, 1, 2, 3], [2], [0, 3])
EVERYONE = [0, 1, 2, 3]
WHO = pytest.mark.parametrize("trained", ["drawn", "cohort"])


def toy_of(algorithm: Any, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), **{"train": TRAIN, **options})


def projected(point: np.ndarray) -> np.ndarray:
    """The nearest point of the simplex: max(point - threshold, 0), whose threshold is found by bisection."""
    low, high = point.min() - 1, point.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(point - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(point - low, 0)


class Oracle:
    """Algorithm 1 in plain PyTorch, in which a client keeps its model on the way."""

    def __init__(self, toy: Toy, trained: str, step: float, decay: float) -> None:
        self.toy, self.trained, self.step, self.decay = toy, trained, step, decay
        self.w = toy.task.network.initialize(toy.context.streams.integer("init.global"))
        self.weights = np.full(len(SIZES), 1 / len(SIZES))
        self.drawn: list[list[int]] = []

    def loss(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.toy.task.network.head_inputs_and_logits(model, x)[1], y)

    def local(self, client: int, round: int, share: float) -> tuple[Tree, Tree]:
        """The last model of a client, and the one after the share of its steps."""
        part = self.toy.dataset.load(client)["train"]
        model = {name: leaf.clone().requires_grad_() for name, leaf in self.w.items()}
        optimizer = torch.optim.SGD(model.values(), lr=0.1 * 0.8**round, momentum=0.5, weight_decay=0.01)
        steps, passed = 2 * -(-len(part.y) // 4), {}
        generator = self.toy.context.streams.generator("batches", round, client)
        for number, index in enumerate(plan_batches(len(part.y), 4, steps, generator).batches(CPU), start=1):
            optimizer.zero_grad()
            self.loss(model, part.x[index], part.y[index]).backward()
            optimizer.step()
            if number == math.ceil(share * steps):
                passed = {name: leaf.detach().clone() for name, leaf in model.items()}
        return {name: leaf.detach() for name, leaf in model.items()}, passed

    def round(self, round: int, cohort: list[int]) -> None:
        generator = self.toy.context.streams.generator("mixture", round)
        share = 1 - generator.random()
        if self.trained == "drawn":
            who = [int(k) for k in generator.choice(len(SIZES), size=len(cohort), p=self.weights / self.weights.sum())]
            shares = [1 / len(who)] * len(who)
        else:
            who = cohort
            shares = [self.weights[k] / self.weights[cohort].sum() for k in cohort]
        self.drawn.append(who)
        found = [self.local(client, round, share) for client in who]
        self.w, passed = (
            {name: sum(q * one[place][name] for q, one in zip(shares, found, strict=True)) for name in self.w}
            for place in (0, 1)
        )
        ascent = np.zeros(len(SIZES))
        for client in cohort:
            part = self.toy.dataset.load(client)["train"]
            ascent[client] = len(SIZES) / len(cohort) * float(self.loss(passed, part.x, part.y))
        self.weights = projected(self.weights + self.step * self.decay**round * ascent)


@WHO
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_drfa_1_rounds_are_those_of_an_oracle_in_plain_pytorch(trained: Any, mode: str) -> None:
    toy = toy_of(DRFA(trained=trained, weight_lr=0.03, weight_lr_decay=0.9), mode=mode)
    oracle = Oracle(toy, trained, 0.03, 0.9)
    for round, cohort in enumerate(COHORTS):
        toy.step(cohort)
        oracle.round(round, cohort)
        assert_close(toy.server["model"], oracle.w, 1e-12)
        assert_close(toy.server["weights"], torch.from_numpy(oracle.weights), 1e-12)
    assert np.ptp(oracle.weights) > 0.1
    if trained == "drawn":
        assert any(len(set(who)) < len(who) for who in oracle.drawn), "no client is drawn twice"
        assert any(set(who) - set(cohort) for who, cohort in zip(oracle.drawn, COHORTS, strict=True))


def test_inv_drfa_2_without_a_step_of_the_weights_cohorts_are_averaged() -> None:
    for make in (two_layers, normalized_layers):
        robust = toy_of(DRFA(trained="cohort", weight_lr=0, finetune_epochs=1), make())
        plain = toy_of(FedAvg(aggregation="uniform", finetune_epochs=1), make())
        for cohort in COHORTS:
            assert_equal(robust.step(cohort)["model"], plain.step(cohort)["model"])
        assert robust.server["weights"].tolist() == [0.25] * 4
        mine, theirs = robust.scores(final=True), plain.scores(final=True)
        assert all(
            (mine[k][row].vector == theirs[k][row].vector).all() for k in mine for row in ("global", "finetuned")
        )


def test_inv_drfa_3_with_one_local_step_of_everybody_it_is_agnostic_federated_learning() -> None:
    """Full gradients, lambda from the losses: w - eta sum_i lambda_i grad F_i, after which lambda goes up."""
    train = TrainConfig(rounds=6, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.3)
    toy = toy_of(DRFA(trained="cohort", weight_lr=0.1), train=train)
    parts = [toy.dataset.load(client)["train"] for client in EVERYONE]
    w, weights = copy(toy.server["model"]), np.full(4, 0.25)
    for _ in range(6):
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
        logits = [toy.task.network.head_inputs_and_logits(leaves, part.x)[1] for part in parts]
        mixed = sum(weight * F.cross_entropy(z, part.y) for weight, z, part in zip(weights, logits, parts, strict=True))
        mixed.backward()  # type: ignore[union-attr]
        w = {name: leaf.detach() - 0.3 * leaf.grad for name, leaf in leaves.items()}
        after = [F.cross_entropy(toy.task.network.head_inputs_and_logits(w, part.x)[1], part.y) for part in parts]
        weights = projected(weights + 0.1 * np.array([float(loss) for loss in after]))
        toy.step(EVERYONE)
        assert_close(toy.server["model"], w, 1e-12)
        assert_close(toy.server["weights"], torch.from_numpy(weights), 1e-12)


@pytest.mark.slow
def test_inv_drfa_4_clients_are_drawn_by_their_weights() -> None:
    """400 draws of one client each, with the weights 1/2, 1/4, 1/4 and 0."""
    toy = toy_of(DRFA(weight_lr=0), train=TRAIN.model_copy(update={"local_epochs": 0}))
    toy.server = {**toy.server, "weights": torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)}
    counts = np.zeros(4)
    for _ in range(400):
        toy.step([3])
        for client, (down, _) in toy.federation.traffic.by_client.items():
            counts[client] += client != 3 and down > 0
    assert counts[3] == 0 and counts.sum() == 400
    assert (np.abs(counts[:3] / 400 - [0.5, 0.25, 0.25]) < 0.08).all(), counts


def test_a_cohort_without_weight_leaves_the_model_and_counts_its_losses() -> None:
    toy = toy_of(DRFA(trained="cohort", weight_lr=0.1))
    before = copy(toy.server["model"])
    toy.server = {**toy.server, "weights": torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)}
    losses = toy.scores(split="train")
    toy.step([1, 2])
    assert_equal(toy.server["model"], before)
    up = 0.1 * 2 * np.array([0, losses[1]["global"].loss, losses[2]["global"].loss, 0])
    assert_close(toy.server["weights"], torch.from_numpy(projected(np.array([1.0, 0, 0, 0]) + up)), 1e-12)
    toy.step([0, 1])
    assert all(not torch.equal(toy.server["model"][name], leaf) for name, leaf in before.items())


@pytest.mark.slow
def test_inv_drfa_5_the_largest_loss_falls() -> None:
    """Clients that disagree: more weight of the worst makes it better than equal weights do."""
    train = TrainConfig(rounds=60, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.3)
    worst = {}
    for step in (0.0, 0.05):
        toy = Toy(DRFA(trained="cohort", weight_lr=step), random_clients((30, 30, 30, 30)), two_layers(), train)
        toy.run()
        worst[step] = max(one["global"].loss for one in toy.scores(split="train").values())
    assert worst[0.05] < 0.97 * worst[0.0], worst


@WHO
def test_traffic_and_what_is_never_sent(trained: Any) -> None:
    toy = toy_of(DRFA(trained=trained))
    size, found = 8 * toy.task.network.num_parameters, set()
    for cohort in ([0, 1], [2, 3], [0, 3], [1, 2]):
        toy.step(cohort)
        for client, traffic in toy.federation.traffic.by_client.items():
            found.add((client in cohort, *traffic))
    both = (True, 2 * size + 16, 2 * size + 8)
    assert found == ({both} if trained == "cohort" else {both, (True, size, 8), (False, size + 16, 2 * size)})
    assert set(toy.algorithm.sent(toy.server)) == set(toy.algorithm.served(toy.server, toy.context)[0]) == {"model"}


def test_what_is_refused_and_what_devices_may_do() -> None:
    def check(**train: Any) -> None:
        section = TrainConfig(rounds=3, clients_per_round=2, persist_optimizer=True, **train)
        DRFA().check(two_layers(), RoundContext(0, 3, 4, section, RandomStreams(0)))

    check()
    for train in ({"momentum": 0.5}, {"optimizer": "adam"}):
        with pytest.raises(ConfigError, match=r"begins afresh: set train\.persist_optimizer=false"):
            check(**train)
    assert (
        "whether their devices are there" in DRFA().everyone_needed() and not DRFA(trained="cohort").everyone_needed()
    )


@WHO
def test_looped_and_stacked_clients_agree_with_running_statistics(trained: Any) -> None:
    looped, stacked = (
        toy_of(DRFA(trained=trained), normalized_layers(), mode=mode) for mode in ("looped", "vectorized")
    )
    for cohort in ([0, 1, 3], [1, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-10)
