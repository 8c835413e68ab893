"""FedALA: invariants ALA of the mixture and its weights, their pass step by step, the start, and evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from algorithms.fedala import FedALA
from algorithms.fedavg import FedAvg
from algorithms.local import Local
from algorithms.parts.learned_mixture import STREAM
from rayfl.engine.client import Client
from rayfl.engine.updates.batches import plan_batches
from rayfl.errors import ClientError, ConfigError
from rayfl.params import Tree, copy, map_leaves, tensors
from rayfl.tasks.base import Batch
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
BRIEF: dict[str, Any] = {"start_threshold": None, "start_passes": 2}
CALLS: list[tuple[int, Tree, Tree | None, Tree]] = []


class Recorded(FedALA):
    """Notes client, received model, weights and the model that training begins with."""

    def mixed(self, client: Client, model: Tree, weights: Tree | None) -> Tree:
        found = super().mixed(client, model, weights)
        CALLS.append((client.id, copy(model), weights, found))
        return found


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_ala_1_weights_that_do_not_move_are_fedavg(make: Any) -> None:
    train = TRAIN.model_copy(update={"weight_decay": 0.1, "momentum": 0.9})
    both = toy_of(FedALA(weight_lr=0, **BRIEF), train, make()), toy_of(FedAvg(), train, make())
    for cohort in COHORTS:
        assert_equal(both[0].step(cohort), both[1].step(cohort))
    scores = both[0].scores()
    assert vectors(scores, "personalized") == vectors(scores, "global") == vectors(both[1].scores(), "global")


def test_inv_ala_2_first_participations_are_those_of_fedavg() -> None:
    both = toy_of(FedALA(**BRIEF)), toy_of(FedAvg())
    for cohort in ([0, 2], [1], [3]):
        assert_equal(both[0].step(cohort), both[1].step(cohort))
    left, right = (toy.step([0, 1])["model"]["head.weight"] for toy in both)
    assert (left - right).abs().max() > 1e-4


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_inv_ala_3_and_4_weights_are_shares_and_lower_layers_are_the_received_ones(layers: int) -> None:
    toy = toy_of(Recorded(layers=layers, weight_lr=30.0, **BRIEF))
    assert isinstance(toy.algorithm, FedALA)
    upper = toy.algorithm.upper(toy.task.network)
    assert len(upper) == 2 * layers
    CALLS.clear()
    for cohort in ([0, 1, 2, 3], *COHORTS):
        toy.step(cohort)
    later = [entry for entry in CALLS if entry[2] is not None]
    assert len(later) == 8
    for _, received, weights, begun in later:
        assert weights is not None and set(weights) == set(upper)
        assert all(((leaf >= 0) & (leaf <= 1)).all() for leaf in tensors(weights))
        for name in set(received) - set(upper):
            assert torch.equal(begun[name], received[name])
    assert any((leaf < 1).any() and (leaf > 0).any() for _, _, weights, _ in later for leaf in tensors(weights or {}))


def test_the_personalized_model_has_weights_learned_for_the_newest_model() -> None:
    toy = toy_of(FedALA(**BRIEF))
    toy.run()
    rows, model = toy.scores(), toy.server["model"]
    for client, state in toy.states().items():
        if "weights" not in state:
            continue
        part = toy.dataset.load(client)["test"]
        kept = {n: torch.lerp(state["upper"][n], model[n], weight) for n, weight in state["weights"].items()}
        stale = F.cross_entropy(toy.task.network.logits({**model, **kept}, part.x), part.y)
        assert abs(rows[client]["personalized"].loss - float(stale)) > 1e-9
        # which the evaluation does not keep
        assert_equal(toy.states()[client]["weights"], state["weights"])


def test_inv_ala_5_where_both_models_agree_weights_stay() -> None:
    toy = toy_of(FedALA(weight_lr=5.0, **BRIEF), task=two_layers())
    toy.step([0, 1, 2, 3])
    states = toy.client_hosts[0].states
    state = states.all()[0]
    old = copy(state["upper"])
    old["head.weight"][1] = toy.server["model"]["head.weight"][1]
    states.replace(0, {**state, "upper": old}, toy.round)
    toy.step([0])
    weights = toy.states()[0]["weights"]
    assert (weights["head.weight"][1] == 1).all()
    assert (weights["head.weight"][0] < 1).any()


def test_inv_ala_6_the_gradient_is_that_at_the_mixture_times_the_difference() -> None:
    task = two_layers()
    part = random_clients([9], seed=4).load(0)["train"]
    old, received = ({n: task.network.initialize(seed)[n] for n in HEAD} for seed in (1, 0))
    model = task.network.initialize(0)
    generator = torch.Generator().manual_seed(2)
    weights = {
        n: torch.rand(leaf.shape, generator=generator, dtype=leaf.dtype).requires_grad_() for n, leaf in old.items()
    }
    zero = torch.zeros((), dtype=torch.float64)
    trained = {"weights": weights, "loss": zero}
    value = FedALA().mixture_objective(trained, Batch(part.x, part.y), task, {"old": old, "received": model})
    found = torch.autograd.grad(value, list(weights.values()), retain_graph=True)
    at = {n: (old[n] + weights[n].detach() * (received[n] - old[n])).requires_grad_() for n in HEAD}
    loss = F.cross_entropy(task.network.logits({**model, **at}, part.x), part.y)
    for name, slope, other in zip(HEAD, found, torch.autograd.grad(loss, list(at.values())), strict=True):
        assert_close(slope, other * (received[name] - old[name]), 1e-12)


class Forced(FedALA):
    """Takes the client's own model alone."""

    async def learned(self, client: Client, model: Tree) -> Tree | None:
        upper = client.state.get("upper")
        return None if upper is None else {name: torch.zeros_like(leaf) for name, leaf in upper.items()}


