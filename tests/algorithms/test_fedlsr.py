"""FedLSR: an oracle in plain PyTorch, and invariants LSR of views, of mixed predictions and of bounded losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedlsr import FedLSR
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.images.augment import AugmentConfig
from rayfl.data.images.views import Views
from rayfl.engine.updates.batches import plan_batches
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.params import Tree
from tests.support.partial_toys import initial
from tests.support.toys import CPU, Toy, assert_close, assert_equal
from tests.support.unlabelled_toys import SIZES, TRAIN, flat_layers, image_clients, semi_toy, views_of

COHORTS = ([0, 2, 3], [1, 2], [0, 1, 2, 3])
SETTINGS: dict[str, dict[str, Any]] = {
    "entropy": {"ramp_rounds": 2, "entropy_weight": 0.6},
    "plain": {
        "entropy_weight": 0.3,
        "bounded": False,
        "ramp_rounds": 0,
        "temperature": 0.5,
        "flip": True,
        "aggregation": "uniform",
    },
    "one-view": {"rotate": 0.0, "entropy_weight": 0.2},
}


def toy_of(method: Any, **options: Any) -> Toy:
    return semi_toy(method, **{"dataset": image_clients(), **options})


def logits_of(model: Tree, x: Tensor) -> Tensor:
    inner = torch.relu(x.flatten(1) @ model["inner.weight"].T + model["inner.bias"])
    return inner @ model["head.weight"].T + model["head.bias"]


def softmax(values: list[Tensor]) -> list[Tensor]:
    total = sum(value.exp() for value in values)
    return [value.exp() / total for value in values]


def loss_by_hand(one: Tensor, other: Tensor, label: int, share: float, weight: float, method: FedLSR) -> Tensor:
    """The objective of one sample, class by class; shapes (C,)."""
    classes = range(len(one))
    views = [softmax(list(one)), softmax(list(other))]
    p = [share * views[0][c] + (1 - share) * views[1][c] for c in classes]
    s = [p[c] ** 2 / sum(q**2 for q in p) for c in classes]
    found = -(softmax(s)[label].log() if method.bounded else s[label].log())
    sharp = [softmax([z / method.temperature for z in view]) for view in (one, other)]
    middle = [(a + b) / 2 for a, b in zip(*sharp, strict=True)]
    for q in sharp:
        divergence = sum(a * (a / m).log() for a, m in zip(q, middle, strict=True))
        found = found + weight / len(one) * divergence / 2
        r = softmax(q) if method.bounded else q
        found = found - method.entropy_weight / 2 * sum(a * a.log() for a in r)
    return found


def trained(toy: Toy, model: Tree, client: int, t: int, views: Views | None) -> Tree:
    method: Any = toy.algorithm
    part, streams = toy.dataset.load(client)["train"], toy.context.streams
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=0.2, momentum=0.5, weight_decay=0.01)
    steps = 2 * -(-len(part.y) // 3)
    plan = plan_batches(len(part.y), 3, steps, streams.generator("batches", t, client))
    drawn = {} if views is None else views.draw(streams.generator("augment", t, client), len(plan.order))
    shares = 1 - streams.generator("mix", t, client).random(steps)
    weight = method.consistency_weight * (min(1, t / method.ramp_rounds) if method.ramp_rounds else 1)
    begin = 0
    for index, share in zip(plan.batches(CPU), shares, strict=True):
        x, end = part.x[index], begin + len(index)
        first = second = x
        if views is not None:
            own = {name: values[begin:end] for name, values in drawn.items()}
            first, second = views.both(x, torch.zeros(len(x)), own)[0].unbind(1)
        begin = end
        rows = zip(logits_of(leaves, first), logits_of(leaves, second), part.y[index].tolist(), strict=True)
        losses = [loss_by_hand(one, other, label, share, weight, method) for one, other, label in rows]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


@pytest.mark.parametrize("name", ["entropy", "one-view", pytest.param("plain", marks=pytest.mark.slow)])
@pytest.mark.first_case
def test_inv_lsr_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = FedLSR(**SETTINGS[name])
    toy = toy_of(method)
    views = None if name == "one-view" else views_of(method)
    model = initial(toy)
    for t, cohort in enumerate(COHORTS):
        sizes = {k: 1 if method.aggregation == "uniform" else SIZES[k] for k in cohort}
        models = {k: trained(toy, model, k, t, views) for k in cohort}
        model = {key: sum(sizes[k] / sum(sizes.values()) * models[k][key] for k in cohort) for key in model}  # type: ignore[misc]
        assert_close(toy.step(cohort)["model"], model, 1e-12)


@pytest.mark.parametrize("name", ["entropy", pytest.param("one-view", marks=pytest.mark.slow)])
@pytest.mark.parametrize("normalized", [pytest.param(False, marks=pytest.mark.slow), True])
def test_inv_lsr_2_looped_and_vectorized_agree_and_one_host_is_three(name: str, normalized: bool) -> None:
    method, task = FedLSR(**SETTINGS[name]), flat_layers(normalized=normalized)
    toys = [toy_of(method, task=task, mode=mode) for mode in ("looped", "vectorized")]
    toys.append(toy_of(method, task=task, hosts=3))
    for toy in toys:
        for cohort in COHORTS:
            toy.step(cohort)
    assert_close(toys[0].server["model"], toys[1].server["model"], 1e-9)
    assert_equal(toys[2].server, toys[0].server)


def test_inv_lsr_3_losses_are_bounded_whatever_the_label() -> None:
    logits = 50 * torch.eye(4, dtype=torch.float64)
    wrong = torch.tensor([1, 2, 3, 0])
    found = FedLSR().labelled(logits.log_softmax(-1), wrong)
    assert_close(found, torch.full((4,), math.log(3 + math.e), dtype=torch.float64), 1e-9)
    assert bool((FedLSR(bounded=False).labelled(logits.log_softmax(-1), wrong) > 90).all())
    right = FedLSR().labelled(logits.log_softmax(-1), torch.arange(4))
    assert_close(right, torch.full((4,), math.log(3 / math.e + 1), dtype=torch.float64), 1e-9)


def test_inv_lsr_4_views_that_are_the_same_say_what_one_view_says() -> None:
    still = Views((None, None))
    two, one = toy_of(FedLSR()), toy_of(FedLSR(rotate=0))
    two = Toy(FedLSR(ramp_rounds=0), two.dataset, two.task, TRAIN, views=still)
    for cohort in COHORTS:
        assert_close(two.step(cohort)["model"], one.step(cohort)["model"], 1e-12)


def test_inv_lsr_5_one_view_without_more_is_the_cross_entropy_of_sharpened_probabilities() -> None:
    """softmax(2 z) is what is sharpened of softmax(z): federated averaging with doubled logits."""
    ours = toy_of(FedLSR(rotate=0, entropy_weight=0, bounded=False))
    theirs = toy_of(FedAvg(), task=flat_layers())
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 0, 1])
    expected = torch.nn.functional.cross_entropy(2 * logits, y, reduction="none")
    assert_close(FedLSR(bounded=False).labelled(logits.log_softmax(-1), y), expected, 1e-12)
    ours.step([0, 1])
    theirs.step([0, 1])
    assert ours.federation.traffic.by_client == theirs.federation.traffic.by_client


def test_views_are_what_augment_says_and_more() -> None:
    weak = AugmentConfig(crop=2, rotate=5)
    first, second = FedLSR(flip=True).views(weak)
    assert first == weak and second == AugmentConfig(crop=2, rotate=30, flip=True)
    assert FedLSR(rotate=0, jitter=0.5).views(weak)[1] == AugmentConfig(crop=2, rotate=5, jitter=0.5)
    assert FedLSR(rotate=0).views(weak) == ()


def test_vectors_are_refused_unless_there_is_one_view() -> None:
    content: dict[str, Any] = {
        "dataset": {"name": "synthetic", "num_clients": 4},
        "model": {"name": "two_nn", "hidden": [4]},
        "algorithm": "fedlsr",
        "train": {"rounds": 1, "clients_per_round": 2},
    }
    with pytest.raises(ConfigError, match=r"fedlsr cannot learn from .*compares differently changed images"):
        _ = Parts(load_config(Experiment, content, {})).context
    content["algorithm"] = {"name": "fedlsr", "rotate": 0}
    assert Parts(load_config(Experiment, content, {})).context.views is None


def test_what_is_idle() -> None:
    assert len(FedLSR(rotate=0, consistency_weight=0.2).idle_settings()) == 1
    assert len(FedLSR(consistency_weight=0, ramp_rounds=3).idle_settings()) == 1
    assert not FedLSR(rotate=0, flip=True, consistency_weight=0.2).idle_settings()
