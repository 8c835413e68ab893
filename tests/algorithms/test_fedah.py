"""FedAH: three passes by hand, special cases that are FedRep or leave the weights, evaluation, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedah import FedAH
from algorithms.fedrep import FedRep
from rayfl.engine.updates.batches import plan_batches
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, tensors
from tests.support.partial_toys import (
    COHORTS,
    TRAIN,
    held_out_accuracy,
    loss_of,
    planted_clients,
    three_layers,
    toy_of,
    vectors,
)
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

HEAD = ("head.weight", "head.bias")


def mixed(own: Tree, model: Tree, weights: Tree) -> Tree:
    """The model with the head (1 - W) P + W H."""
    return {**model, **{name: (1 - weights[name]) * own[name] + weights[name] * model[name] for name in HEAD}}


class Oracle:
    """One client in plain PyTorch: autograd, ``torch.optim.SGD`` and loops."""

    def __init__(self, toy: Toy, client: int, head_epochs: int, rate: float) -> None:
        self.toy, self.client, self.head_epochs, self.rate = toy, client, head_epochs, rate
        data = toy.dataset.load(client)["train"]
        self.x, self.y = data.x, data.y
        self.own: Tree = {name: toy.server["model"][name].clone() for name in HEAD}
        self.weights: Tree = {name: torch.ones_like(leaf) for name, leaf in self.own.items()}

    def loss(self, model: Tree, index: Tensor) -> Tensor:
        return F.cross_entropy(self.toy.task.network.logits(model, self.x[index]), self.y[index])

    def batches(self, stream: str, round: int, epochs: int) -> Any:
        train = self.toy.context.train
        steps = epochs * -(-len(self.y) // train.batch_size)
        generator = self.toy.context.streams.generator(stream, round, self.client)
        return plan_batches(len(self.y), train.batch_size, steps, generator).batches(CPU)

    def learned(self, model: Tree, round: int) -> Tree:
        weights = self.weights
        for index in self.batches("batches.ala", round, self.head_epochs):
            at = {name: mixed(self.own, model, weights)[name].detach().requires_grad_() for name in HEAD}
            slopes = torch.autograd.grad(self.loss({**model, **at}, index), list(at.values()))
            weights = {
                name: (weights[name] - self.rate * slope * (model[name] - self.own[name])).clamp(0, 1)
                for name, slope in zip(HEAD, slopes, strict=True)
            }
        return weights

    def moved(self, model: Tree, names: list[str], stream: str, round: int, epochs: int) -> Tree:
        train = self.toy.context.train
        leaves = {name: model[name].detach().clone().requires_grad_() for name in names}
        optimizer = torch.optim.SGD(
            leaves.values(), lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay
        )
        for index in self.batches(stream, round, epochs):
            optimizer.zero_grad()
            self.loss({**model, **leaves}, index).backward()
            optimizer.step()
        return {**model, **{name: leaf.detach() for name, leaf in leaves.items()}}

    def update(self, model: Tree, round: int) -> Tree:
        self.weights = self.learned(model, round)
        found = self.moved(mixed(self.own, model, self.weights), list(HEAD), "batches", round, self.head_epochs)
        found = self.moved(
            found, [name for name in model if name not in HEAD], "batches.1", round, self.toy.context.train.local_epochs
        )
        self.own = {name: found[name] for name in HEAD}
        return found


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("head_epochs", [1, 3])
def test_inv_ah_1_rounds_are_those_of_a_plain_loop(head_epochs: int, mode: str) -> None:
    toy = toy_of(FedAH(head_epochs=head_epochs, weight_lr=3.0), task=two_layers(), mode=mode)
    oracles = {client: Oracle(toy, client, head_epochs, 3.0) for client in range(4)}
    model = copy(toy.server["model"])
    for round, cohort in enumerate(([0, 2], [1, 2, 3], [0, 2, 1])):
        sizes = {client: len(oracles[client].y) for client in cohort}
        sent = {client: oracles[client].update(model, round) for client in cohort}
        total = sum(sizes.values())
        model = {name: sum(sizes[client] / total * sent[client][name] for client in cohort) for name in model}
        toy.step(cohort)
        assert_close(toy.server["model"], model, 1e-12)
        for client in cohort:
            assert_close(toy.states()[client]["head"], oracles[client].own, 1e-12)
            assert_close(toy.states()[client]["weights"], oracles[client].weights, 1e-12)
    moved = [leaf for oracle in oracles.values() for leaf in tensors(oracle.weights)]
    assert any(((leaf > 0) & (leaf < 1)).any() for leaf in moved)


class OwnHead(FedAH):
    """Takes the client's own head alone."""

    async def learned(self, client: Any, model: Tree) -> Tree:
        return {name: torch.zeros_like(leaf) for name, leaf in self._own(client).items()}