def test_inv_ala_7_of_the_own_model_alone_it_is_local_training() -> None:
    toys = [toy_of(method, task=two_layers()) for method in (Forced(layers=2), Local())]
    for _ in range(3):
        for toy in toys:
            toy.step([0, 1, 2, 3])
    for client in range(4):
        assert_equal(toys[0].states()[client]["upper"], toys[1].states()[client]["local"])


def test_inv_ala_8_a_single_client_follows_fedavg() -> None:
    data = random_clients([12])
    toys = [Toy(method, data, three_layers(), TRAIN) for method in (FedALA(layers=3, **BRIEF), FedAvg())]
    for _ in range(3):
        assert_equal(toys[0].step([0]), toys[1].step([0]))
    assert all((leaf == 1).all() for leaf in tensors(toys[0].states()[0]["weights"]))


@pytest.mark.parametrize("update", [{"persist_optimizer": True}, {"nesterov": True}, {"dampening": 0.3}], ids=str)
def test_inv_ala_9_the_weights_have_batches_and_an_optimizer_of_their_own(update: dict[str, Any]) -> None:
    """By hand: the pass of the weights, and then the training that nothing but its beginning connects with it."""
    train = TRAIN.model_copy(update=update)
    toy = toy_of(FedALA(weight_lr=2.0, data_share=0.6, **BRIEF), train, two_layers())
    part, weights, old, kept = toy.dataset.load(1)["train"], None, {}, {}
    rules = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.01}
    rules |= {name: value for name, value in update.items() if name != "persist_optimizer"}
    for round, cohort in enumerate(([1, 2], [1, 3], [1, 0])):
        model = copy(toy.server["model"])
        for _ in range((0, 2, 1)[round]):
            weights = weights or {name: torch.ones_like(leaf) for name, leaf in old.items()}
            # 0.6 of 12 samples are two mini-batches of 4
            plan = plan_batches(12, 4, 2, toy.context.streams.generator("batches.ala", round, 1))
            for index in plan.batches(CPU):
                at = {n: torch.lerp(old[n], model[n], weights[n]).requires_grad_() for n in HEAD}
                loss = F.cross_entropy(toy.task.network.logits({**model, **at}, part.x[index]), part.y[index])
                slopes = torch.autograd.grad(loss, [at[name] for name in HEAD])
                weights = {
                    name: (weights[name] - 2.0 * slope * (model[name] - old[name])).clamp(0, 1)
                    for name, slope in zip(HEAD, slopes, strict=True)
                }
        begun = model if weights is None else {**model, **{n: torch.lerp(old[n], model[n], weights[n]) for n in HEAD}}
        moved = {name: leaf.clone().requires_grad_() for name, leaf in begun.items()}
        optimizer = torch.optim.SGD(moved.values(), **rules)
        if "persist_optimizer" in update and kept:
            optimizer.load_state_dict(kept)
        plan = plan_batches(12, 4, 6, toy.context.streams.generator("batches", round, 1))
        for index in plan.batches(CPU):
            optimizer.zero_grad()
            F.cross_entropy(toy.task.network.logits(moved, part.x[index]), part.y[index]).backward()
            optimizer.step()
        kept, old = optimizer.state_dict(), {name: moved[name].detach() for name in HEAD}
        toy.step(cohort)
        assert_close(toy.states()[1]["upper"], old, 1e-12)
        if weights is not None:
            assert_close(toy.states()[1]["weights"], weights, 1e-12)
            assert any((leaf < 1).any() for leaf in tensors(weights))
    assert set(toy.states()[1]) - {"optimizer"} == {"upper", "weights"}
    assert set(toy.states()[1].get("optimizer", {"main"})) == {"main"}


