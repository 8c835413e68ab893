"""FedNoRo: an oracle in plain PyTorch, who is told noisy, and invariants NORO of losses, weights and distances."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.mixture import GaussianMixture
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fednoro import FedNoRo
from algorithms.parts.noisy_clients import in_higher_component, normalized_losses, relative_distances
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, num_bytes
from tests.support.partial_toys import labelled, three_layers
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal

TRAIN = TrainConfig(
    rounds=5, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
SKEWED = labelled(
    [0, 0, 0, 0, 1, 2], [2, 2, 2, 1], [0] * 6 + [1, 2], [0, 1, 2, 2, 2, 1, 1], [1, 1, 0, 2, 2], [0, 1, 2, 1, 0]
)
"""The second client lacks a class; the last is never sampled."""
COHORTS = ([0, 1, 2], [1, 3, 4], [0, 2, 3, 4], [0, 1, 3], [1, 2, 4])
EARLY: dict[str, Any] = {"warmup_rounds": 2, "ramp_rounds": 2, "mixtures": 4}


def toy_of(method: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(method, **{"dataset": SKEWED, "task": two_layers(), **options}, train=train)


def log_shares(y: Tensor) -> list[float]:
    """log pi_k of the classes, minus infinity for an absent one."""
    return [math.log(int((y == c).sum()) / len(y)) if (y == c).any() else -math.inf for c in range(3)]


def loss_by_hand(logits: Tensor, received: Tensor, y: Tensor, shares: list[float], weight: float, tau: float) -> Tensor:
    """The objective sample by sample, over the classes that the client has."""
    present = [c for c, share in enumerate(shares) if share > -math.inf]
    total = logits.new_zeros(())
    for row, teacher, label in zip(logits, received, y.tolist(), strict=True):
        adjusted = {c: row[c] + shares[c] for c in present}
        norm = torch.stack(list(adjusted.values())).exp().sum().log()
        wanted = (teacher / tau).exp() / (teacher / tau).exp().sum()
        divergence = (wanted * wanted.log()).sum() - sum(wanted[c] * (adjusted[c] - norm) for c in present)
        total = total + weight * divergence + (1 - weight) * (norm - adjusted[label])
    return total / len(y)


def trained(toy: Toy, model: Tree, client: int, round: int, weight: float, tau: float) -> Tree:
    """The client's model after a local update."""
    part = toy.dataset.load(client)["train"]
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
    generator = toy.context.streams.generator("batches", round, client)
    for index in plan_batches(len(part.y), 4, 2 * -(-len(part.y) // 4), generator).batches(CPU):
        optimizer.zero_grad()
        x = part.x[index]
        logits, received = (toy.task.network.logits(tree, x) for tree in (leaves, model))
        loss_by_hand(logits, received.detach(), part.y[index], log_shares(part.y), weight, tau).backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def noisy_by_hand(toy: Toy, model: Tree, fits: int) -> set[int]:
    """Who is noisy: losses sample by sample, scaled column by column, and the vote over fits as sets."""
    clients = range(toy.context.num_clients)
    rows = np.full((len(clients), 3), np.nan)
    for client in clients:
        part = toy.dataset.load(client)["train"]
        losses = F.cross_entropy(toy.task.network.logits(model, part.x), part.y, reduction="none").tolist()
        for c in range(3):
            own = [loss for loss, label in zip(losses, part.y.tolist(), strict=True) if label == c]
            if own:
                rows[client, c] = sum(own) / len(own)
    for c in range(3):
        column = rows[:, c]
        column[np.isnan(column)] = np.nanmin(column)
        rows[:, c] = (column - column.min()) / (column.max() - column.min())
    return elected(rows, fits)


def elected(rows: np.ndarray, fits: int) -> set[int]:
    """The set of clients that most fits find."""
    votes = []
    for seed in range(fits):
        mixture = GaussianMixture(n_components=2, random_state=seed).fit(rows)
        found = mixture.predict(rows) == np.argmax(mixture.means_.sum(1))
        votes.append(frozenset(np.flatnonzero(found).tolist()))
    return set(max(votes, key=votes.count))


def flat(model: Tree) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in model.values()])


