"""FedAvg+FixMatch: an oracle in plain PyTorch, what it is without its parts, stacks, weights, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedprox import FedProx
from algorithms.fixmatch import FixMatch
from algorithms.parts.weak_strong import paired_samples
from algorithms.registry import Experiment
from rayfl.data.images.views import Views
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.params import Tree
from tests.support.toys import Toy, assert_close, assert_equal
from tests.support.unlabelled_toys import SIZES, TRAIN, flat_layers, hidden, image_clients, semi_toy, views_of

COHORTS = ([0, 2, 3], [1, 2], [0, 1, 2, 3])
SURE = {"threshold": 0.4, "unlabelled_ratio": 2, "cutout": 0.6}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": SURE,
    "prox": {**SURE, "proximal_weight": 0.7, "aggregation": "uniform"},
    "light": {
        "threshold": 0.5,
        "unlabelled_ratio": 1,
        "unlabelled_weight": 2.5,
        "operations": 1,
        "aggregation": "population",
    },
}


def logits_of(model: Tree, x: Tensor) -> Tensor:
    inner = torch.relu(x.flatten(1) @ model["inner.weight"].T + model["inner.bias"])
    return inner @ model["head.weight"].T + model["head.bias"]


def cycled(generator: np.random.Generator, count: int, size: int, steps: int) -> list[np.ndarray]:
    """Mini-batches of one permutation after another, the last one of each with what is left."""
    found: list[np.ndarray] = []
    while len(found) < steps:
        order = generator.permutation(count)
        found += [order[first : first + size] for first in range(0, count, size)]
    return found[:steps]


def trained_by_hand(toy: Toy, model: Tree, client: int, round: int, views: Views) -> Tree:
    """The client's model, of FixMatch as the paper has it: labelled and unlabelled images apart."""
    method: Any = toy.algorithm
    part, rest = toy.dataset.load(client)["train"], toy.dataset.load_unlabelled(client)
    size, ratio, streams = 3, method.unlabelled_ratio, toy.context.streams
    steps = 2 * -(-len(rest) // (ratio * size))
    known = cycled(streams.generator("batches", round, client), len(part.y), size, steps)
    others = cycled(streams.generator("batches.unlabelled", round, client), len(rest), ratio * size, steps)
    drawn = views.draw(streams.generator("augment", round, client), sum(map(len, known)) + sum(map(len, others)))
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in model.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=0.2, momentum=0.5, weight_decay=0.01)
    begin = 0
    for labelled, unlabelled in zip(known, others, strict=True):
        end = begin + len(labelled) + len(unlabelled)
        x = torch.cat([part.x[labelled], rest[unlabelled]])
        own = {name: values[begin:end] for name, values in drawn.items()}
        weak, strong = views.both(x, torch.zeros(len(x)), own)[0].unbind(1)
        begin, n = end, len(labelled)
        optimizer.zero_grad()
        loss = F.cross_entropy(logits_of(leaves, weak[:n]), part.y[labelled])
        with torch.no_grad():
            sure, guess = logits_of(leaves, weak[n:]).softmax(1).max(1)
        each = F.cross_entropy(logits_of(leaves, strong[n:]), guess, reduction="none")
        loss = loss + method.unlabelled_weight * (each * (sure >= method.threshold)).sum() / len(unlabelled)
        for key, leaf in leaves.items():
            loss = loss + method.proximal_weight / 2 * (leaf - model[key]).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {key: leaf.detach() for key, leaf in leaves.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_fixmatch_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = FixMatch(**SETTINGS[name])
    toy = semi_toy(method)
    views, model = views_of(method), dict(toy.server["model"])
    for round, cohort in enumerate(COHORTS):
        models = {client: trained_by_hand(toy, model, client, round, views) for client in cohort}
        weights = {client: 1.0 if method.aggregation == "uniform" else float(SIZES[client]) for client in cohort}
        mass = float(sum(SIZES)) if method.aggregation == "population" else sum(weights.values())
        rest = mass - sum(weights.values())
        model = {key: (sum(weights[k] * models[k][key] for k in cohort) + rest * model[key]) / mass for key in model}
        assert_close(toy.step(cohort)["model"], model, 1e-12)


@pytest.mark.parametrize("normalized", [False, True])
def test_inv_fixmatch_2_stacked_clients_train_as_one_by_one(normalized: bool) -> None:
    toys = [
        semi_toy(FixMatch(**SURE), task=flat_layers(normalized=normalized), mode=mode)
        for mode in ("looped", "vectorized")
    ]
    for cohort in COHORTS:
        looped, stacked = (toy.step(cohort)["model"] for toy in toys)
        assert_close(looped, stacked, 1e-10)


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_inv_fixmatch_3_without_unlabelled_samples_it_is_fedavg_or_fedprox_to_the_bit(weight: float) -> None:
    data = image_clients()
    theirs = FedProx(proximal_weight=weight) if weight else FedAvg()
    ours, other = (semi_toy(one, dataset=data) for one in (FixMatch(proximal_weight=weight), theirs))
    for cohort in COHORTS:
        assert_equal(ours.step(cohort)["model"], other.step(cohort)["model"])


def test_inv_fixmatch_4_a_weight_of_0_or_a_threshold_above_all_learns_from_labels_alone() -> None:
    # the steps are those over the unlabelled samples, so that it is not the same as without these
    none, never = (
        semi_toy(FixMatch(**{**SURE, **change})) for change in ({"unlabelled_weight": 0}, {"threshold": 1.0})
    )
    for cohort in COHORTS:
        assert_close(none.step(cohort)["model"], never.step(cohort)["model"], 1e-14)


def test_inv_fixmatch_5_hidden_labels_change_no_bit_and_known_ones_do() -> None:
    found = []
    for change in (0, 1, 2):
        data = image_clients()
        kept = hidden(data, share=0.3)
        for client, (_, y) in enumerate(data._clients):
            places = kept.places(client)["train"]
            changed = (y + 1) % 3
            own = np.isin(np.arange(len(y)), places)
            y[torch.from_numpy(own if change == 2 else ~own & (change == 1))] = changed[
                torch.from_numpy(own if change == 2 else ~own & (change == 1))
            ]
        toy = semi_toy(FixMatch(**SURE), dataset=hidden(data, share=0.3))
        found.append([toy.step(cohort)["model"] for cohort in COHORTS][-1])
    assert_equal(found[0], found[1])
    assert not torch.equal(found[0]["head.weight"], found[2]["head.weight"])


def test_what_unlabelled_samples_teach_changes_with_the_strong_changes_alone() -> None:
    first = [
        semi_toy(FixMatch(**{**SURE, **change})).step([0, 2]) for change in ({}, {"cutout": 0.0}, {"operations": 3})
    ]
    weights = [one["model"]["inner.weight"] for one in first]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("train", [TRAIN, TRAIN.model_copy(update={"batch_size": None, "local_epochs": 3})])
@pytest.mark.parametrize(("labelled", "unlabelled"), [(4, 10), (2, 29), (5, 3), (0, 7)])
def test_samples_in_steps_are_those_of_the_mini_batches(train: TrainConfig, labelled: int, unlabelled: int) -> None:
    data = image_clients([labelled + unlabelled])
    if labelled:
        toy = semi_toy(
            FixMatch(unlabelled_ratio=2), dataset=hidden(data, share=labelled / (labelled + unlabelled)), train=train
        )
        host = toy.client_hosts[0]
        samples = host._samples.of(0)
        assert (len(samples["train"]), len(samples["unlabelled"])) == (labelled, unlabelled)
    size = train.batch_size or labelled
    steps = train.local_epochs * -(-unlabelled // (2 * train.batch_size if train.batch_size else unlabelled))
    known = cycled(np.random.default_rng(0), labelled, size, steps) if labelled else []
    expected = sum(map(len, known)) + train.local_epochs * unlabelled
    assert paired_samples(train, labelled, unlabelled, 2) == expected


def config(**sections: Any) -> dict[str, Any]:
    return {
        "dataset": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 5},
        "model": {"name": "two_nn", "hidden": [8]},
        "algorithm": {"name": "fixmatch"},
        "labelled": {"share": 0.2},
        "train": {"rounds": 2, "clients_per_round": 2, "local_epochs": 1, "batch_size": 4},
        "cluster": {"backend": "inline"},
        "tracking": {"tensorboard": False},
        **sections,
    }


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"dataset": {"name": "breast_cancer"}},
            "fixmatch cannot learn from vectors of 30 numbers .*: it compares differently changed images",
        ),
        (
            {
                "task": {"name": "multilabel"},
                "dataset": {"name": "synthetic_labels"},
                "partition": {"name": "natural"},
                "labelled": {},
            },
            "cannot learn task=multilabel",
        ),
        ({"labelled": {"at": "server"}, "holdout": {"public": 50}}, "clients have no labels, but fixmatch needs some"),
    ],
)
def test_what_it_cannot_learn_from_is_refused_by_name(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Parts(Experiment.model_validate(config(**sections))).check()


def test_a_run_without_unlabelled_samples_says_so(caplog: pytest.LogCaptureFixture) -> None:
    Parts(Experiment.model_validate(config(labelled={}))).check()
    assert "fixmatch learns from samples without labels, and there are none: set labelled.share" in caplog.text


def test_sizes_of_a_run_count_all_samples_that_the_method_learns_from() -> None:
    ours, theirs = (
        Parts(Experiment.model_validate(config(algorithm={"name": name}))).check() for name in ("fixmatch", "fedavg")
    )
    whole = Parts(Experiment.model_validate(config(labelled={}))).check()
    assert np.array_equal(ours, whole) and (theirs[:, 0] == (0.2 * whole[:, 0]).astype(int)).all()
