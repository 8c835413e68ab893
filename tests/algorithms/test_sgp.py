"""SGP: rounds by hand, invariants PUSH of sums and weights, limits that are other methods, traffic, what is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from algorithms.dfedavgm import DFedAvgM
from algorithms.local import Local
from algorithms.sgp import SGP
from rayfl.params import Tree, num_bytes
from tests.algorithms.test_dfedavgm import COHORTS, EVERYONE, SIZES, TRAIN, logits, toy_of, trained
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, random_clients

KINDS: tuple[Any, ...] = ("one_peer", "random", "exponential", "ring")


def receivers(toy: Toy, kind: str, cohort: list[int], round: int) -> dict[int, set[int]]:
    """Who gets what each client sends, by hand."""
    found = {}
    for row, j in enumerate(cohort):
        if kind == "ring":
            found[j] = {(j + 1) % len(SIZES)} & set(cohort)
        elif kind == "exponential":
            found[j] = {(j + step) % len(SIZES) for step in (1, 2, 4)} & set(cohort)
        elif kind == "one_peer":
            power = 0
            while 2 ** (power + 1) < len(cohort):
                power += 1
            found[j] = {cohort[(row + 2 ** (round % (power + 1))) % len(cohort)]} - {j}
        else:
            others = [place for place in range(len(cohort)) if place != row]
            drawn = toy.context.streams.generator("topology", round, j).permutation(others)[:2]
            found[j] = {cohort[place] for place in drawn}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_inv_push_1_rounds_are_those_of_an_oracle_in_plain_pytorch(kind: Any) -> None:
    toy = toy_of(SGP(links=kind, receivers=2) if kind == "random" else SGP(links=kind))
    initial: Tree = toy.server["model"]
    totals: dict[int, Tree] = dict.fromkeys(range(len(SIZES)), initial)
    weights = dict.fromkeys(range(len(SIZES)), 1.0)
    size = num_bytes(initial) + 8
    for round, cohort in enumerate(COHORTS):
        models = {i: {name: leaf / weights[i] for name, leaf in totals[i].items()} for i in cohort}
        ahead = {i: trained(toy, models[i], i, round) for i in cohort}
        moved = {i: {name: leaf + ahead[i][name] - models[i][name] for name, leaf in totals[i].items()} for i in cohort}
        reached = receivers(toy, kind, cohort, round)
        before = dict(weights)
        for i in cohort:
            senders = [j for j in cohort if i == j or i in reached[j]]
            share = {j: 1 / (1 + len(reached[j])) for j in senders}
            totals[i] = {name: sum(share[j] * moved[j][name] for j in senders) for name in initial}
            weights[i] = sum(share[j] * before[j] for j in senders)
        toy.step(cohort)
        for client, state in toy.states().items():
            assert_close(state["push"]["total"], totals[client], 1e-12)
            assert state["push"]["weight"] == pytest.approx(weights[client], abs=1e-13)
        mean = {name: sum(tree[name] for tree in totals.values()) / len(SIZES) for name in initial}
        assert_close(toy.server["model"], mean, 1e-12)
        arriving = {i: sum(i in reached[j] for j in cohort) for i in cohort}
        expected = {i: (arriving[i] * size, len(reached[i]) * size) for i in cohort}
        assert {i: (down, up) for i, (down, up) in toy.federation.traffic.by_client.items()} == expected
    for i, rows in toy.scores().items():
        part = toy.dataset.load(i)["test"]
        own = {name: leaf / weights[i] for name, leaf in totals[i].items()}
        for row, model in (("personalized", own), ("global", mean)):
            assert rows[row].loss == pytest.approx(float(F.cross_entropy(logits(model, part.x), part.y)))


@pytest.mark.parametrize("kind", KINDS)
def test_inv_push_2_sums_and_weights_are_lost_nowhere(kind: Any) -> None:
    """The mean of all sums moves by the mean change of training alone; all weights sum to K."""
    toy, still = toy_of(SGP(links=kind)), toy_of(SGP(links=kind), TRAIN.model_copy(update={"lr": 1e-300}))
    initial: Tree = still.server["model"]
    for cohort in COHORTS:
        for run in (toy, still):
            run.step(cohort)
            weights = [state["push"]["weight"] for state in run.states().values()]
            assert min(weights) > 0
            assert sum(weights) + len(SIZES) - len(weights) == pytest.approx(len(SIZES), abs=1e-12)
    assert_close(still.server["model"], initial, 1e-12)
    for state in still.states().values():
        push = state["push"]
        assert_close({name: leaf / push["weight"] for name, leaf in push["total"].items()}, initial, 1e-12)


@pytest.mark.parametrize("task", [two_layers, normalized_layers])
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_push_3_if_all_send_to_all_it_is_dfedavgm_on_the_complete_graph(task: Any, mode: str) -> None:
    one = toy_of(SGP(links="random", receivers=9), EVERYONE, task(), mode=mode)
    other = toy_of(DFedAvgM(topology="complete"), EVERYONE, task(), mode=mode)
    for _ in range(3):
        assert_close(one.step()["model"], other.step()["model"], 1e-12)
        for client, state in one.states().items():
            assert state["push"]["weight"] == pytest.approx(1, abs=1e-15)
            assert_close(state["push"]["total"], other.states()[client]["model"], 1e-12)


@pytest.mark.parametrize("task", [two_layers, normalized_layers])
def test_inv_push_4_without_links_it_is_local_training(task: Any) -> None:
    """On the ring nobody of these cohorts sends to another."""
    pushed, local = toy_of(SGP(links="ring"), task=task()), toy_of(Local(), task=task())
    for cohort in ([0, 2, 4], [1, 3, 5], [2], [0, 3]):
        pushed.step(cohort)
        local.step(cohort)
        assert pushed.federation.traffic.by_client == dict.fromkeys(cohort, (0, 0))
    for client, state in local.states().items():
        assert_close(pushed.states()[client]["push"]["total"], state["local"], 1e-14)


def test_inv_push_5_one_peer_rounds_bring_models_together() -> None:
    """With eight clients that have stopped training, three rounds make all models the mean."""
    train = EVERYONE.model_copy(update={"lr_decay": 1e-300})  # one round of training
    toy = Toy(SGP(), random_clients((*SIZES, 5, 11)), two_layers(), train)
    toy.step()
    assert max(float((state["push"]["total"]["head.bias"]).std()) for state in toy.states().values()) > 0
    for _ in range(3):
        toy.step()
    for state in toy.states().values():
        assert_close(state["push"]["total"], toy.server["model"], 1e-12)


@pytest.mark.parametrize("policy", ["statistics", "all"])
def test_private_layers_stay_with_their_clients(policy: Any) -> None:
    train = EVERYONE.model_copy(update={"private_norm": policy})
    toy, local = (toy_of(a, train, normalized_layers()) for a in (SGP(links="random", receivers=9), Local()))
    toy.step()
    local.step()
    network = toy.task.network
    private = [name for name in network.norm_names if policy == "all" or name in network.buffer_names]
    for client, state in toy.states().items():
        alone = local.states()[client]["local"]
        for name in network.parameter_names + network.buffer_names:
            mine = state["push"]["total"][name]
            assert (name in private) == torch.allclose(mine, alone[name], atol=1e-14, rtol=0)
    toy.step()
    assert all(
        torch.isfinite(leaf).all() for state in toy.states().values() for leaf in state["push"]["total"].values()
    )


def test_variances_stay_positive_whatever_the_weights() -> None:
    toy = toy_of(SGP(links="random"), TRAIN.model_copy(update={"rounds": 12}), normalized_layers())
    low = 1.0
    for round in range(12):
        toy.step([round % 6, (round + 1) % 6, (round + 3) % 6])
        for state in toy.states().values():
            low = min(low, state["push"]["weight"])
            for name in toy.task.network.buffer_names:
                assert "var" not in name or (state["push"]["total"][name] > 0).all()
    assert low < 0.3


@pytest.mark.parametrize("double", [True, False])
def test_both_modes_agree(double: bool) -> None:
    assert_modes_agree(SGP(links="exponential"), SIZES[:4], TRAIN, double, 1e-12 if double else 1e-5)


def test_few_links_are_named() -> None:
    few = TRAIN.model_copy(update={"clients_per_round": 3})
    (said,) = SGP(links="ring").remarks(toy_of(SGP(), few).context)
    assert "sends to 1 others by algorithm.links=ring, of which 0.4 take part in a round, as 3 of 6 clients do" in said
    assert not SGP().remarks(toy_of(SGP(), few).context)
    assert not SGP(links="ring").remarks(toy_of(SGP(), EVERYONE).context)
