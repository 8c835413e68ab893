"""DFedAvgM: rounds by hand, invariants DFA of mixing, limits that are other methods, traffic, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.dfedavgm import DFedAvgM
from algorithms.fedavg import FedAvg
from algorithms.local import Local
from algorithms.parts.topology import metropolis, spectral_gap
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, num_bytes
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10, 9, 7)
COHORTS = ([0, 1, 2, 4, 5], [1, 3], [0, 1, 3, 4, 5], [2], [0, 1, 2, 3, 4, 5])
TRAIN = TrainConfig(
    rounds=5, clients_per_round=5, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01, lr_decay=0.9
)
EVERYONE = TRAIN.model_copy(update={"clients_per_round": "all"})
KINDS: tuple[Any, ...] = ("random", "matching", "ring", "torus", "exponential", "complete", "regular", "erdos_renyi")


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def logits(model: Tree, x: Tensor) -> Tensor:
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    found: Tensor = hidden @ model["head.weight"].T + model["head.bias"]
    return found


def trained(toy: Toy, model: Tree, client: int, round: int) -> Tree:
    """z_i in plain PyTorch: heavy-ball momentum that begins at zero."""
    part, train = toy.dataset.load(client)["train"], toy.train
    size = len(part.y)
    generator = toy.context.streams.generator("batches", round, client)
    plan = plan_batches(size, 4, 2 * -(-size // 4), generator)
    here, before = dict(model), dict(model)
    for index in plan.batches(CPU):
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in here.items()}
        loss = F.cross_entropy(logits(leaves, part.x[index]), part.y[index])
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        ahead = {}
        for (name, leaf), slope in zip(here.items(), slopes, strict=True):
            slope = slope + train.weight_decay * leaf
            ahead[name] = leaf - 0.1 * 0.9**round * slope + train.momentum * (leaf - before[name])
        here, before = ahead, here
    return here


def neighbours(toy: Toy, kind: str, cohort: list[int], round: int) -> dict[int, set[int]]:
    """Who exchanges models, by hand: on a circle, or by each client's draw of two others."""
    found: dict[int, set[int]] = {i: set() for i in cohort}
    for row, i in enumerate(cohort):
        if kind == "ring":
            found[i] |= {(i + 1) % len(SIZES), (i - 1) % len(SIZES)} & set(cohort)
            continue
        others = [place for place in range(len(cohort)) if place != row]
        for place in toy.context.streams.generator("topology", round, i).permutation(others)[:2]:
            found[i].add(cohort[place])
            found[cohort[place]].add(i)
    return found