@pytest.mark.parametrize(
    "settings",
    [
        EARLY,
        {**EARLY, "warmup_rounds": 1, "temperature": 2.0, "distillation_weight": 1.0, "aggregation": "uniform"},
        {**EARLY, "ramp_rounds": 0, "distance_aware": False, "distillation_weight": 0.5},
    ],
    ids=["default", "strong", "plain-mean"],
)
def test_inv_noro_1_rounds_are_those_of_an_oracle_in_plain_pytorch(settings: dict[str, Any]) -> None:
    method = FedNoRo(**settings)
    toy = toy_of(method)
    model: Tree = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    noisy: set[int] = set()
    for round, cohort in enumerate(COHORTS):
        after = round - method.warmup_rounds
        if after == 0:
            noisy = noisy_by_hand(toy, model, method.mixtures)
            assert noisy and noisy != set(range(6))
        u = min(after / method.ramp_rounds, 1) if method.ramp_rounds else 1
        rate = method.distillation_weight * math.exp(-5 * (1 - u) ** 2)
        models = {k: trained(toy, model, k, round, rate if k in noisy else 0.0, method.temperature) for k in cohort}
        apart = {
            k: min(sum(float((models[k][n] - models[j][n]).norm()) for n in model) for j in set(cohort) - noisy)
            if k in noisy and set(cohort) - noisy
            else 0.0
            for k in cohort
        }
        shares = {
            k: (1 if method.aggregation == "uniform" else len(toy.dataset.load(k)["train"].y))
            * (math.exp(-apart[k] / max(max(apart.values()), 1e-300)) if method.distance_aware else 1)
            for k in cohort
        }
        total = sum(shares.values())
        model = {name: sum(shares[k] / total * models[k][name] for k in cohort) for name in model}
        toy.step(cohort)
        assert_close(toy.server["model"], model, 1e-12)
    assert set(torch.nonzero(toy.server["noisy"]).flatten().tolist()) == noisy


@pytest.mark.parametrize("make", [two_layers, three_layers, normalized_layers])
def test_inv_noro_2_looped_and_vectorized_agree_and_one_host_is_three(make: Any) -> None:
    toys = [toy_of(FedNoRo(**EARLY), task=make(), mode=mode) for mode in ("looped", "vectorized")]
    toys.append(toy_of(FedNoRo(**EARLY), task=make(), hosts=3))
    for toy in toys:
        for cohort in COHORTS:
            toy.step(cohort)
    assert_close(toys[0].server["model"], toys[1].server["model"], 1e-9)
    assert torch.equal(toys[0].server["noisy"], toys[1].server["noisy"])
    assert all(bool(leaf.isfinite().all()) for leaf in toys[0].server["model"].values())
    assert_equal(toys[2].server, toys[0].server)


def test_inv_noro_3_the_weight_of_the_teacher_rises_to_its_last() -> None:
    method = FedNoRo(warmup_rounds=3, ramp_rounds=4, distillation_weight=0.6)
    course = [method.weight_in(round) for round in range(3, 10)]
    assert course[0] == 0.6 * math.exp(-5) and course[:5] == sorted(set(course[:5])) and course[4:] == [0.6] * 3
    assert FedNoRo(ramp_rounds=0).weight_in(10) == 0.8


def test_inv_noro_4_distances_are_relative_and_those_of_noisy_clients_alone() -> None:
    models = {k: {"w": torch.tensor([float(k), 0.0]), "b": torch.tensor(float(k * k))} for k in (0, 1, 4, 5)}
    models[5] = copy(models[1])
    noisy = torch.tensor([False, False, True, True, True, True])
    assert relative_distances(models, noisy) == {0: 0.0, 1: 0.0, 4: 1.0, 5: 0.0}
    far = {client: {name: 1e3 * leaf for name, leaf in model.items()} for client, model in models.items()}
    assert relative_distances(far, noisy) == relative_distances(models, noisy)
    models[5] = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)}
    # 3 + 15 from client 1, and 2 + 3
    assert relative_distances(models, noisy)[5] == pytest.approx(5 / 18, rel=1e-12)
    for everyone in (torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)):
        assert not any(relative_distances(models, everyone).values())


def test_inv_noro_5_losses_are_on_a_scale_of_their_class() -> None:
    generator = np.random.default_rng(0)
    losses, present = generator.random((7, 4)), generator.random((7, 4)) < 0.7
    present[:2] = True
    present[:, 3] = False
    found = normalized_losses(losses, present)
    assert not found[:, 3].any() and not found[~present].any()
    assert (found[:, :3].min(0) == 0).all() and (found[:, :3].max(0) == 1).all()
    stretched = normalized_losses(3 * losses + np.array([1.0, 2.0, 3.0, 4.0]), present)
    np.testing.assert_allclose(found, stretched, atol=1e-12)
    order = generator.permutation(7)
    np.testing.assert_array_equal(normalized_losses(losses[order], present[order]), found[order])


def test_inv_noro_6_clients_that_are_alike_are_clean() -> None:
    assert not in_higher_component(normalized_losses(np.ones((5, 3)), np.ones((5, 3), dtype=bool)), 3).any()


