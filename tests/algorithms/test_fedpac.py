"""FedPAC: invariants PAC of statistics, training and server, and clients in camps with few samples each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedpac import LEAST_WEIGHT, FedPAC, estimate
from algorithms.fedrep import FedRep
from algorithms.parts.combination import combination_weights, pruned
from algorithms.parts.prototypes import class_means
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, weighted_sum
from rayfl.tasks.base import Batch
from tests.support.partial_toys import COHORTS, TRAIN, camps, initial, labelled, take, three_layers, toy_of
from tests.support.toy_networks import softmax_regression, two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal

HEAD = ("head.weight", "head.bias")
ALONE = TrainConfig(rounds=4, clients_per_round=1, local_epochs=1, batch_size=None, lr=0.1)


def received(toy: Toy, client: int) -> Tree:
    """The model that a client of the next cohort starts from."""
    own = toy.states().get(client, {}).get("personal") or take(initial(toy), HEAD)
    return {**toy.server["shared"], **own}


def features(toy: Toy, model: Tree, client: int) -> tuple[Tensor, Tensor]:
    """What the head reads of a client's samples, and the labels."""
    part = toy.dataset.load(client)["train"]
    return toy.task.network.head_inputs_and_logits(model, part.x)[0], part.y


def trained_alone(toy: Toy, client: int) -> Toy:
    """The round in which this client alone trains what it would receive now, without combination."""
    algorithm = toy.algorithm.model_copy(update={"combine_heads": False})
    alone = Toy(algorithm, toy.dataset, toy.task, toy.train)
    alone.round, alone.server = toy.round, {key: toy.server[key] for key in ("shared", "prototypes")}
    states = alone.client_hosts[0].states
    for other, state in toy.states().items():
        states.replace(other, state, toy.round)
    alone.step([client])
    return alone


@pytest.mark.parametrize("make", [three_layers, two_layers])
@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
def test_inv_pac_5_without_alignment_and_combination_it_is_fedrep(policy: Any, make: Any) -> None:
    plain = FedRep(head_epochs=1, body_epochs=None, aggregation=policy)
    bare = FedPAC(alignment_weight=0, combine_heads=False, head_lr=None, aggregation=policy)
    left, right = toy_of(bare, task=make()), toy_of(plain, task=make())
    for cohort in COHORTS:
        assert_equal(left.step(cohort)["shared"], right.step(cohort)["shared"])
        assert_equal(left.states(), right.states())
    scores, expected = left.scores(), right.scores()
    for client in range(4):
        assert set(scores[client]) == {"personalized"}
        assert (scores[client]["personalized"].vector == expected[client]["personalized"].vector).all()