@pytest.mark.parametrize("kind", ["ring", "random"])
@pytest.mark.parametrize("mixes", ["trained", "started"])
def test_inv_dfa_1_rounds_are_those_of_an_oracle_in_plain_pytorch(kind: Any, mixes: Any) -> None:
    toy = toy_of(DFedAvgM(topology=kind, mixes=mixes))
    initial: Tree = toy.server["model"]
    own: dict[int, Tree] = dict.fromkeys(range(len(SIZES)), initial)
    for round, cohort in enumerate(COHORTS):
        ahead = {i: trained(toy, own[i], i, round) for i in cohort}
        linked = neighbours(toy, kind, cohort, round)
        exchanged = ahead if mixes == "trained" else {i: own[i] for i in cohort}
        mixed: dict[int, Tree] = {}
        for i in cohort:
            weights = {j: 1 / (1 + max(len(linked[i]), len(linked[j]))) for j in linked[i]}
            weights[i] = 1 - sum(weights.values())
            mixed[i] = {name: sum(w * exchanged[j][name] for j, w in weights.items()) for name in initial}
            if mixes == "started":
                mixed[i] = {name: leaf + ahead[i][name] - own[i][name] for name, leaf in mixed[i].items()}
        own |= mixed
        toy.step(cohort)
        for client, state in toy.states().items():
            assert_close(state["model"], own[client], 1e-12)
        mean = {name: sum(model[name] for model in own.values()) / len(SIZES) for name in initial}
        assert_close(toy.server["model"], mean, 1e-12)
    for i, rows in toy.scores().items():
        part = toy.dataset.load(i)["test"]
        for row, model in (("personalized", own[i]), ("global", mean)):
            assert rows[row].loss == pytest.approx(float(F.cross_entropy(logits(model, part.x), part.y)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mixes", ["trained", "started"])
def test_inv_dfa_2_mixing_keeps_the_mean_of_all_models(kind: Any, mixes: Any) -> None:
    """The mean of those who take part moves as their training moves it, whatever the graph."""
    toy = toy_of(DFedAvgM(topology=kind, mixes=mixes, neighbours=2), task=normalized_layers())
    alone = toy_of(Local(), task=normalized_layers())
    initial: Tree = toy.server["model"]

    def mean(models: dict[int, Tree]) -> Tree:
        return {name: sum(models.get(i, initial)[name] for i in range(len(SIZES))) / len(SIZES) for name in initial}

    toy.step([0, 1, 3, 4])
    alone.step([0, 1, 3, 4])
    kept = {i: state["model"] for i, state in toy.states().items()}
    assert_close(mean(kept), mean({i: state["local"] for i, state in alone.states().items()}), 1e-12)
    assert_close(toy.server["model"], mean(kept), 1e-12)
    toy.step([1, 2, 5])
    assert_close(toy.server["model"], mean({i: state["model"] for i, state in toy.states().items()}), 1e-12)


@pytest.mark.parametrize("task", [two_layers, normalized_layers])
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_dfa_3_a_complete_graph_of_all_is_fedavg_with_uniform_weights(task: Any, mode: str) -> None:
    peers = toy_of(DFedAvgM(topology="complete"), EVERYONE, task(), mode=mode)
    served = toy_of(FedAvg(aggregation="uniform"), EVERYONE, task(), mode=mode)
    for _ in range(3):
        peers.step()
        expected = served.step()["model"]
        assert_close(peers.server["model"], expected, 1e-12)
        for state in peers.states().values():
            assert_close(state["model"], expected, 1e-12)


@pytest.mark.parametrize("task", [two_layers, normalized_layers])
@pytest.mark.parametrize("mixes", ["trained", "started"])
def test_inv_dfa_4_without_neighbours_it_is_local_training_to_the_bit(task: Any, mixes: Any) -> None:
    """On the ring no two of these cohorts are neighbours."""
    peers, local = toy_of(DFedAvgM(topology="ring", mixes=mixes), task=task()), toy_of(Local(), task=task())
    for cohort in ([0, 2, 4], [1, 3, 5], [2], [0, 3]):
        peers.step(cohort)
        local.step(cohort)
        assert peers.federation.traffic.by_client == dict.fromkeys(cohort, (0, 0))
    for client, state in local.states().items():
        compare = assert_equal if mixes == "trained" else (lambda one, other: assert_close(one, other, 1e-15))
        compare(peers.states()[client]["model"], state["local"])


def test_inv_dfa_5_started_models_and_one_full_step_are_d_psgd() -> None:
    """X <- W X - eta grad f(X) with all samples."""
    train = TrainConfig(rounds=4, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.2)
    toy = toy_of(DFedAvgM(topology="ring", mixes="started"), train)
    initial: Tree = toy.server["model"]
    models = [dict(initial) for _ in SIZES]
    count = len(SIZES)
    for _ in range(4):
        slopes = []
        for i, model in enumerate(models):
            part = toy.dataset.load(i)["train"]
            leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
            F.cross_entropy(logits(leaves, part.x), part.y).backward()
            slopes.append({name: leaf.grad for name, leaf in leaves.items()})
        models = [
            {
                name: (models[i - 1][name] + models[i][name] + models[(i + 1) % count][name]) / 3
                - 0.2 * slopes[i][name]
                for name in initial
            }
            for i in range(count)
        ]
        toy.step()
    for i, state in toy.states().items():
        assert_close(state["model"], models[i], 1e-12)


def test_inv_dfa_6_without_training_models_agree_at_the_rate_of_the_spectral_gap() -> None:
    toy = toy_of(DFedAvgM(topology="ring"), EVERYONE.model_copy(update={"lr_decay": 1e-30}))  # one round of training
    gap = spectral_gap(metropolis(toy.algorithm.graph.fixed(len(SIZES), toy.context.streams)))
    spreads = []
    for _ in range(12):
        toy.step()
        models = [state["model"] for state in toy.states().values()]
        rows = torch.stack([torch.cat([leaf.flatten() for leaf in model.values()]) for model in models])
        spreads.append(float((rows - rows.mean(0)).norm()))
    for before, after in pairwise(spreads):
        assert after <= (1 - gap) * before + 1e-15
    assert spreads[-1] / spreads[-2] == pytest.approx(1 - gap, rel=0.01)


def test_inv_dfa_7_neighbours_send_each_other_a_model() -> None:
    toy = toy_of(DFedAvgM(topology="ring"), task=normalized_layers())
    size = num_bytes(toy.server["model"])
    toy.step([0, 1, 2, 4])
    assert toy.federation.traffic.by_client == {0: (size, size), 1: (2 * size, 2 * size), 2: (size, size), 4: (0, 0)}
    drawn = toy_of(DFedAvgM(neighbours=1), task=normalized_layers())
    for cohort in COHORTS:
        drawn.step(cohort)
        traffic = drawn.federation.traffic
        assert traffic.down == traffic.up and all(down == up for down, up in traffic.by_client.values())


def test_who_does_not_take_part_keeps_its_model_and_is_heard_by_nobody() -> None:
    toy = toy_of(DFedAvgM(topology="complete"))
    toy.step([0, 1, 2])
    before = toy.states()
    toy.step([2, 3])
    for client in (0, 1):
        assert_equal(toy.states()[client], before[client])
    assert set(toy.states()) == {0, 1, 2, 3} and set(toy.states()[2]) == {"model"}


@pytest.mark.parametrize("policy", ["statistics", "all"])
def test_private_normalization_is_not_mixed(policy: Any) -> None:
    train = TRAIN.model_copy(update={"private_norm": policy})
    toy, local = (toy_of(a, train, normalized_layers()) for a in (DFedAvgM(topology="complete"), Local()))
    toy.step([0, 1, 2])
    local.step([0, 1, 2])
    private = ["norm.running_mean", "norm.running_var"] + (["norm.weight", "norm.bias"] if policy == "all" else [])
    whole = {name: leaf.nbytes for name, leaf in local.states()[0]["local"].items()}
    assert toy.federation.traffic.by_client[0][0] == 2 * sum(size for n, size in whole.items() if n not in private)
    for i in range(3):
        model, alone = toy.states()[i]["model"], local.states()[i]["local"]
        for name in alone:
            assert torch.equal(model[name], alone[name]) == (name in private), name
        for name in private:
            assert toy.server["model"][name].numel() == 0
            assert torch.equal(toy.states()[i]["private_norm"][name], alone[name])
    assert all(row.loss > 0 for rows in toy.scores().values() for row in rows.values())


@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-10), (False, 1e-5)])
@pytest.mark.parametrize("mixes", ["trained", "started"])
def test_vectorized_agrees_with_looped(mixes: Any, double: bool, tolerance: float) -> None:
    assert_modes_agree(DFedAvgM(mixes=mixes, neighbours=1), (8, 12, 6, 10), TRAIN, double, tolerance)