@pytest.mark.slow
def test_inv_noro_10_what_most_fits_find_counts() -> None:
    differ = False
    for seed in range(8):
        rows = np.random.default_rng(seed).random((8, 2))
        one, most = (set(np.flatnonzero(in_higher_component(rows, fits)).tolist()) for fits in (1, 9))
        assert (one, most) == (elected(rows, 1), elected(rows, 9))
        differ |= one != most
    assert differ


def planted(clients: int = 10, samples: int = 40) -> tuple[ListDataset, list[int]]:
    """Clients with one rule in common, of which some have random labels for 7 of 10 samples; clean ones to test."""
    generator = torch.Generator().manual_seed(1)
    rule = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    noisy, seen, new = [1, 4, 6, 9], [], []
    for client in range(clients):
        x = torch.randn(samples + 60, 5, generator=generator, dtype=torch.float64)
        y = (x @ rule).argmax(1)
        new.append((x[samples:], y[samples:].clone()))
        if client in noisy:
            wrong = torch.rand(len(y), generator=generator) < 0.7
            y = torch.where(wrong, torch.randint(3, (len(y),), generator=generator), y)
        seen.append((x[:samples], y[:samples]))
    return ListDataset(seen, validation=new), noisy


@pytest.mark.parametrize("seed", [0, 1])
def test_inv_noro_7_planted_clients_are_told(seed: int) -> None:
    dataset, noisy = planted()
    train = TrainConfig(rounds=6, clients_per_round=5, batch_size=10, local_epochs=2, lr=0.2)
    toy = toy_of(FedNoRo(warmup_rounds=5), train, dataset=dataset, seed=seed)
    toy.run()
    assert torch.nonzero(toy.server["noisy"]).flatten().tolist() == noisy


def test_inv_noro_8_a_class_that_a_client_lacks_is_neither_pushed_nor_taught() -> None:
    train = TRAIN.model_copy(update={"weight_decay": 0.0})
    toy = toy_of(FedNoRo(**{**EARLY, "ramp_rounds": 0}), train)
    toy.server = {**toy.server, "noisy": torch.ones(6, dtype=torch.bool)}
    before = copy(toy.server["model"])
    toy.round = 3
    after = toy.step([1])["model"]
    moved = (after["head.weight"] - before["head.weight"]).abs().sum(1)
    assert moved[0] == 0 and (moved[1:] > 0).all()


def test_inv_noro_9_clean_labels_of_equal_classes_are_federated_averaging_until_clients_are_told() -> None:
    balanced = labelled([0, 1, 2, 0, 1, 2], [0, 1, 2], [2, 1, 0] * 3)
    ours, theirs = toy_of(FedNoRo(), dataset=balanced), toy_of(FedAvg(), dataset=balanced)
    for cohort in ([0, 1], [1, 2]):
        ours.step(cohort)
        theirs.step(cohort)
        assert ours.federation.traffic.by_client == theirs.federation.traffic.by_client
    assert_close(ours.server["model"], theirs.server["model"], 1e-12)
    assert num_bytes(ours.server) == num_bytes(theirs.server)


@pytest.mark.parametrize("aggregation", ["samples", "population"])
@pytest.mark.parametrize("private", ["none", "statistics", "all"])
def test_private_layers_stay_with_the_clients(private: str, aggregation: Any) -> None:
    train = TRAIN.model_copy(update={"private_norm": private})
    method = FedNoRo(**EARLY, aggregation=aggregation)
    toys = [toy_of(method, train, task=normalized_layers(), mode=mode) for mode in ("looped", "vectorized")]
    for toy in toys:
        for cohort in COHORTS:
            toy.step(cohort)
    assert_close(toys[0].server["model"], toys[1].server["model"], 1e-9)


def test_losses_of_all_clients_travel_once() -> None:
    toy = toy_of(FedNoRo(**EARLY))
    for cohort in COHORTS[:2]:
        toy.step(cohort)
    size = num_bytes(toy.server["model"])
    toy.step([0, 2])
    down, up = size, 3 * 8 + 3
    assert toy.federation.traffic.by_client[5] == (down, up)
    assert toy.federation.traffic.by_client[0] == (down + size + 8, up + size)
    toy.step([0, 1])
    assert sorted(toy.federation.traffic.by_client) == [0, 1]


def test_one_client_is_refused_and_few_rounds_are_remarked() -> None:
    alone = toy_of(FedNoRo(), dataset=labelled([0, 1, 2]), train=TRAIN.model_copy(update={"clients_per_round": 1}))
    with pytest.raises(ConfigError, match="there is one client"):
        alone.algorithm.check(alone.task, alone.context)
    context = toy_of(FedNoRo()).context
    assert "warmup_rounds is 10, but the run has 5 rounds" in FedNoRo().remarks(context)[0]
    assert not FedNoRo(warmup_rounds=4).remarks(context)
