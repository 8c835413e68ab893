"""FedSelect: invariants SEL, rounds against plain loops, which elements are chosen, and what travels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedselect import FedSelect, grown
from algorithms.local import Local
from algorithms.parts.shared_elements import mean_of_sharing
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, num_bytes
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
COHORTS = ([0, 1, 2], [1, 3], [0, 1, 3], [0, 1, 2, 3])
WEIGHTS = ("inner.weight", "head.weight")
BIASES = ("inner.bias", "head.bias")


def toy_of(algorithm: Any, task: Any = None, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def after(algorithm: Any, **options: Any) -> Toy:
    toy = toy_of(algorithm, **options)
    for cohort in COHORTS:
        toy.step(cohort)
    return toy


def loss_of(model: Tree, x: Tensor, y: Tensor) -> Tensor:
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    return F.cross_entropy(hidden @ model["head.weight"].T + model["head.bias"], y)


class Plain:
    """FedSelect in plain PyTorch: SGD whose steps are undone wherever an element stands still."""

    def __init__(self, method: FedSelect, toy: Toy) -> None:
        self.method, self.toy = method, toy
        self.server: Tree = toy.server["model"]
        names = (*WEIGHTS, *BIASES) if method.biases else WEIGHTS
        self.empty = {name: torch.zeros_like(self.server[name], dtype=torch.bool) for name in names}
        self.masks: dict[int, Tree] = {}
        self.owned: dict[int, Tree] = {}
        self.own: dict[int, Tree] = {}

    def steps(self, model: Tree, moving: Tree, client: int, round: int, stream: str, epochs: int) -> Tree:
        """Returns the model after epochs on the elements where ``moving`` is true."""
        samples = self.toy.dataset.load(client)["train"]
        generator = self.toy.context.streams.generator(f"batches{stream}", round, client)
        plan = plan_batches(len(samples.y), 4, epochs * -(-len(samples.y) // 4), generator)
        speed = {name: torch.zeros_like(leaf) for name, leaf in model.items()}
        for index in plan.batches(CPU):
            leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
            loss_of(leaves, samples.x[index], samples.y[index]).backward()
            for name, leaf in model.items():
                gradient = leaves[name].grad
                assert gradient is not None
                speed[name] = 0.5 * speed[name] + gradient + 0.01 * leaf
                model = {**model, name: leaf - 0.1 * speed[name] * moving[name]}
        return model

    def update(self, model: Tree, mask: Tree, client: int, round: int) -> Tree:
        whole = {name: mask.get(name, torch.zeros_like(leaf, dtype=torch.bool)) for name, leaf in model.items()}
        others = {name: ~inside for name, inside in whole.items()}
        if not any(inside.any() for inside in whole.values()):
            return self.steps(model, others, client, round, "", 2)
        if all(inside.all() for inside in whole.values()):
            return self.steps(model, whole, client, round, "", 2)
        for turn in range(1 if self.method.turns == "once" else 2):
            suffix, epochs = f".{turn}" if turn else "", 2 if self.method.turns == "once" else 1
            model = self.steps(model, whole, client, round, f".own{suffix}", epochs)
            model = self.steps(model, others, client, round, suffix, epochs)
        return model

    def choice(self, mask: Tensor, change: Tensor) -> Tensor:
        """Returns the mask with the largest changes, one after the other."""
        chosen, values = mask.flatten().tolist(), change.flatten().tolist()
        left = min(
            round(self.method.rate * chosen.count(False)),
            int(self.method.limit * len(chosen) + 1e-9) - chosen.count(True),
        )
        for place in sorted(range(len(values)), key=lambda i: -values[i]):
            if not chosen[place] and left > 0:
                chosen[place], left = True, left - 1
        return torch.tensor(chosen).view(mask.shape)

    def round(self, round: int, cohort: list[int]) -> None:
        sums = {name: torch.zeros_like(leaf) for name, leaf in self.server.items()}
        counts = {name: torch.zeros_like(leaf) for name, leaf in self.server.items()}
        for client in cohort:
            mask, model = self.masks.get(client, self.empty), self.personal(client)
            trained = self.update(model, mask, client, round)
            new = mask
            if (round + 1) % self.method.choose_every == 0:
                new = {name: self.choice(mask[name], (trained[name] - model[name]).abs()) for name in mask}
            self.masks[client], self.own[client] = new, trained
            self.owned[client] = mask if self.method.first_value == "mean" else new
            weight = 1 if self.method.aggregation == "uniform" else SIZES[client]
            for name, leaf in trained.items():
                shared = ~self.owned[client][name] if name in mask else torch.ones_like(leaf)
                sums[name], counts[name] = sums[name] + weight * shared * leaf, counts[name] + weight * shared
        if self.method.aggregation == "population":
            weight = sum(SIZES[client] for client in range(4) if client not in cohort)
            sums = {name: total + weight * self.server[name] for name, total in sums.items()}
            counts = {name: total + weight for name, total in counts.items()}
        self.server = {
            name: torch.where(counts[name] > 0, total / counts[name], self.server[name]) for name, total in sums.items()
        }

    def personal(self, client: int) -> Tree:
        owned = self.owned.get(client, self.empty)
        return {
            name: torch.where(owned[name], self.own[client][name], leaf)
            if name in owned and client in self.own
            else leaf
            for name, leaf in self.server.items()
        }


SETTINGS = {
    "default": {},
    "own": {"first_value": "own", "rate": 0.5},
    "once": {"turns": "once", "rate": 0.4, "limit": 0.6, "aggregation": "uniform"},
    "biases": {"biases": True, "rate": 0.9, "limit": 1, "aggregation": "population"},
    "all": {"biases": True, "rate": 1, "limit": 1},
    "rarely": {"choose_every": 2, "rate": 0.3, "first_value": "own"},
}


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("name", SETTINGS)
def test_inv_sel_1_rounds_are_those_of_plain_loops(name: str, mode: str) -> None:
    method = FedSelect(**SETTINGS[name])
    toy = toy_of(method, mode=mode)
    plain = Plain(method, toy)
    for round, cohort in enumerate(COHORTS):
        toy.step(cohort)
        plain.round(round, cohort)
        assert_close(toy.server["model"], plain.server, 1e-12)
        for client, state in toy.states().items():
            assert_equal(state["mask"], plain.masks[client])
            assert_close(state["model"], {n: plain.own[client][n] for n in plain.empty}, 1e-12)
    for client, rows in toy.scores().items():
        examples = toy.dataset.load(client)["test"]
        expected = float(loss_of(plain.personal(client), examples.x, examples.y))
        assert rows["personalized"].loss == pytest.approx(expected, rel=1e-12)
        assert rows["global"].loss == pytest.approx(float(loss_of(plain.server, examples.x, examples.y)), rel=1e-12)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
@pytest.mark.parametrize("nothing", ["rate", "limit"])
def test_inv_sel_2_if_nothing_is_chosen_it_is_fedavg(nothing: str, policy: Any, mode: str) -> None:
    toy = after(FedSelect(aggregation=policy, **{nothing: 0}), mode=mode)
    plain = after(FedAvg(aggregation=policy), mode=mode)
    assert_equal(toy.server["model"], plain.server["model"])
    for rows in toy.scores().values():
        assert rows["personalized"].vector.tolist() == rows["global"].vector.tolist()


def test_inv_sel_3_a_client_that_keeps_everything_at_once_trains_alone() -> None:
    toy = after(FedSelect(rate=1, limit=1, biases=True, first_value="own"))
    alone = after(Local())
    for client, state in toy.states().items():
        own = dict(toy.algorithm.assembled(Stated(state), toy.server["model"]))  # type: ignore[attr-defined]
        assert_equal(own, alone.states()[client]["local"])
    initial = toy_of(FedAvg()).server["model"]
    assert_equal(toy.server["model"], initial)  # nobody has shared anything


class Stated:
    """A client of which only the state counts."""

    def __init__(self, state: Tree) -> None:
        self.state = state


def test_inv_sel_4_masks_grow_by_a_share_of_the_rest_up_to_the_limit() -> None:
    toy = toy_of(FedSelect(rate=0.3, limit=0.55))
    counts = {name: [0] for name in WEIGHTS}
    before: Tree = {}
    for _ in range(5):
        toy.step([0, 1, 2])
        masks = toy.states()[0]["mask"]
        for name in WEIGHTS:
            counts[name].append(int(masks[name].sum()))
            assert not before or not (before[name] & ~masks[name]).any(), "no element leaves"
        before = masks
    for name in WEIGHTS:
        size = before[name].numel()
        for had, has in pairwise(counts[name]):
            assert has == min(had + round(0.3 * (size - had)), int(0.55 * size))
        assert counts[name][-1] == int(0.55 * size)


def test_inv_sel_5_the_elements_that_moved_most_are_chosen() -> None:
    none = torch.zeros(2, 3, dtype=torch.bool)
    change = torch.tensor([[0.1, 5.0, 0.3], [2.0, 0.0, 0.3]])
    assert grown(none, change, 0.5, 1.0).tolist() == [[False, True, True], [True, False, False]]
    once = grown(none, change, 0.4, 1.0)
    assert once.tolist() == [[False, True, False], [True, False, False]]
    assert grown(once, change, 1.0, 0.5).sum() == 3
    assert grown(once, change, 1.0, 0.2) is once, "a mask that has more than the limit stays as it is"
    assert grown(once, change, 0.0, 1.0) is once
    assert grown(none, change, 1.0, 1.0).all()


def test_the_mean_is_over_those_who_share() -> None:
    mean, old = {"w": torch.tensor([3.0, 0.5, 0.0]), "b": torch.tensor([2.0])}, {"w": torch.tensor([9.0, 8.0, 7.0])}
    found = mean_of_sharing(mean, {"w": torch.tensor([1.0, 0.25, 0.0])}, old)
    assert_equal(found, {"w": torch.tensor([3.0, 2.0, 7.0]), "b": torch.tensor([2.0])})


def test_own_elements_never_travel_and_their_bytes_do_not_count() -> None:
    toy = toy_of(FedSelect(rate=0.5, limit=0.5))
    size = num_bytes(toy.server["model"])
    toy.step([0, 1, 2])
    assert (toy.federation.traffic.down, toy.federation.traffic.up) == (3 * size, 3 * size)
    masks = toy.states()[0]["mask"]
    toy.step([0, 1, 2])
    own = sum(int(mask.sum()) for mask in masks.values())
    bits = sum(-(-mask.numel() // 8) for mask in masks.values())
    assert (toy.federation.traffic.down, toy.federation.traffic.up) == (3 * size, 3 * (size - 8 * own + bits))


def test_what_nobody_shares_stays_at_the_server() -> None:
    toy = toy_of(FedSelect(rate=1, limit=1, first_value="own"))
    before = dict(toy.server["model"])
    toy.step([0, 1])
    for name in WEIGHTS:
        assert torch.equal(toy.server["model"][name], before[name])
    assert not torch.equal(toy.server["model"]["head.bias"], before["head.bias"])


@pytest.mark.parametrize("biases", [False, True])
def test_buffers_and_private_layers_have_no_masks(biases: bool) -> None:
    method, task = FedSelect(biases=biases, rate=0.5), normalized_layers()
    shared = toy_of(method, task)
    private = toy_of(method, task, TRAIN.model_copy(update={"private_norm": "all"}))
    for toy in (shared, private):
        for cohort in COHORTS:
            toy.step(cohort)
    masks, fewer = set(shared.states()[0]["mask"]), set(private.states()[0]["mask"])
    names = set(task.network.parameter_names)
    assert masks == {name for name in names if biases or not name.endswith("bias")}
    assert fewer == masks - set(task.network.norm_names)
    for name in task.network.buffer_names:
        assert torch.isfinite(shared.server["model"][name]).all()


@pytest.mark.parametrize("name", ["default", "once"])
def test_looped_and_vectorised_agree_with_batch_normalization(name: str) -> None:
    toys = [
        after(FedSelect(**SETTINGS[name]), task=normalized_layers(), mode=mode) for mode in ("looped", "vectorized")
    ]
    assert_close(*(toy.server for toy in toys), 1e-10)
    assert_close(*({str(k): state for k, state in toy.states().items()} for toy in toys), 1e-10)


def test_stragglers_and_limits_of_steps_bound_both_parts_alike() -> None:
    """One step: a client moves its own elements once, and the others once."""
    train = TRAIN.model_copy(update={"max_local_steps": 1, "momentum": 0.0, "weight_decay": 0.0})
    toy = toy_of(FedSelect(rate=0.5), train=train)
    toy.step([0, 1, 2])
    start, masks = toy.algorithm.assembled(Stated(toy.states()[0]), toy.server["model"]), toy.states()[0]["mask"]  # type: ignore[attr-defined]
    toy.step([0, 1, 2])
    samples, model = toy.dataset.load(0)["train"], start
    for stream, inside in ((".own", True), ("", False)):
        plan = plan_batches(8, 4, 1, toy.context.streams.generator(f"batches{stream}", 1, 0))
        index = plan.batches(CPU)[0]
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
        loss_of(leaves, samples.x[index], samples.y[index]).backward()
        for name, leaf in leaves.items():
            moves = masks[name] == inside if name in masks else torch.tensor(not inside)
            assert leaf.grad is not None
            model = {**model, name: model[name] - 0.1 * leaf.grad * moves}
    assert_close(toy.states()[0]["model"], {name: model[name] for name in WEIGHTS}, 1e-12)