def test_a_newcomer_has_the_mean_of_all_models() -> None:
    toy = toy_of(DFedAvgM(), unseen=1)
    toy.step([0, 1, 4])
    part = toy.dataset.load(5)["test"]
    (rows,) = toy.scores(final=True, newcomers=True).values()
    expected = float(F.cross_entropy(logits(toy.server["model"], part.x), part.y))
    assert rows["personalized"].loss == rows["global"].loss == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topology": "regular", "neighbours": 6}, r"algorithm\.neighbours is 6, but a client has only 5 others"),
        ({"topology": "erdos_renyi", "edge_probability": 0.001}, r"none of 200 graphs"),
    ],
)
def test_graphs_that_cannot_be_are_refused_before_the_run(options: dict[str, Any], words: str) -> None:
    toy = toy_of(DFedAvgM(**options))
    with pytest.raises(ConfigError, match=words):
        toy.algorithm.check(toy.task, toy.context)


def test_seldom_meetings_and_slow_agreement_are_remarked() -> None:
    few = TRAIN.model_copy(update={"clients_per_round": 3})
    (said,) = DFedAvgM(topology="ring").remarks(toy_of(DFedAvgM(), few).context)
    assert "has 2 neighbours by algorithm.topology=ring and meets 0.8 of them in a round, as 3 of 6 clients" in said
    assert not DFedAvgM().remarks(toy_of(DFedAvgM(), few).context)
    assert not DFedAvgM(topology="ring").remarks(toy_of(DFedAvgM(), EVERYONE).context)
    many = Toy(DFedAvgM(), random_clients([4] * 30), two_layers(), EVERYONE)
    (said,) = DFedAvgM(topology="ring").remarks(many.context)
    assert "spectral gap of 0.015 with 30 clients" in said and "about 69 rounds" in said