def test_inv_pac_7_variance_is_not_negative_and_that_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    for n, classes, scale in ((1, 3, 1.0), (20, 4, 1.0), (20, 1, 1e4), (7, 9, 1e-4)):
        f = scale * torch.randn(n, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(classes, (n,), generator=generator)
        h, v = estimate(f, y, classes)
        expected, total = torch.zeros(classes, 6, dtype=torch.float64), 0.0
        for c in set(y.tolist()):
            share, mean = float((y == c).double().mean()), f[y == c].mean(0)
            expected[c] = share * mean
            total += share * float((f[y == c] ** 2).sum(1).mean()) - share**2 * float((mean**2).sum())
        assert (h - expected).abs().max() <= 1e-12 * scale
        assert abs(float(v) - total / n) <= 1e-12 * scale**2 and v >= 0
        # one class of equal features has no variance but rounding
        _, equal = estimate(f[:1].expand(n, 6), torch.zeros_like(y), classes)
        assert 0 <= equal <= 1e-24 * scale**2


def test_estimates_are_of_the_received_model_and_combine_the_trained_heads() -> None:
    toy = toy_of(FedPAC())
    for cohort in ([0, 1, 3], [0, 1, 2, 3], [1, 2]):
        found = [estimate(*features(toy, received(toy, client), client), 3) for client in cohort]
        h, v = (torch.stack(column).numpy() for column in zip(*found, strict=True))
        heads = [trained_alone(toy, client).states()[client]["personal"] for client in cohort]
        weights = pruned(combination_weights(h, v), LEAST_WEIGHT)
        assert 0.01 < weights[0][1:].sum() < 0.99
        toy.step(cohort)
        for client, row in zip(cohort, weights.tolist(), strict=True):
            assert_close(toy.states()[client], {"personal": weighted_sum(heads, row)}, 1e-12)
        sizes = [len(toy.dataset.load(client)["train"]) for client in cohort]
        assert_close(toy.server["head"], weighted_sum(heads, [n / sum(sizes) for n in sizes]), 1e-12)


def test_a_head_whose_weight_is_below_a_thousandth_is_dropped() -> None:
    """Equal means are weighted by inverse variance: the third client's weight is 5e-7."""
    variances, heads = (1.0, 1.0, 1e6), (1.0, 3.0, 1e7)
    reports: dict[int, Tree] = {
        client: {
            "head": {"head.weight": torch.tensor([head], dtype=torch.float64)},
            "mean": torch.zeros(2, 3, dtype=torch.float64),
            "variance": torch.tensor(variance, dtype=torch.float64),
        }
        for client, (head, variance) in enumerate(zip(heads, variances, strict=True))
    }
    for found in FedPAC().combined(reports).values():
        assert_close(found["head"]["head.weight"], torch.tensor([2.0], dtype=torch.float64), 1e-9)


def test_inv_pac_3_equal_clients_get_the_mean_of_their_heads() -> None:
    toy = toy_of(FedPAC())
    part = toy.dataset.load(1)["train"]
    toy = Toy(FedPAC(), ListDataset([(part.x, part.y)] * 4), three_layers(), TRAIN)
    heads = [trained_alone(toy, client).states()[client]["personal"] for client in range(4)]
    toy.step([0, 1, 2, 3])
    for state in toy.states().values():
        assert_close(state["personal"], weighted_sum(heads, [0.25] * 4), 1e-12)
    assert (heads[0]["head.weight"] - heads[1]["head.weight"]).abs().max() > 1e-4


@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
def test_prototypes_are_means_over_all_samples_of_a_class_in_the_cohort(policy: Any) -> None:
    dataset = labelled([0, 0, 1, 1, 1, 0], [1, 1], [2, 0, 2, 2])
    toy = Toy(FedPAC(aggregation=policy), dataset, two_layers(), TRAIN)
    expected = torch.zeros(3, 7, dtype=torch.float64)
    exist = torch.zeros(3, dtype=torch.float64)
    for cohort in ([0, 1], [1], [1, 2], [0, 1]):
        pooled = []
        for client in cohort:
            alone = trained_alone(toy, client)
            model = {**alone.server["shared"], **alone.states()[client]["personal"]}
            if policy != "population":
                pooled.append(features(toy, model, client))
        toy.step(cohort)
        seen = {int(c) for client in cohort for c in dataset.load(client)["train"].y}
        exist[list(seen)] = 1
        assert torch.equal(toy.server["prototypes"]["exist"], exist)
        if pooled:
            f, y = torch.cat([f for f, _ in pooled]), torch.cat([y for _, y in pooled])
            means = class_means(f, y, 3)[1]
            expected = torch.where((class_means(f, y, 3)[0] > 0)[:, None], means, expected)
            assert_close(toy.server["prototypes"]["means"], expected, 1e-12)
    assert torch.isfinite(toy.server["prototypes"]["means"]).all()


def gradient_step(toy: Toy, model: Tree, client: int, targets: Tensor | None, weight: float) -> Tree:
    """One full-batch step on the body of a model."""
    part = toy.dataset.load(client)["train"]
    body = {name: leaf.clone().requires_grad_() for name, leaf in model.items() if name not in HEAD}
    f, logits = toy.task.network.head_inputs_and_logits({**model, **body}, part.x)
    loss = toy.task.cross_entropy(logits, Batch(part.x, part.y))
    if targets is not None:
        loss = loss + weight * torch.nn.functional.mse_loss(f, targets[part.y])
    gradients = torch.autograd.grad(loss, list(body.values()))
    return {name: (leaf - ALONE.lr * g).detach() for (name, leaf), g in zip(body.items(), gradients, strict=True)}


def test_the_body_is_aligned_with_prototypes_and_with_the_clients_own_means_where_there_are_none() -> None:
    dataset = labelled([0, 1, 0, 1, 1], [1, 2, 2, 0])
    toy = Toy(FedPAC(alignment_weight=3.0, head_epochs=0), dataset, two_layers(), ALONE)
    start = received(toy, 0)
    expected = gradient_step(toy, start, 0, None, 0)
    # without any prototype there is no alignment
    assert_close(toy.step([0])["shared"], expected, 1e-12)
    model = received(toy, 1)
    own = class_means(*features(toy, model, 1), 3)[1]
    prototypes = toy.server["prototypes"]["means"]
    targets = torch.stack([prototypes[0], prototypes[1], own[2]])
    expected = gradient_step(toy, model, 1, targets, 3.0)
    unaligned = gradient_step(toy, model, 1, None, 0)
    assert_close(toy.step([1])["shared"], expected, 1e-12)
    assert (expected["inner.weight"] - unaligned["inner.weight"]).abs().max() > 1e-3


def test_the_heads_pass_has_its_own_rate_and_moves_the_head_alone() -> None:
    still = TRAIN.model_copy(update={"lr": 0.0})
    for rate, moves in ((0.1, True), (None, False), (0.0, False)):
        toy = toy_of(FedPAC(head_lr=rate), train=still, task=two_layers())
        before = copy(toy.server["shared"])
        start = take(initial(toy), HEAD)
        toy.step([0, 1])
        assert_equal(toy.server["shared"], before)
        change = toy.states()[0]["personal"]["head.weight"] - start["head.weight"]
        assert (change.abs().max() > 1e-3) == moves


def test_rows_of_clients_sampled_and_never_sampled() -> None:
    toy = toy_of(FedPAC())
    for cohort in COHORTS:
        toy.step(cohort)
    assert set(toy.states()) == {0, 1, 2}
    scores = toy.scores()
    for client in range(4):
        x, y = toy.dataset.load(client)["test"].x, toy.dataset.load(client)["test"].y
        head = toy.states()[client]["personal"] if client < 3 else take(initial(toy), HEAD)
        for row, part in (("personalized", head), ("global", toy.server["head"])):
            logits = toy.task.network.logits({**toy.server["shared"], **part}, x)
            assert abs(scores[client][row].loss - float(torch.nn.functional.cross_entropy(logits, y))) < 1e-9


def test_the_combined_head_counts_as_sent_and_nothing_twice() -> None:
    combined, kept = toy_of(FedPAC(), task=two_layers()), toy_of(FedPAC(combine_heads=False), task=two_layers())
    network, head, classes, width = combined.task.network, 24, 3, 7
    for cohort in COHORTS:
        combined.step(cohort)
        kept.step(cohort)
        body = network.num_parameters - head
        down, up = body + classes * (width + 1), body + classes * (width + 1)
        assert kept.federation.traffic.by_client == dict.fromkeys(cohort, (8 * down, 8 * up))
        sent = (8 * (down + head), 8 * (up + head + classes * width + 1))
        assert combined.federation.traffic.by_client == dict.fromkeys(cohort, sent)


def test_a_model_without_a_body_is_refused() -> None:
    toy = Toy(FedPAC(), labelled([0, 1]), softmax_regression(), TRAIN)
    with pytest.raises(ConfigError, match="no layer before the last"):
        FedPAC().check(toy.task, toy.context)
    FedPAC().check(two_layers(), toy.context)


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy_of(FedPAC(), task=two_layers(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 1, 2, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort))
    assert_close(looped.states(), stacked.states())


@pytest.mark.slow
def test_heads_are_combined_within_camps_which_helps_clients_with_few_samples() -> None:
    train = TrainConfig(rounds=20, clients_per_round="all", local_epochs=3, batch_size=4, lr=0.1)
    methods = {"combined": FedPAC(), "own": FedPAC(combine_heads=False), "fedrep": FedRep(), "fedavg": FedAvg()}
    found = {}
    for name, algorithm in methods.items():
        toy = Toy(algorithm, camps(), two_layers(inputs=10, hidden=12, classes=6), train)
        toy.run()
        rows = toy.scores(split="validation").values()
        found[name] = float(np.mean([row[algorithm.personalized].top1 for row in rows]))
        if name == "combined":
            estimates = [estimate(*features(toy, received(toy, k), k), 6) for k in range(12)]
            h, v = (torch.stack(column).numpy() for column in zip(*estimates, strict=True))
            weights = combination_weights(h, v)
            same = np.equal.outer(np.arange(12) % 2, np.arange(12) % 2)
            assert weights[same].sum() > 0.95 * weights.sum()
            assert weights.trace() < 0.8 * weights.sum()
    assert found["combined"] > max(found["own"], found["fedrep"], found["fedavg"]) + 0.05
