"""FedRoD: invariants ROD of its two losses, what each moves, what is evaluated, and clients that label differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedrod import FedRoD
from algorithms.parts.heads import head_logits
from rayfl.engine.client import Client
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch
from tests.support.partial_toys import (
    COHORTS,
    TRAIN,
    held_out_accuracy,
    initial,
    labelled,
    partly_fixed,
    planted_clients,
    take,
    three_layers,
    toy_of,
    vectors,
)
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

HEAD = ("head.weight", "head.bias")


@pytest.mark.parametrize("make", [two_layers, three_layers])
@pytest.mark.parametrize("options", [{}, {"head_lr": 1.0}, {"personal_init": "zero", "head_lr": 0.0}], ids=str)
def test_inv_rod_1_without_balance_the_server_is_that_of_fedavg(options: dict[str, Any], make: Any) -> None:
    train = TRAIN.model_copy(update={"weight_decay": 0.1, "momentum": 0.9})
    both = toy_of(FedRoD(balance_exponent=0, **options), train, make()), toy_of(FedAvg(), train, make())
    for cohort in COHORTS:
        assert_equal(both[0].step(cohort), both[1].step(cohort))
    assert vectors(both[0].scores(), "global") == vectors(both[1].scores(), "global")


def test_inv_rod_2_the_server_does_not_depend_on_personal_heads() -> None:
    methods = [FedRoD(head_lr=0.0), FedRoD(head_lr=1.0, personal_init="zero"), FedRoD()]
    toys = [toy_of(method, task=two_layers()) for method in methods]
    for cohort in COHORTS:
        first, *others = [toy.step(cohort) for toy in toys]
        for other in others:
            assert_equal(other, first)
    assert (toys[0].states()[1]["personal"]["head.weight"] - toys[2].states()[1]["personal"]["head.weight"]).any()


def terms(model: Tree, head: Tree, batch: Batch, prior: Tensor, task: Any = None) -> tuple[Tensor, Tree]:
    """The objective and its gradients by group."""
    trained = {"model": copy(model), "personal": copy(head)}
    moved = {f"{key}/{name}": leaf.requires_grad_() for key in trained for name, leaf in trained[key].items()}
    loss = FedRoD().objective(trained, batch, task or two_layers(), {"prior": prior}, None)
    found = torch.autograd.grad(loss, list(moved.values()), materialize_grads=True)
    return loss.detach(), dict(zip(moved, found, strict=True))


def example() -> tuple[Any, Tree, Tree, Batch]:
    task = two_layers()
    x, y = random_clients([12], seed=4).load(0)["train"].x, torch.arange(12) % 3
    return task, task.network.initialize(0), take(task.network.initialize(1), HEAD), Batch(x, y)


def test_inv_rod_3_equal_counts_are_plain_cross_entropy() -> None:
    task, model, head, batch = example()
    zero = torch.zeros(3, dtype=torch.float64)
    plain, plain_gradients = terms(model, head, batch, zero)
    balanced, gradients = terms(model, head, batch, zero + torch.tensor(4.0, dtype=torch.float64).log())
    assert_close(balanced, plain, 1e-12)
    assert_close(gradients, plain_gradients, 1e-12)
    # the plain one is the cross-entropy of the generic head, and of both together
    inputs, logits = task.network.head_inputs_and_logits(model, batch.x)
    together = logits + inputs @ head["head.weight"].T + head["head.bias"]
    assert_close(plain, F.cross_entropy(logits, batch.y) + F.cross_entropy(together, batch.y), 1e-12)


def test_the_balanced_loss_is_that_of_a_softmax_weighted_by_counts() -> None:
    _, model, head, batch = example()
    toy = Toy(Prior(balance_exponent=0.5), labelled([0, 0, 0, 0, 2]), two_layers(), TRAIN)
    logs = toy.federation.map(toy.algorithm.report, [0], {})[0]["prior"]
    assert_close(logs, torch.tensor([0.5 * torch.tensor(4.0).log(), -1e4, 0.0], dtype=torch.float64), 1e-7)
    loss, _ = terms(model, head, Batch(batch.x[::3], batch.y[::3]), logs)
    logits = two_layers().network.logits(model, batch.x[::3])
    weights = torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64)
    shares = weights * logits.exp() / (weights * logits.exp()).sum(1, keepdim=True)
    inputs = two_layers().network.head_inputs_and_logits(model, batch.x[::3])[0]
    together = logits + inputs @ head["head.weight"].T + head["head.bias"]
    assert_close(loss, -shares[:, 0].log().mean() + F.cross_entropy(together, batch.y[::3]), 1e-10)


class Prior(FedRoD):
    """Sends its prior."""

    async def report(self, client: Client) -> Tree:
        """The prior of a client, of the type of its samples."""
        return {"prior": self.prior(client, client.initial_model()["head.weight"])}


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_rod_4_a_client_of_one_class_sends_back_what_it_received(mode: str) -> None:
    train = TRAIN.model_copy(update={"weight_decay": 0.0})
    toy = Toy(FedRoD(), labelled([1] * 6, [0, 1, 2, 2, 0], [2]), two_layers(), train, mode=mode)
    toy.step([1])
    before = copy(toy.server)
    assert_equal(toy.step([0]), before)
    assert_equal(toy.step([0, 2]), before)
    # the personal head learns all the same
    assert (toy.states()[0]["personal"]["head.weight"] - initial(toy)["head.weight"]).abs().max() > 1e-3
    # it counts in the mean
    alone = Toy(FedRoD(), toy.dataset, two_layers(), train, mode=mode)
    alone.round, alone.server = toy.round, copy(before)
    moved, mixed = alone.step([1])["model"], toy.step([0, 1])["model"]
    share = 5 / 11
    assert_close(mixed, {n: (1 - share) * leaf + share * moved[n] for n, leaf in before["model"].items()}, 1e-9)


def test_inv_rod_5_a_personal_head_of_zeros_that_stays_is_the_generic_model() -> None:
    toy = toy_of(FedRoD(personal_init="zero", head_lr=0.0), TRAIN.model_copy(update={"weight_decay": 0.0}))
    for cohort in COHORTS:
        toy.step(cohort)
    scores = toy.scores()
    assert vectors(scores, "personalized") == vectors(scores, "global")


def test_inv_rod_6_each_loss_reaches_its_own_tensors_alone() -> None:
    _, model, head, batch = example()
    prior = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    _, gradients = terms(model, head, batch, prior)
    _, other = terms(model, {name: leaf + 1 for name, leaf in head.items()}, batch, prior)
    own = two_layers()
    generic = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    loss = F.cross_entropy(own.network.logits(generic, batch.x) + prior, batch.y)
    expected = dict(zip(model, torch.autograd.grad(loss, list(generic.values())), strict=True))
    for name in model:
        # the personal loss adds exactly nothing
        assert torch.equal(gradients[f"model/{name}"], expected[name])
        assert torch.equal(other[f"model/{name}"], expected[name])
    # and the generic loss, which alone reads the prior, adds nothing to the personal head
    _, unbalanced = terms(model, head, batch, torch.zeros_like(prior))
    for name in HEAD:
        assert torch.equal(unbalanced[f"personal/{name}"], gradients[f"personal/{name}"])
        assert gradients[f"personal/{name}"].abs().max() > 1e-3


def test_inv_rod_7_only_ratios_of_counts_matter() -> None:
    _, model, head, batch = example()
    prior = torch.tensor([0.0, 1.5, 3.0], dtype=torch.float64)
    one, ten = (terms(model, head, batch, prior + shift) for shift in (0.0, 2.302585092994046))
    assert_close(one[0], ten[0], 1e-12)
    assert_close(one[1], ten[1], 1e-12)


def test_inv_rod_8_replies_are_models_and_heads_stay() -> None:
    toy = toy_of(FedRoD())
    size = sum(leaf.numel() for leaf in initial(toy).values())
    for cohort in COHORTS:
        assert set(toy.step(cohort)["model"]) == set(initial(toy))
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (8 * size, 8 * size))
    assert set(toy.states()) == {0, 1, 2}
    assert {name for state in toy.states().values() for name in state["personal"]} == set(HEAD)


def test_steps_are_those_of_two_optimizers_one_for_each_loss() -> None:
    toy = Toy(FedRoD(head_lr=0.3), labelled([0, 1, 1, 2, 2, 2]), two_layers(), TRAIN)
    model, head = initial(toy), take(initial(toy), HEAD)
    part = toy.dataset.load(0)["train"]
    prior = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).log()
    for round in range(2):
        moved = {n: leaf.clone().requires_grad_() for n, leaf in model.items()}
        own = {n: leaf.clone().requires_grad_() for n, leaf in head.items()}
        rules = {"momentum": TRAIN.momentum, "weight_decay": TRAIN.weight_decay}
        optimizers = torch.optim.SGD(moved.values(), lr=0.1, **rules), torch.optim.SGD(own.values(), lr=0.3, **rules)
        plan = plan_batches(6, 4, 4, toy.context.streams.generator("batches", round, 0))
        for index in plan.batches(CPU):
            x, y = part.x[index], part.y[index]
            inputs, logits = toy.task.network.head_inputs_and_logits(moved, x)
            generic = F.cross_entropy(logits + prior, y)
            together = logits.detach() + inputs.detach() @ own["head.weight"].T + own["head.bias"]
            for optimizer, loss in zip(optimizers, (generic, F.cross_entropy(together, y)), strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        model, head = ({n: leaf.detach() for n, leaf in tree.items()} for tree in (moved, own))
        toy.step([0])
        assert_close(toy.server["model"], model, 1e-12)
        assert_close(toy.states()[0]["personal"], head, 1e-12)


def test_rows_of_clients_sampled_and_never_sampled() -> None:
    for unseen in ("init", "global"):
        toy = toy_of(FedRoD(unseen=unseen))
        for cohort in COHORTS:
            toy.step(cohort)
        assert set(toy.federation.trained_scores[1]["test"]) == {"local", "personalized"}
        scores = toy.scores()
        for client in range(4):
            part = toy.dataset.load(client)["test"]
            inputs, logits = toy.task.network.head_inputs_and_logits(toy.server["model"], part.x)
            head = toy.states()[client]["personal"] if client < 3 else initial(toy)
            together = logits + inputs @ head["head.weight"].T + head["head.bias"]
            expected = logits if client == 3 and unseen == "global" else together
            assert abs(scores[client]["global"].loss - float(F.cross_entropy(logits, part.y))) < 1e-12
            assert abs(scores[client]["personalized"].loss - float(F.cross_entropy(expected, part.y))) < 1e-12


def test_a_head_that_is_not_trained_is_refused_and_a_bias_that_is_not_is_added() -> None:
    toy = toy_of(FedRoD())
    with pytest.raises(ConfigError, match=r"Fed-RoD needs the last layer's weight .* 'head.weight'"):
        FedRoD().check(partly_fixed("head.weight"), toy.context)
    fixed = partly_fixed("head.bias")
    FedRoD().check(fixed, toy.context)
    bias = fixed.network.fixed_parameters["head.bias"]
    model = fixed.network.initialize(3)
    inputs, logits = fixed.network.head_inputs_and_logits(model, toy.dataset.load(0)["test"].x.float())
    assert_close(head_logits(fixed.network, model, inputs), logits, 1e-6)
    assert bias.abs().max() > 0


def test_vectorized_agrees_with_looped_also_where_classes_are_missing() -> None:
    data = labelled([0, 1, 0, 1, 1, 0, 0], [1], [2, 0, 2, 2, 2], [0, 1, 2, 0, 0, 1])
    looped, stacked = (Toy(FedRoD(), data, two_layers(), TRAIN, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 1, 2, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-10)
    assert_close(looped.states(), stacked.states(), 1e-10)


@pytest.mark.slow
def test_personal_heads_serve_clients_that_label_differently() -> None:
    train = TrainConfig(rounds=20, clients_per_round="all", local_epochs=3, batch_size=10, lr=0.1)
    accuracy = {}
    for method, row in ((FedRoD(), "personalized"), (FedRoD(), "global"), (FedAvg(), "global")):
        toy = Toy(method, planted_clients("head"), two_layers(12, 8), train, mode="vectorized")
        toy.run()
        accuracy[method.name, row] = held_out_accuracy(toy, row)
    assert accuracy["fedrod", "personalized"] > accuracy["fedavg", "global"] + 0.1, accuracy
