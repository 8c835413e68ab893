"""PFL-DA: invariants PDA of encoders and heads, whole rounds against an oracle, messages, rows, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.lg_fedavg import LGFedAvg
from algorithms.pfl_da import PFLDA
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree
from tests.support.partial_toys import (
    TRAIN,
    held_out_accuracy,
    initial,
    labelled,
    partly_fixed,
    planted_clients,
    take,
    three_layers,
)
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

SEVERAL = ([0, 1, 0, 1, 1, 2], [1, 1], [2, 0, 2, 2], [0, 0, 1])
COHORTS = ([0, 2], [1, 2], [0, 1, 2], [1, 0])
"""Client 3 is never sampled."""


def several(algorithm: Any, **options: Any) -> Toy:
    return Toy(algorithm, labelled(*SEVERAL), **{"task": two_layers(), "train": TRAIN, **options})


class Oracle:
    """The whole method with two optimizers and loops, in plain PyTorch."""

    def __init__(self, toy: Toy, weight: float, uniform: bool) -> None:
        self.toy, self.weight, self.uniform = toy, weight, uniform
        self.head = take(initial(toy), toy.task.network.head_names)
        self.first = {name: leaf for name, leaf in initial(toy).items() if name not in self.head}
        self.encoders: dict[int, Tree] = {}
        self.heads: dict[int, Tree] = {}

    def round(self, number: int, cohort: list[int]) -> None:
        sent = [self.trained(number, client) for client in cohort]
        sizes = [1 if self.uniform else len(SEVERAL[client]) for client in cohort]
        self.head = {
            name: torch.stack([n / sum(sizes) * one[name] for n, one in zip(sizes, sent, strict=True)]).sum(0)
            for name in self.head
        }

    def trained(self, number: int, client: int) -> Tree:
        part, received = self.toy.dataset.load(client)["train"], self.head
        encoder = moving(self.encoders.get(client, self.first))
        shared, own = moving(received), moving(self.heads.get(client, take(initial(self.toy), received)))
        options: dict[str, float] = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.01}
        first = torch.optim.SGD([*encoder.values(), *shared.values()], **options)  # type: ignore[arg-type]
        second = torch.optim.SGD(list(own.values()), **options)  # type: ignore[arg-type]
        streams = self.toy.context.streams.generator("batches", number, client)
        for index in plan_batches(len(part.y), 4, 2 * -(-len(part.y) // 4), streams).batches(CPU):
            features = torch.relu(F.linear(part.x[index], encoder["inner.weight"], encoder["inner.bias"]))
            near = sum((own[name] - received[name]).square().sum() for name in own)
            for optimizer, loss in (
                (first, F.cross_entropy(linear(shared, features), part.y[index])),
                (
                    second,
                    F.cross_entropy(linear(own, features.detach()), part.y[index]) + self.weight / 2 * near,
                ),
            ):
                optimizer.zero_grad()
                loss.backward()
            first.step()
            second.step()
        self.encoders[client], self.heads[client] = fixed(encoder), fixed(own)
        return fixed(shared)


def moving(tree: Tree) -> Tree:
    return {name: leaf.clone().requires_grad_() for name, leaf in tree.items()}


def fixed(tree: Tree) -> Tree:
    return {name: leaf.detach() for name, leaf in tree.items()}


def linear(head: Tree, features: Tensor) -> Tensor:
    return F.linear(features, head["head.weight"], head["head.bias"])


@pytest.mark.parametrize("weight", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
def test_inv_pda_1_rounds_are_those_of_an_oracle_in_plain_pytorch(weight: float, aggregation: Any) -> None:
    toy = several(PFLDA(proximal_weight=weight, aggregation=aggregation))
    oracle = Oracle(toy, weight, aggregation == "uniform")
    for number, cohort in enumerate(COHORTS):
        toy.step(cohort)
        oracle.round(number, sorted(cohort))
        assert_close(toy.server["shared"], oracle.head, 1e-12)
    for client in range(3):
        assert_close(toy.states()[client]["personal"], oracle.encoders[client], 1e-12)
        assert_close(toy.states()[client]["head"], oracle.heads[client], 1e-12)
    assert 3 not in toy.states()


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_pda_2_encoders_and_shared_head_are_those_of_lg_fedavg(make: Any) -> None:
    for weight in (0.0, 5.0):
        ours = several(PFLDA(proximal_weight=weight), task=make())
        theirs = several(LGFedAvg(), task=make())
        for cohort in COHORTS:
            assert_close(ours.step(cohort), theirs.step(cohort), 1e-12)
        for client, state in theirs.states().items():
            assert_close(ours.states()[client]["personal"], state["personal"], 1e-12)
        for client, rows in theirs.scores().items():
            assert abs(ours.scores()[client]["shared"].loss - rows["personalized"].loss) < 1e-12


def test_inv_pda_3_a_heavier_proximal_term_holds_the_own_head_nearer() -> None:
    train = TRAIN.model_copy(update={"momentum": 0.0, "weight_decay": 0.0})
    apart = []
    for weight in (0.0, 1.0, 9.0):
        toy = several(PFLDA(proximal_weight=weight), train=train)
        toy.step([0, 1, 2, 3])
        received = toy.server["shared"]
        toy.step([0, 1, 2, 3])
        own = [toy.states()[client]["head"] for client in range(4)]
        apart.append(sum(float((head[name] - received[name]).square().sum()) for head in own for name in head))
    assert apart[0] > 1.2 * apart[1] > 5 * apart[2], apart


def test_inv_pda_4_one_step_with_unit_weight_and_rate_ends_at_the_received_head_less_the_slope() -> None:
    # P - eta (g + lambda (P - W)) = W - eta g where eta lambda = 1
    train = TrainConfig(rounds=2, clients_per_round=2, local_epochs=1, lr=0.1, batch_size=100)
    toy = several(PFLDA(proximal_weight=10.0), train=train)
    toy.step([0, 2])
    before, received = toy.states()[0], toy.server["shared"]
    toy.step([0, 2])
    part = toy.dataset.load(0)["train"]
    own = moving(before["head"])
    features = torch.relu(F.linear(part.x, before["personal"]["inner.weight"], before["personal"]["inner.bias"]))
    F.cross_entropy(linear(own, features), part.y).backward()
    for name, leaf in own.items():
        assert leaf.grad is not None
        assert_close(toy.states()[0]["head"][name], received[name] - 0.1 * leaf.grad, 1e-12)


def test_messages_are_the_head_alone() -> None:
    toy = several(PFLDA())
    for cohort in COHORTS:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (8 * 24, 8 * 24))
    assert set(toy.server) == {"shared"} and set(toy.server["shared"]) == {"head.weight", "head.bias"}


def test_rows() -> None:
    toy = several(PFLDA())
    for step in range(3):
        if step:
            toy.step([0, 2])
        for client, rows in toy.scores().items():
            part, state = toy.dataset.load(client)["test"], toy.states().get(client, {})
            model = {**initial(toy), **state.get("personal", {})}
            for row, head in (("personalized", state.get("head", {})), ("shared", toy.server["shared"])):
                logits = toy.task.network.logits({**model, **head}, part.x, training=False)
                assert abs(rows[row].loss - float(F.cross_entropy(logits, part.y))) < 1e-12
            assert set(rows) == {"personalized", "shared"}


def test_newcomers_train_as_in_a_round() -> None:
    toy = several(PFLDA(), unseen=1)
    toy.step([0, 2])
    before = toy.server
    trained = toy.scores(newcomers=True)[3]["personalized"].loss
    assert_equal(toy.server, before)
    assert 3 not in toy.states()
    idle = several(PFLDA(), unseen=1, unseen_epochs=0)
    idle.step([0, 2])
    assert trained < idle.scores(newcomers=True)[3]["personalized"].loss


@pytest.mark.slow
def test_inv_pda_5_own_heads_serve_clients_of_which_each_names_the_classes_in_its_own_way() -> None:
    train = TRAIN.model_copy(update={"local_epochs": 3})
    toy = Toy(PFLDA(proximal_weight=0.1), planted_clients("head"), two_layers(inputs=12), train)
    for _ in range(8):
        toy.step(range(8))
    assert held_out_accuracy(toy, "personalized") > 0.55
    assert held_out_accuracy(toy, "personalized") >= held_out_accuracy(toy, "shared") - 0.02


def test_models_without_a_head_or_a_body_that_is_trained_are_refused_and_clipping_is_remarked() -> None:
    toy = several(PFLDA())
    with pytest.raises(ConfigError, match=r"PFL-DA needs the last layer's weight to be trained"):
        PFLDA().check(partly_fixed("head.weight"), toy.context)
    names = [name for name in two_layers().network.parameter_names if name not in two_layers().network.head_names]
    with pytest.raises(ConfigError, match=r"no body is left"):
        PFLDA().check(partly_fixed(*names), toy.context)
    PFLDA().check(toy.task, toy.context)
    assert PFLDA().remarks(toy.context) == ()
    clipped = several(PFLDA(), train=TRAIN.model_copy(update={"max_grad_norm": 1.0}))
    assert "the client's own head together" in PFLDA().remarks(clipped.context)[0]


EDGES = {
    "ragged": SEVERAL,
    "single samples": ([0], [1], [2], [1]),
    "one class a client": ([0, 0, 0], [1, 1], [2] * 6, [0]),
}


@pytest.mark.parametrize("edge", list(EDGES))
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "momentum": 0.0, "lr": 0.01}])
def test_vectorized_agrees_with_looped_and_all_is_finite(
    edge: str, batch_size: int, optimizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    train = TrainConfig.model_validate({**TRAIN.model_dump(), "batch_size": batch_size, **optimizer})
    data = labelled(*EDGES[edge])
    looped, stacked = (Toy(PFLDA(), data, two_layers(), train, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-9)
        assert all(leaf.isfinite().all() for leaf in looped.server["shared"].values())
    assert_close(looped.states(), stacked.states(), 1e-9)
    assert all(math.isfinite(rows["personalized"].loss) for rows in looped.scores().values())
    assert "failed together" not in caplog.text