def passes(algorithm: FedALA) -> int:
    """How many passes the start of a client makes."""
    seen = []

    class Counting(type(algorithm)):  # type: ignore[misc]
        async def _pass(self, client: Client, model: Tree, weights: Tree) -> tuple[Tree, float]:
            found = await super()._pass(client, model, weights)
            seen.append(found[1])
            return found  # type: ignore[no-any-return]

    toy = toy_of(Counting(**algorithm.model_dump()), task=two_layers())
    toy.step([0, 1])
    toy.step([0])
    return len(seen)


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, [3, 2, 4]), ({"drop_last": True}, [2, 1, 3]), ({"min_local_steps": 9, "max_local_steps": 9}, [3, 2, 4])],
)
def test_a_pass_of_all_samples_has_the_mini_batches_of_an_epoch(
    options: dict[str, Any], steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, train = [], Client.train

    async def spy(client: Client, *args: Any, **given: Any) -> Tree:
        if given.get("stream") == STREAM:
            taken.append(given["steps"])
        return await train(client, *args, **given)

    monkeypatch.setattr(Client, "train", spy)
    settings = TRAIN.model_copy(update={"batch_size": 4, **options})
    toy = Toy(FedALA(data_share=1.0, start_passes=1), random_clients([10, 6, 15]), two_layers(), settings)
    toy.step([0, 1, 2])
    toy.step([0, 1, 2])
    assert taken == steps


def test_the_start_ends_when_the_loss_has_settled() -> None:
    assert passes(FedALA(start_threshold=1e3)) == 11
    assert passes(FedALA(start_threshold=1e3, start_window=3)) == 4
    assert passes(FedALA(start_threshold=1e-12, start_passes=25, weight_lr=1e-3)) == 25
    assert passes(FedALA(start_threshold=None, start_passes=7)) == 7


def test_losses_that_are_not_finite_do_not_end_the_start_and_training_says_that_it_diverged() -> None:
    toy = toy_of(FedALA(), task=two_layers())
    toy.step([0, 1])
    states = toy.client_hosts[0].states
    state = states.all()[0]
    states.replace(0, {**state, "upper": map_leaves(lambda leaf: leaf + 1e308, state["upper"])}, toy.round)
    with pytest.raises(ClientError, match=r"client 0, round 2, local_update: non-finite values"):
        toy.step([0])


def test_evaluated_is_the_mixture_for_the_latest_model_and_nothing_is_kept() -> None:
    toy = toy_of(Recorded(**BRIEF))
    for cohort in COHORTS:
        toy.step(cohort)
    before = copy(toy.states())
    CALLS.clear()
    scores = toy.scores()
    assert_equal(toy.states(), before)
    assert [client for client, *_ in CALLS] == [0, 1, 2, 3]
    for client, received, weights, begun in CALLS:
        assert_equal(received, toy.server["model"])
        assert abs(scores[client]["personalized"].loss - loss_of(toy, begun, client)) < 1e-12
        assert (weights is None) == (client == 3)
    assert scores[3]["personalized"].vector.tolist() == scores[3]["global"].vector.tolist()
    assert scores[0]["personalized"].loss != scores[0]["global"].loss


def test_what_it_cannot_run_with_is_refused() -> None:
    toy = toy_of(FedALA(), task=two_layers())
    with pytest.raises(ConfigError, match=r"algorithm\.layers is 3, but the model trains 2 layers"):
        FedALA(layers=3).check(toy.task, toy.context)
    FedALA(layers=2).check(toy.task, toy.context)
    clipped = toy_of(FedALA(), TRAIN.model_copy(update={"max_grad_norm": 1.0}))
    with pytest.raises(ConfigError, match=r"train\.max_grad_norm=null"):
        FedALA().check(clipped.task, clipped.context)


def test_vectorized_agrees_with_looped_also_in_the_start() -> None:
    looped, stacked = (toy_of(FedALA(layers=2), task=two_layers(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1], [0, 1, 2, 3], [0, 1, 2, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort))
    assert_close(looped.states(), stacked.states())


@pytest.mark.slow
def test_keeps_the_own_head_of_clients_that_label_differently() -> None:
    train = TRAIN.model_copy(update={"rounds": 15, "clients_per_round": 6, "local_epochs": 3, "batch_size": 10})
    accuracy = {}
    for algorithm, row in ((FedALA(weight_lr=10.0), "personalized"), (FedAvg(), "global")):
        toy = Toy(algorithm, planted_clients("head"), two_layers(12, 8), train, mode="vectorized")
        toy.run()
        accuracy[algorithm.name] = held_out_accuracy(toy, row)
    assert accuracy["fedala"] > accuracy["fedavg"] + 0.1, accuracy
