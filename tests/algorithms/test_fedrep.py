"""FedRep: invariants REP, the two passes step by step, what is evaluated, fine-tuning, and learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.fedbabu import FedBABU
from algorithms.fedrep import FedRep
from algorithms.local import Local
from rayfl.engine.client import Client
from rayfl.engine.updates.batches import plan_batches
from rayfl.params import Tree, copy
from rayfl.tasks.base import Model
from tests.support.partial_toys import (
    COHORTS,
    TRAIN,
    held_out_accuracy,
    initial,
    loss_of,
    planted_clients,
    take,
    three_layers,
    toy_of,
    vectors,
)
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_equal

HARD = TRAIN.model_copy(update={"momentum": 0.9, "weight_decay": 0.3})


@dataclass
class Pass:
    """One pass of a client: the model before it, and what it trained."""

    client: int
    before: Tree
    trained: Tree


PASSES: list[Pass] = []


class Recorded(FedRep):
    """Notes every pass."""

    async def train_part(
        self, client: Client, model: Model, names: Sequence[str], epochs: int | None = None, stream: str = ""
    ) -> Tree:
        before = copy(model)
        trained = await super().train_part(client, model, names, epochs, stream)
        assert_equal(dict(model), before)
        PASSES.append(Pass(client.id, before, copy(trained)))
        return trained


@pytest.mark.parametrize("group", ["last_layer", "classifier_block"])
def test_inv_rep_1_each_pass_leaves_the_other_part(group: Any) -> None:
    toy = toy_of(Recorded(head_epochs=3, head_group=group))
    network = toy.task.network
    for cohort in COHORTS:
        PASSES.clear()
        broadcast = copy(toy.server["shared"])
        toy.step(cohort)
        assert [entry.client for entry in PASSES] == [client for client in cohort for _ in range(2)]
        for first, second in zip(PASSES[::2], PASSES[1::2], strict=True):
            assert set(first.trained) == set(toy.algorithm.head(network))  # type: ignore[attr-defined]
            assert set(second.trained) == set(toy.algorithm.body(network))  # type: ignore[attr-defined]
            # after the first pass the body is the broadcast one, running statistics included
            assert_equal(take(second.before, broadcast), broadcast)
            assert_equal(take(second.before, first.trained), first.trained)
            # after the second pass the head is that of the first
            assert_equal(toy.states()[first.client]["personal"], first.trained)
            assert not torch.equal(first.trained["head.weight"], first.before["head.weight"])
            assert not torch.equal(second.trained["inner.weight"], second.before["inner.weight"])


def test_inv_rep_2_without_a_body_pass_the_body_stays() -> None:
    toy = toy_of(FedRep(head_epochs=2, body_epochs=0))
    start = copy(toy.server["shared"])
    for cohort in COHORTS:
        assert_equal(toy.step(cohort)["shared"], start)
    assert not torch.equal(toy.states()[0]["personal"]["head.weight"], initial(toy)["head.weight"])


@pytest.mark.parametrize("task", [two_layers(), three_layers()], ids=["plain", "buffers"])
def test_inv_rep_3_without_a_head_pass_it_is_fedbabu(task: Any) -> None:
    represent, frozen = (
        toy_of(algorithm, HARD, task) for algorithm in (FedRep(head_epochs=0, body_epochs=None), FedBABU())
    )
    for cohort in COHORTS:
        assert_equal(represent.step(cohort)["shared"], frozen.step(cohort)["shared"])
    for state in represent.states().values():
        assert_equal(state["personal"], take(initial(represent), ("head.weight", "head.bias")))
    assert vectors(represent.scores(), "personalized") == vectors(frozen.scores(), "global")


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("persist", [False, True])
def test_inv_rep_4_decay_and_momentum_do_not_move_frozen_tensors(persist: bool, mode: str) -> None:
    train = HARD.model_copy(update={"persist_optimizer": persist})
    heads = toy_of(FedRep(head_epochs=3, body_epochs=0), train, two_layers(), mode=mode)
    bodies = toy_of(FedRep(head_epochs=0, body_epochs=3), train, two_layers(), mode=mode)
    start = initial(heads)
    for cohort in COHORTS:
        heads.step(cohort)
        bodies.step(cohort)
    assert_equal(heads.server["shared"], take(start, heads.server["shared"]))
    for state in bodies.states().values():
        assert_equal(state["personal"], take(start, state["personal"]))
    assert not torch.equal(bodies.server["shared"]["inner.weight"], start["inner.weight"])


def sgd(toy: Toy, model: Tree, names: Sequence[str], epochs: int, stream: str, client: int) -> Tree:
    """A pass over some tensors with PyTorch's optimizer, the others without gradients."""
    examples = toy.dataset.load(client)["train"]
    moved = {name: model[name].clone().requires_grad_() for name in names}
    train = toy.train
    optimizer = torch.optim.SGD(moved.values(), lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay)
    steps = epochs * -(-len(examples.y) // 4)
    plan = plan_batches(len(examples.y), 4, steps, toy.context.streams.generator(stream, toy.round, client))
    for index in plan.batches(CPU):
        optimizer.zero_grad()
        logits = toy.task.network.logits({**model, **moved}, examples.x[index], training=True)
        torch.nn.functional.cross_entropy(logits, examples.y[index]).backward()
        optimizer.step()
    return {**model, **{name: leaf.detach() for name, leaf in moved.items()}}


def test_the_two_passes_step_by_step() -> None:
    """The head on the batches of federated averaging, then the body on its own, each with empty momentum."""
    toy = toy_of(FedRep(head_epochs=3, body_epochs=2), task=two_layers())
    model = initial(toy)
    head, body = ("head.weight", "head.bias"), ("inner.weight", "inner.bias")
    for _ in range(3):
        model = sgd(toy, model, head, 3, "batches", 1)
        model = sgd(toy, model, body, 2, "batches.1", 1)
        toy.step([1])
        assert_equal(toy.server["shared"], take(model, body))
        assert_equal(toy.states()[1]["personal"], take(model, head))


def test_epochs_default_to_the_papers_or_to_the_training_sections() -> None:
    assert (FedRep().head_epochs, FedRep().body_epochs) == (10, 1)
    runs = [
        toy_of(FedRep(head_epochs=head, body_epochs=body), TRAIN.model_copy(update={"local_epochs": 3}), two_layers())
        for head, body in ((None, None), (3, 3))
    ]
    assert_equal(runs[0].step([0, 1]), runs[1].step([0, 1]))
    assert_equal(runs[0].states(), runs[1].states())


@pytest.mark.parametrize(("group", "other", "row"), [("none", FedAvg(), "global"), ("all", Local(), "personalized")])
def test_of_an_empty_part_only_the_other_pass_is_left(group: Any, other: Any, row: str) -> None:
    both = toy_of(FedRep(head_epochs=None, body_epochs=None, head_group=group)), toy_of(other)
    for cohort in COHORTS:
        for toy in both:
            toy.step(cohort)
    assert vectors(both[0].scores(), "personalized") == vectors(both[1].scores(), row)


def test_evaluated_is_the_latest_body_with_the_own_head() -> None:
    toy = toy_of(FedRep(head_epochs=2))
    for cohort in COHORTS:
        toy.step(cohort)
    scores, states = toy.scores(final=True), toy.states()
    for client in range(4):
        head = states[client]["personal"] if client in states else take(initial(toy), ("head.weight", "head.bias"))
        assert list(scores[client]) == ["personalized"]
        assert abs(scores[client]["personalized"].loss - loss_of(toy, {**toy.server["shared"], **head}, client)) < 1e-12


@pytest.mark.parametrize("group", ["last_layer", "classifier_block"])
def test_a_last_pass_of_all_heads_is_a_row_of_its_own(group: Any) -> None:
    plain, tuned = (toy_of(FedRep(head_epochs=2, head_group=group, finetune_epochs=epochs)) for epochs in (None, 3))
    for cohort in COHORTS:
        assert_equal(plain.step(cohort), tuned.step(cohort))
    assert all(list(rows) == ["personalized"] for rows in tuned.scores().values())
    found = tuned.scores(final=True)
    assert vectors(found, "personalized") == vectors(plain.scores(final=True), "personalized")
    assert all(rows["finetuned"].loss < rows["personalized"].loss for rows in found.values())
    algorithm, network = tuned.algorithm, tuned.task.network
    assert isinstance(algorithm, FedRep)
    assert set(algorithm.finetuned_names(network)) == set(algorithm.head(network))
    models = tuned.federation.map(algorithm.finetune, [0, 3], {"model": initial(tuned)})
    for model in models.values():
        body = [name for name in algorithm.body(network) if name in network.parameter_names]
        assert_equal(take(model, body), take(initial(tuned), body))
        assert not torch.equal(model["head.weight"], initial(tuned)["head.weight"])


@pytest.mark.slow
def test_learns_a_common_representation_of_clients_that_label_differently() -> None:
    """Heads fitted to the common body in every round: better than one model for all, and than clients alone."""
    train = TRAIN.model_copy(update={"rounds": 20, "clients_per_round": 6, "local_epochs": 3, "batch_size": 10})
    accuracy = {}
    for algorithm, row in (
        (FedRep(head_epochs=5, body_epochs=3), "personalized"),
        (FedAvg(), "global"),
        (Local(), "personalized"),
    ):
        toy = Toy(algorithm, planted_clients("head"), two_layers(12, 8), train, mode="vectorized")
        toy.run()
        accuracy[algorithm.name] = held_out_accuracy(toy, row)
    assert accuracy["fedrep"] > accuracy["local"] + 0.05, accuracy
    assert accuracy["local"] > accuracy["fedavg"] + 0.1, accuracy
