"""SemiFL: an oracle in plain PyTorch, what it is without its parts, stacks, who takes part, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.registry import Experiment
from algorithms.semifl import SemiFL
from rayfl.data.images.augmentation import Augmentation
from rayfl.data.images.views import Views
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.params import Tree
from tests.algorithms.test_fixmatch import cycled, logits_of
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal
from tests.support.unlabelled_toys import SIZES, SPEC, WEAK, flat_layers, hidden, image_clients, semi_toy, views_of

COHORTS = ([0, 2, 3], [1, 2], [0, 1, 2, 3])
PUBLIC = 11
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"threshold": 0.4},
    "samples": {
        "threshold": 0.37,
        "aggregation": "samples",
        "server_momentum": 0.0,
        "server_epochs": 3,
        "mix_weight": 2.0,
        "mix_concentration": 1.5,
    },
    "fixed": {"threshold": 0.4, "mix_weight": 0.0, "server_batch_size": 5, "operations": 1},
}


def weak() -> Augmentation:
    found = WEAK.build(SPEC, np.zeros(1, np.float32))
    assert found is not None
    return found


def toy_of(method: SemiFL, data: ListDataset | None = None, **options: Any) -> Toy:
    dataset = hidden(image_clients(public=PUBLIC) if data is None else data, at="server")
    return semi_toy(method, dataset=dataset, augmentation=weak(), **options)


def optimized(leaves: Tree) -> torch.optim.SGD:
    return torch.optim.SGD(leaves.values(), lr=0.2, momentum=0.5, weight_decay=0.01)


def trained_by_hand(toy: Toy, model: Tree, client: int, round: int, views: Views) -> Tree | None:
    """The client's model; None where the received one is sure of no image."""
    method: Any = toy.algorithm
    x, streams = toy.dataset.load_unlabelled(client), toy.context.streams
    likeliest, labels = logits_of(model, x).softmax(1).max(1)
    fixed = np.flatnonzero(likeliest.numpy() >= method.threshold)
    n = len(fixed)
    if not n:
        return None
    drawn_mix = streams.generator("mix.samples", round, client).integers(len(x), size=n)
    steps = 2 * -(-n // 3)
    first = [fixed[part] for part in cycled(streams.generator("batches", round, client), n, 3, steps)]
    second = [drawn_mix[part] for part in cycled(streams.generator("batches.unlabelled", round, client), n, 3, steps)]
    a = method.mix_concentration
    shares = streams.generator("mix", round, client).beta(a, a, steps) if method.mix_weight else np.ones(steps)
    drawn = views.draw(streams.generator("augment", round, client), 2 * sum(map(len, first)))
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in model.items()}
    optimizer, begin = optimized(leaves), 0
    for fix, mix, share in zip(first, second, shares, strict=True):
        b = len(fix)
        own = {name: values[begin : begin + 2 * b] for name, values in drawn.items()}
        plain, strong = views.both(torch.cat([x[fix], x[mix]]), torch.zeros(2 * b), own)[0].unbind(1)
        begin += 2 * b
        optimizer.zero_grad()
        loss = F.cross_entropy(logits_of(leaves, strong[:b]), labels[fix])
        logits = logits_of(leaves, share * plain[:b] + (1 - share) * plain[b:])
        pair = share * F.cross_entropy(logits, labels[fix]) + (1 - share) * F.cross_entropy(logits, labels[mix])
        (loss + method.mix_weight * pair).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {key: leaf.detach() for key, leaf in leaves.items()}