def test_inv_ah_2_with_the_own_head_alone_it_is_fedrep() -> None:
    both = (
        toy_of(OwnHead(head_epochs=2), task=two_layers()),
        toy_of(FedRep(head_epochs=2, body_epochs=None), task=two_layers()),
    )
    for cohort in COHORTS:
        left, right = (toy.step(cohort) for toy in both)
        assert_close({name: left["model"][name] for name in right["shared"]}, right["shared"], 1e-12)
    for client, state in both[1].states().items():
        if "personal" in state:
            assert_close(both[0].states()[client]["head"], state["personal"], 1e-12)
    assert vectors(both[0].scores(), "personalized") == vectors(both[1].scores(), "personalized")


def test_inv_ah_3_weights_that_do_not_move_begin_with_the_averaged_head() -> None:
    toy = toy_of(FedAH(weight_lr=0), task=two_layers())
    toy.run()
    for state in toy.states().values():
        assert all((leaf == 1).all() for leaf in tensors(state.get("weights", {})))
    scores = toy.scores()
    assert vectors(scores, "personalized") == vectors(scores, "global")


def test_inv_ah_4_without_the_heads_pass_the_body_has_the_batches_of_fedavg() -> None:
    toy = toy_of(FedAH(head_epochs=0), task=two_layers())
    oracle = Oracle(toy, 1, 0, 0.0)
    model = copy(toy.server["model"])
    expected = oracle.moved(
        model, [name for name in model if name not in HEAD], "batches", 0, toy.context.train.local_epochs
    )
    toy.step([1])
    assert_close(toy.server["model"], expected, 1e-12)


def test_evaluated_is_the_mixture_for_the_latest_model_and_nothing_is_kept() -> None:
    toy = toy_of(FedAH(weight_lr=3.0), task=two_layers())
    for cohort in COHORTS:
        toy.step(cohort)
    before = copy(toy.states())
    scores = toy.scores()
    assert_equal(toy.states(), before)
    for client, state in toy.states().items():
        if "head" in state:
            oracle = Oracle(toy, client, 1, 3.0)
            oracle.own, oracle.weights = state["head"], state["weights"]
            model = toy.server["model"]
            begun = mixed(oracle.own, model, oracle.learned(model, toy.round - 1))
            assert abs(scores[client]["personalized"].loss - loss_of(toy, begun, client)) < 1e-12


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_looped_and_stacked_agree(make: Any) -> None:
    looped, stacked = (toy_of(FedAH(head_epochs=2), task=make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort), stacked.step(cohort))
    assert_close(looped.states(), stacked.states())


def test_clients_of_one_sample_and_of_one_class_stay_finite() -> None:
    data = random_clients([1, 5, 3])
    toy = Toy(FedAH(weight_lr=30.0), data, two_layers(), TRAIN.model_copy(update={"batch_size": 1}))
    for _ in range(3):
        toy.step([0, 1, 2])
    assert all(leaf.isfinite().all() for leaf in tensors(toy.server))


def test_what_it_cannot_run_with_is_refused() -> None:
    clipped = toy_of(FedAH(), TRAIN.model_copy(update={"max_grad_norm": 1.0}))
    with pytest.raises(ConfigError, match=r"FedAH's mixing weights .* train\.max_grad_norm=null"):
        FedAH().check(clipped.task, clipped.context)


@pytest.mark.slow
def test_keeps_the_own_head_of_clients_that_label_differently() -> None:
    train = TRAIN.model_copy(update={"rounds": 15, "clients_per_round": 6, "local_epochs": 3, "batch_size": 10})
    toy = Toy(
        FedAH(weight_lr=10.0, head_epochs=3), planted_clients("head"), two_layers(12, 8), train, mode="vectorized"
    )
    toy.run()
    assert held_out_accuracy(toy, "personalized") > held_out_accuracy(toy, "global") + 0.1
