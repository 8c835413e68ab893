"""FedWeIT: rounds in plain PyTorch, what earlier stages keep, what is sent and scored, both modes, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.fedweit import FedWeIT
from rayfl.data.partitions.stage import NoStages
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, leaves
from tests.support.partial_toys import three_layers
from tests.support.staged_toys import COHORTS, DATA, cross_entropy, logits_of, samples_of, staged_toy
from tests.support.toy_networks import softmax_regression, two_layers
from tests.support.toys import CPU, Toy, assert_close

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"sparsity_weight": 0.01},
    "all-terms": {"sparsity_weight": 0.02, "mask_weight": 0.03, "retention_weight": 0.7, "unsent_share": 0.6},
    "one-peer": {"peers": 1, "unsent_share": 0.0, "retention_weight": 0.0},
    "alone": {"peers": 0},
}
REST = ("inner.bias", "head.weight", "head.bias")


def theta(shared: Tensor, stage: dict[str, Any], pruned: float | None = None) -> Tree:
    """The model of a stage, unit by unit."""
    adaptive = stage["adaptive"]
    if pruned is not None:
        adaptive = adaptive * (adaptive.abs() > pruned)
    rows = [shared[u] / (1 + torch.exp(-stage["mask"][u])) + adaptive[u] for u in range(len(shared))]
    weight = torch.stack(rows)
    for alpha, other in zip(stage["attention"], stage["others"], strict=True):
        weight = weight + alpha * other
    return {"inner.weight": weight, **{name: stage[name] for name in REST}}


def restored(shared: Tensor, stage: dict[str, Any]) -> Tensor:
    found: Tensor = torch.sigmoid(stage["mask"])[:, None] * shared + stage["adaptive"]
    return found


def trained_by(method: FedWeIT, toy: Toy, round: int, k: int, one: dict[str, Any]) -> None:
    """A local update: what a client has, moved by PyTorch's own optimizer."""
    stage, past = one["stages"][-1], one["stages"][:-1]
    leaves = [one["shared"], *(stage[key] for key in ("mask", "adaptive", *REST)), *(old["adaptive"] for old in past)]
    leaves += [stage["attention"]] if len(stage["others"]) else []
    for leaf in leaves:
        leaf.requires_grad_()
    sgd = torch.optim.SGD(leaves, lr=0.1, momentum=0.5, weight_decay=0.01)
    x, y = samples_of(k, round // 2)
    generator = toy.context.streams.generator("batches", round, k)
    for index in plan_batches(len(y), 4, 2 * -(-len(y) // 4), generator).batches(CPU):
        sgd.zero_grad()
        value = cross_entropy(theta(one["shared"], stage), x[index], y[index])
        value = value + method.mask_weight * stage["mask"].abs().sum()
        for adaptive in (stage["adaptive"], *(old["adaptive"] for old in past)):
            value = value + method.sparsity_weight * adaptive.abs().sum()
        for old in past:
            apart = restored(one["shared"], old) - old["anchor"]
            value = value + method.retention_weight * (apart**2).sum()
        value.backward()
        sgd.step()
    for leaf in leaves:
        leaf.requires_grad_(False)


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_fedweit_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = FedWeIT(**SETTINGS[name])
    toy = staged_toy(method)
    initial = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    shared, ever = initial["inner.weight"], torch.zeros(7, dtype=torch.bool)
    base: dict[int, Tensor] = {}
    clients: dict[int, dict[str, Any]] = {}
    for round, cohort in enumerate(COHORTS):
        total, count, begun = torch.zeros_like(shared), torch.zeros(7), round // 2
        for k in cohort:
            one = clients.setdefault(k, {"stages": [], "seen": {}})
            before: Any = one.get("shared")
            one["shared"] = shared.clone() if before is None else torch.where(ever[:, None], shared, before).clone()
            if one.get("stage") != begun:
                for old in one["stages"]:
                    old["anchor"] = restored(before, old).clone()
                others = [j for j in sorted(base) if j != k]
                number = len(base) - 1 if method.peers is None else min(method.peers, len(base) - 1)
                drawn = toy.context.streams.generator("peers", begun, k)
                chosen = sorted(drawn.choice(len(others), number, replace=False).tolist()) if number > 0 else []
                stage = {name: initial[name].clone() for name in REST}
                stage |= {"mask": torch.zeros(7).double(), "adaptive": one["shared"] / 3}
                stage |= {"others": [base[others[i]] for i in chosen]}
                stage |= {"attention": torch.full((len(chosen),), 1 / max(len(chosen), 1)).double(), "stage": begun}
                one["stages"].append(stage)
                one["stage"] = begun
            one["seen"][begun] = one["stages"][-1]  # class s comes in stage s
            trained_by(method, toy, round, k, one)
            order = np.argsort(-one["stages"][-1]["mask"].abs().numpy(), kind="stable")
            for unit in order[: 7 - int(method.unsent_share * 7)].tolist():
                total[unit] += one["shared"][unit]
                count[unit] += 1
        shared = torch.where(count[:, None] > 0, total / count[:, None].clamp(min=1), shared)
        ever |= count > 0
        if round in (1, 3) and method.peers != 0:
            limit = method.sparsity_weight
            base = {k: clients[k]["stages"][-1]["adaptive"] for k in cohort}
            base = {k: leaf * (leaf.abs() > limit) for k, leaf in base.items()}
        server = toy.step(cohort)
        assert_close(server["shared"]["inner.weight"], shared, 1e-12)
        assert_close(server["sent"]["inner.weight"], ever.double(), 1e-12)
        if base:
            assert_close(
                {k: one["inner.weight"] for k, one in server["base"].items()},
                {str(k): b for k, b in base.items()},
                1e-12,
            )
        assert_scored(method, toy, clients)


def assert_scored(method: FedWeIT, toy: Toy, clients: dict[int, dict[str, Any]]) -> None:
    """What all clients are scored with, by the mean loss on their test samples of the stages so far."""
    for k, rows in toy.scores().items():
        part = DATA.load(k)["train"]
        there = part.y <= (toy.round - 1) // 2
        x, y = part.x[there], part.y[there]
        if k in clients:
            one = clients[k]
            models = [
                theta(one["shared"], one["seen"].get(c, one["stages"][-1]), method.sparsity_weight) for c in range(3)
            ]
            z = torch.stack([logits_of(model, x)[:, c] for c, model in enumerate(models)], 1)
            expected = torch.nn.functional.cross_entropy(z, y, reduction="sum")
            assert abs(rows["personalized"].loss * len(y) - expected.item()) < 1e-9


def test_inv_fedweit_2_a_large_weight_keeps_what_earlier_stages_were() -> None:
    moved = []
    for weight in (0.0, 2.0):
        toy = staged_toy(FedWeIT(retention_weight=weight, sparsity_weight=0.0))
        for cohort in COHORTS[:5]:
            toy.step([*cohort, 1] if 1 not in cohort else cohort)
        state = toy.states()[1]
        past = state["past"]["0"]
        now = torch.sigmoid(past["mask"]["inner.weight"])[:, None] * state["shared"]["inner.weight"]
        now = now + past["adaptive"]["inner.weight"]
        moved.append((now - past["anchor"]["inner.weight"]).norm().item())
    assert moved[1] < 0.7 * moved[0]


def test_inv_fedweit_3_without_stages_a_client_has_one_and_no_others() -> None:
    toy = staged_toy(FedWeIT(), stages=NoStages())
    for cohort in COHORTS[:3]:
        server = toy.step(cohort)
    assert "base" not in server
    assert all(state["stage"] == 0 and not state.get("past") for state in toy.states().values() if state)


def test_inv_fedweit_4_a_client_that_is_alone_trains_what_it_has_sent_before() -> None:
    toy = staged_toy(FedWeIT(unsent_share=0.0))
    toy.step([1])
    sent = toy.states()[1]["shared"]["inner.weight"]
    assert torch.equal(toy.server["shared"]["inner.weight"], sent)


def test_what_travels() -> None:
    toy = staged_toy(FedWeIT(unsent_share=0.3))
    row, known = 5 * 8, 7 * 8
    for round, cohort in enumerate(COHORTS):
        toy.step(cohort)
        for k, (down, up) in toy.federation.traffic.by_client.items():
            # five of seven rows and a bit for each; at the end of a stage A as well
            assert up == 5 * row + 1 + (7 * row if round in (1, 3) else 0)
            fresh = (k, round) in {(0, 2), (3, 2), (1, 3), (2, 3), (0, 4), (1, 4), (3, 4), (2, 5)}
            assert down == 7 * row + known + (7 * row if fresh else 0)


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_vectorized_agrees_with_looped(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    looped, stacked = (staged_toy(FedWeIT(), task=make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(dict(leaves(looped.step(cohort))), dict(leaves(stacked.step(cohort))), 1e-8)
        left, right = (dict(leaves({str(k): s for k, s in toy.states().items()})) for toy in (looped, stacked))
        assert_close(left, right, 1e-8)
    assert "failed together" not in caplog.text


def test_a_model_without_hidden_layers_is_refused() -> None:
    toy = staged_toy(FedWeIT())
    with pytest.raises(ConfigError, match="this model trains none: choose a model with hidden layers"):
        FedWeIT().check(softmax_regression(), toy.context)


def test_peers_that_grow_with_the_number_of_clients_are_warned_of() -> None:
    context = staged_toy(FedWeIT()).context
    many = replace(context, num_clients=12, train=TrainConfig(clients_per_round="all"))
    (said,) = FedWeIT().remarks(many)
    assert "up to 11 others" in said and "Set algorithm.peers" in said
    assert not FedWeIT(peers=3).remarks(many)
    assert not FedWeIT().remarks(replace(many, num_clients=11))
    (alone,) = FedWeIT().remarks(replace(many, stages=NoStages()))
    assert "one stage" in alone