def tuned_by_hand(toy: Toy, model: Tree, round: int) -> Tree:
    method: Any = toy.algorithm
    x, y, streams = toy.dataset.load_public(), torch.from_numpy(toy.dataset.public_labels()), toy.context.streams
    size, epochs = method.server_batch_size or 3, method.server_epochs or 2
    batches = cycled(streams.generator("batches", round, -1), PUBLIC, size, epochs * -(-PUBLIC // size))
    changes, begin = weak(), 0
    drawn = changes.draw(streams.generator("augment", round, -1), sum(map(len, batches)))
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in model.items()}
    optimizer = optimized(leaves)
    for batch in batches:
        own = {name: values[begin : begin + len(batch)] for name, values in drawn.items()}
        begin += len(batch)
        optimizer.zero_grad()
        F.cross_entropy(logits_of(leaves, changes(x[batch], own)), y[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {key: leaf.detach() for key, leaf in leaves.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_semifl_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = SemiFL(**SETTINGS[name])
    toy = toy_of(method)
    views, model = views_of(method), dict(toy.server["model"])
    moments = {key: torch.zeros_like(leaf) for key, leaf in model.items()}
    trained = 0
    for round, cohort in enumerate(COHORTS):
        found = {client: trained_by_hand(toy, model, client, round, views) for client in cohort}
        models = {client: one for client, one in found.items() if one is not None}
        trained += len(models)
        weights = {client: float(SIZES[client]) if method.aggregation == "samples" else 1.0 for client in models}
        for key in model:
            mean = sum(weights[k] * models[k][key] for k in models) / sum(weights.values()) if models else model[key]
            moments[key] = method.server_momentum * moments[key] + mean - model[key]
        model = tuned_by_hand(toy, {key: leaf + moments[key] for key, leaf in model.items()}, round)
        assert_close(toy.step(cohort)["model"], model, 1e-12)
        assert_close(toy.server["momentum"], moments, 1e-12)
    assert trained > 0


@pytest.mark.parametrize("normalized", [False, True])
def test_inv_semifl_2_stacked_clients_train_as_one_by_one(normalized: bool) -> None:
    looped, stacked = (
        toy_of(SemiFL(threshold=0.4), task=flat_layers(normalized=normalized), mode=mode)
        for mode in ("looped", "vectorized")
    )
    for cohort in COHORTS:
        assert_close(looped.step(cohort)["model"], stacked.step(cohort)["model"], 1e-10)


def test_inv_semifl_3_where_no_client_is_sure_the_server_trains_alone() -> None:
    toy = toy_of(SemiFL(threshold=1.0))
    model = dict(toy.server["model"])
    for round, cohort in enumerate(COHORTS):
        model = tuned_by_hand(toy, model, round)
        assert_close(toy.step(cohort)["model"], model, 1e-12)
        # a client that is sure of nothing says just that, in one number
        assert {up for _, up in toy.federation.traffic.by_client.values()} == {4}
    assert not any(leaf.any() for leaf in toy.server["momentum"].values())


def test_inv_semifl_4_labels_of_clients_change_no_bit() -> None:
    data, other = (image_clients(public=PUBLIC) for _ in range(2))
    for _, y in other._clients:
        y[:] = (y + 1) % 3
    for cohort in COHORTS[:1]:
        found = [toy_of(SemiFL(threshold=0.4), one).step(cohort)["model"] for one in (data, other)]
        labelled = semi_toy(SemiFL(threshold=0.4), dataset=other, augmentation=weak()).step(cohort)["model"]
        assert_equal(*found)
        assert_equal(found[0], labelled)


def config(**sections: Any) -> dict[str, Any]:
    return {
        "dataset": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 5},
        "model": {"name": "two_nn", "hidden": [8]},
        "algorithm": {"name": "semifl"},
        "labelled": {"at": "server"},
        "holdout": {"public": 50},
        **sections,
    }


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"labelled": {}, "holdout": {}}, "holdout.public is 0, but in semifl the server trains on labelled samples"),
        (
            {"dataset": {"name": "breast_cancer"}},
            "semifl cannot learn from vectors of 30 numbers .*: it compares differently changed images",
        ),
    ],
)
def test_what_it_cannot_learn_from_is_refused_by_name(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Parts(Experiment.model_validate(config(**sections))).check()


def test_clients_without_labels_may_train() -> None:
    sizes = Parts(Experiment.model_validate(config())).check()
    assert (sizes[:, 0] > 0).all()


def test_tensors_of_the_oracle_are_what_is_tested() -> None:
    x = torch.rand(2, 1, 4, 5, dtype=torch.float64)
    toy = toy_of(SemiFL())
    logits: Tensor = toy.task.network.logits(toy.server["model"], x, training=False)
    assert_close({"logits": logits}, {"logits": logits_of(toy.server["model"], x)}, 1e-14)
