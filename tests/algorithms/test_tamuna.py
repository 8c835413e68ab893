"""TAMUNA: an oracle with plain loops, sums of control variates, masks, optima, what travels, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.parts.coordinate_shares import Share
from algorithms.scaffnew import Scaffnew
from algorithms.tamuna import Tamuna
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, num_bytes
from tests.support.toy_networks import normalized_layers, softmax_regression, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 1, 10, 7)
COHORTS = ([0, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3, 4], [4, 1], [2, 0, 3], [0, 1, 4])
TRAIN = TrainConfig(rounds=6, clients_per_round=3, batch_size=4, lr=0.1, lr_decay=0.9, weight_decay=0.01)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), train, **options)


def template(dimension: int, cohort: int, senders: int) -> np.ndarray:
    """The pattern of zeros and ones before its columns are shuffled, shape (d, c)."""
    found = np.zeros((dimension, cohort), dtype=bool)
    for i in range(dimension):
        for j in range(senders):
            found[i, (senders * i + j) % cohort] = True
    return found


def flat(tree: Any, names: Any) -> Tensor:
    return torch.cat([torch.as_tensor(tree[name]).flatten() for name in names])


class Oracle:
    """Algorithm 1, one vector of parameters for each client."""

    def __init__(self, toy: Toy, method: Tamuna) -> None:
        self.toy, self.method, self.network = toy, method, toy.task.network
        self.names = self.network.parameter_names
        self.shapes = {name: toy.server["model"][name].shape for name in self.names}
        self.x = flat(toy.server["model"], self.names)
        self.control = [torch.zeros_like(self.x) for _ in SIZES]

    def tree(self, vector: Tensor) -> Tree:
        pieces = torch.split(vector, [shape.numel() for shape in self.shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    def step(self, round: int, cohort: list[int]) -> None:
        streams, lr = self.toy.context.streams, 0.1 * 0.9**round
        length, c, s = self.method.steps(self.toy.context, round), len(cohort), min(self.method.senders, len(cohort))
        order = streams.generator("mask", round).permutation(c)
        masks = torch.from_numpy(template(len(self.x), c, s)[:, order])
        own = {}
        for k in cohort:
            data, x = self.toy.dataset.load(k)["train"], self.x.clone()
            for index in plan_batches(SIZES[k], 4, length, streams.generator("batches", round, k)).batches(CPU):
                leaf = x.clone().requires_grad_()
                loss = F.cross_entropy(self.network.logits(self.tree(leaf), data.x[index]), data.y[index])
                (gradient,) = torch.autograd.grad(loss, leaf)
                x = x - lr * (gradient + 0.01 * x - self.control[k])
            own[k] = x
        total = torch.zeros_like(self.x)
        for column, k in enumerate(sorted(cohort)):
            total += torch.where(masks[:, column], own[k], 0.0)
        self.x = total / s
        n, p = len(SIZES), self.method.communication_probability
        eta = p * n * (s - 1) / (s * (n - 1)) if self.method.control_step is None else self.method.control_step
        for column, k in enumerate(sorted(cohort)):
            self.control[k] += eta / lr * torch.where(masks[:, column], self.x - own[k], 0.0)


@pytest.mark.parametrize(
    "options", [{}, {"senders": 3, "control_step": 0.2}, {"senders": 2, "communication_probability": 1.0}]
)
@MODES
def test_inv_tamuna_1_rounds_are_those_of_an_oracle_with_plain_loops(options: dict[str, Any], mode: str) -> None:
    method = Tamuna(**{"communication_probability": 0.3, **options})
    toy = toy_of(method, mode=mode)
    oracle = Oracle(toy, method)
    for round, cohort in enumerate(COHORTS):
        oracle.step(round, cohort)
        toy.step(cohort)
        assert_close(flat(toy.server["model"], oracle.names), oracle.x, 1e-12)
        for k, state in toy.states().items():
            if state:
                assert_close(flat(state["control"], oracle.names), oracle.control[k], 1e-11)
    assert max(float(one.abs().max()) for one in oracle.control) > 1e-2


def test_inv_tamuna_2_control_variates_cancel_and_clients_that_were_away_keep_theirs() -> None:
    toy = toy_of(Tamuna(communication_probability=0.5))
    names, before = toy.task.network.parameter_names, dict[int, Tree]((k, {}) for k in range(5))
    for cohort in COHORTS:
        toy.step(cohort)
        states = {k: copy(state) for k, state in toy.states().items()}
        total = sum((flat(state["control"], names) for state in states.values() if state), torch.tensor(0.0))
        assert float(total.abs().max()) < 1e-12
        for k in set(range(5)) - set(cohort):
            assert_equal(states.get(k, {}), before[k])
        before = {k: states.get(k, {}) for k in range(5)}


@MODES
def test_inv_tamuna_3_where_all_send_everything_it_is_scaffnew(mode: str) -> None:
    train = TRAIN.model_copy(update={"clients_per_round": "all"})
    ours = toy_of(Tamuna(communication_probability=0.3, senders=5), train, mode=mode)
    scaffnew = toy_of(Scaffnew(communication_probability=0.3), train, mode=mode)
    for _ in range(4):
        assert_close(ours.step(range(5))["model"], scaffnew.step(range(5))["model"], 1e-12)


@pytest.mark.slow
def test_inv_tamuna_4_it_reaches_the_optimum_of_all_with_some_of_the_clients_and_coordinates() -> None:
    """Where federated averaging, with as many steps, stays apart from it."""
    train = TrainConfig(rounds=400, clients_per_round=3, batch_size=None, lr=1.0, weight_decay=0.1)
    distances = []
    two = {"local_epochs": 2}
    for method, changes in ((Tamuna(communication_probability=0.5), {}), (FedAvg(aggregation="uniform"), two)):
        toy = Toy(method, random_clients((8, 12, 6, 9)), softmax_regression(), train.model_copy(update=changes))
        toy.run(200)
        slopes = []
        for k in range(4):
            part = toy.dataset.load(k)["train"]
            leaves = {name: leaf.clone().requires_grad_() for name, leaf in toy.server["model"].items()}
            loss = F.cross_entropy(toy.task.network.logits(leaves, part.x), part.y)
            parts = torch.autograd.grad(loss, list(leaves.values()))
            slopes.append([g + 0.1 * leaf.detach() for g, leaf in zip(parts, leaves.values(), strict=True)])
        distances.append(max(float(sum(of_all).abs().max()) / 4 for of_all in zip(*slopes, strict=True)))
    assert distances[0] < 1e-9 < 1e-4 < distances[1]


@pytest.mark.parametrize(("cohort", "senders"), [(5, 2), (6, 4), (4, 4), (9, 6), (50, 3), (7, 1)])
def test_inv_tamuna_5_as_many_send_each_coordinate_and_all_as_many(cohort: int, senders: int) -> None:
    """Also where there are fewer coordinates than it takes for every client to send one (d < c / s)."""
    tree = {"a": torch.zeros(2, 3), "b": torch.zeros(()), "c": torch.zeros(4, dtype=torch.float64)}
    shares = [Share(place, cohort, senders, tuple(tree)) for place in range(cohort)]
    masks = [flat(share.mask(tree), tree) for share in shares]
    assert torch.equal(torch.stack(masks, 1), torch.from_numpy(template(11, cohort, senders)))
    counts = [int(mask.sum()) for mask in masks]
    assert sum(counts) == 11 * senders and max(counts) - min(counts) <= 1
    sizes = [4 * int(mask[:7].sum()) + 8 * int(mask[7:].sum()) for mask in masks]
    assert [share.num_bytes(tree) for share in shares] == sizes


def test_inv_tamuna_6_what_travels_is_the_model_and_twice_a_part_of_it() -> None:
    toy = toy_of(Tamuna(senders=2))
    size, names = num_bytes(toy.server["model"]), toy.task.network.parameter_names
    toy.step([0, 1, 3, 4])
    order = toy.context.streams.generator("mask", 0).permutation(4)
    for place, k in zip(order, (0, 1, 3, 4), strict=True):
        part = Share(int(place), 4, 2, names).num_bytes(toy.server["model"])
        assert part in (size // 2, size // 2 + 8)
        assert toy.federation.traffic.by_client[k] == (size + 16 + part, part)
    assert set(toy.states()[0]) == {"control"} and set(toy.server) == {"model"}


def test_a_learning_rate_of_0_changes_nothing() -> None:
    toy = toy_of(Tamuna(), TRAIN.model_copy(update={"lr": 0.0}))
    before = copy(toy.server)
    for cohort in COHORTS[:2]:
        assert_close(toy.step(cohort), before, 1e-15)
    assert not any(torch.as_tensor(leaf).any() for leaf in toy.states()[2]["control"].values())


def test_buffers_are_averaged_over_all_and_have_no_control_variate() -> None:
    """As in federated averaging with one local step."""
    method = Tamuna(communication_probability=1.0)
    one = TRAIN.model_copy(update={"max_local_steps": 1})
    toy = Toy(method, random_clients((8, 12, 6)), normalized_layers(), TRAIN)
    plain = Toy(FedAvg(aggregation="uniform"), random_clients((8, 12, 6)), normalized_layers(), one)
    ours, theirs = toy.step(range(3))["model"], plain.step(range(3))["model"]
    buffers = toy.task.network.buffer_names
    assert buffers and set(toy.states()[0]["control"]) == set(toy.task.network.parameter_names)
    assert_close({name: ours[name] for name in buffers}, {name: theirs[name] for name in buffers}, 1e-14)


def test_masks_are_others_in_every_round() -> None:
    context = toy_of(Tamuna()).context
    orders = {tuple(context.streams.generator("mask", round).permutation(5)) for round in range(30)}
    assert len(orders) > 15


def test_the_step_of_control_variates() -> None:
    assert Tamuna(communication_probability=0.2).step_of(2, 5) == pytest.approx(0.2 * 5 / (2 * 4))
    assert Tamuna(communication_probability=0.2).step_of(5, 5) == pytest.approx(0.2)
    assert Tamuna().step_of(1, 5) == 0
    assert Tamuna(control_step=0.01).step_of(2, 5) == 0.01


def test_what_is_undefined_is_refused() -> None:
    toy = toy_of(Tamuna())
    Tamuna(senders=3).check(toy.task, toy.context)
    refused: list[tuple[int, dict[str, Any], str]] = [
        (4, {}, r"algorithm\.senders=4 clients, and a round may have 3"),
        (2, {"clients_per_round": 1}, r"a round may have 1 \(section train\)"),
        (2, {"momentum": 0.9}, r"TAMUNA takes plain gradient steps, but train\.momentum is 0\.9: set it to 0"),
        (2, {"optimizer": "adam"}, r"TAMUNA needs train\.optimizer=sgd, not adam"),
    ]
    for senders, changes, words in refused:
        with pytest.raises(ConfigError, match=words):
            Tamuna(senders=senders).check(toy.task, toy_of(Tamuna(), TRAIN.model_copy(update=changes)).context)
    for wrong in ({"senders": 1}, {"control_step": 0.0}, {"communication_probability": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Tamuna(**wrong)


def test_remarks() -> None:
    changes = {"local_epochs": 3, "max_grad_norm": 1.0}
    epochs, clipped = Tamuna().remarks(toy_of(Tamuna(), TRAIN.model_copy(update=changes)).context)
    assert "train.local_epochs has no effect: algorithm.communication_probability" in epochs
    assert "train.max_grad_norm" in clipped
