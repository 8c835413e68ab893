"""FedCorr: an oracle in plain PyTorch, and invariants CORR of who is told and corrected."""

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
from algorithms.fedcorr import FedCorr
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, num_bytes
from tests.algorithms.test_fedcorr_dimensionality import dimension_by_hand
from tests.support.partial_toys import initial, three_layers
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal, random_clients

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
TRAIN = TrainConfig(
    rounds=7, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
SIZES = (9, 14, 6, 11, 8, 12)
COHORTS = ([0, 1, 2], [0, 3], [1, 3, 4], [0, 2, 5], [1, 4], [0, 2, 3], [3, 5])
SHORT: dict[str, Any] = {"iterations": 3, "clean_rounds": 2, "neighbours": 4, "confidence": 0.4}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": SHORT,
    "two-at-once": {
        **SHORT,
        "clients_at_once": 2,
        "aggregation": "uniform",
        "proximal_form": "norm",
        "clean_level": 0.3,
    },
    "plain": {**SHORT, "mixup_concentration": 0.0, "proximal_weight": 0.0, "relabel_share": 1.0, "clean_rounds": 0},
}


def toy_of(method: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(method, **{"dataset": random_clients(SIZES), "task": two_layers(), **options}, train=train)


def probabilities(model: Tree, x: Tensor) -> Tensor:
    """Of an MLP with one hidden layer."""
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    return torch.softmax(hidden @ model["head.weight"].T + model["head.bias"], 1)


def higher(values: list[float]) -> list[bool]:
    rows = np.array(values)[:, None]
    mixture = GaussianMixture(n_components=2, random_state=0).fit(rows)
    return [bool(label == np.argmax(mixture.means_[:, 0])) for label in mixture.predict(rows)]


class Oracle:
    """FedCorr client by client and sample by sample."""

    def __init__(self, toy: Toy, method: FedCorr) -> None:
        self.toy, self.method, self.model = toy, method, initial(toy)
        parts = [toy.dataset.load(k)["train"] for k in range(len(SIZES))]
        self.x, self.y = [part.x for part in parts], [part.y.clone() for part in parts]
        self.sums, self.levels, self.noisy = [0.0] * len(SIZES), [0.0] * len(SIZES), [False] * len(SIZES)

    def trained(self, k: int, round: int, level: float) -> Tree:
        model, method, streams = self.model, self.method, self.toy.context.streams
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
        optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
        steps = 2 * -(-SIZES[k] // 4)
        mix = streams.generator("mix", round, k)
        for index in plan_batches(SIZES[k], 4, steps, streams.generator("batches", round, k)).batches(CPU):
            x, y = self.x[k][index], self.y[k][index]
            share, order = 1.0, torch.arange(len(y))
            if method.mixup_concentration:
                share = mix.beta(method.mixup_concentration, method.mixup_concentration)
                order = torch.from_numpy(mix.permutation(len(y)))
            found = probabilities(leaves, share * x + (1 - share) * x[order]).log()
            loss = share * F.nll_loss(found, y) + (1 - share) * F.nll_loss(found, y[order])
            apart = sum(((leaf - model[name]) ** 2).sum() for name, leaf in leaves.items())
            if method.proximal_form == "norm":
                apart = (apart + 1e-300).sqrt()  # type: ignore[operator]
            optimizer.zero_grad()
            (loss + method.proximal_weight * level * apart).backward()
            optimizer.step()
        return {name: leaf.detach() for name, leaf in leaves.items()}

    def mean(self, models: dict[int, Tree]) -> Tree:
        sizes = {k: 1 if self.method.aggregation == "uniform" else SIZES[k] for k in models}
        total = sum(sizes.values())
        return {name: sum(sizes[k] / total * models[k][name] for k in models) for name in self.model}

    def sure(self, k: int, i: int) -> None:
        found = probabilities(self.model, self.x[k])[i]
        if float(found.max()) >= self.method.confidence:
            self.y[k][i] = int(found.argmax())

    def first(self, round: int) -> None:
        method, losses, everyone = self.method, {}, len(SIZES)
        order = self.toy.context.streams.generator("fedcorr.order", round).permutation(everyone).tolist()
        while order:
            group, order = order[: method.clients_at_once], order[method.clients_at_once :]
            models = {k: self.trained(k, round, self.levels[k]) for k in group}
            for k, model in models.items():
                found = probabilities(model, self.x[k])
                losses[k] = [-math.log(float(row[label])) for row, label in zip(found, self.y[k], strict=True)]
                self.sums[k] += dimension_by_hand(found, method.neighbours)
            self.model = self.mean(models)
        self.noisy = higher(self.sums)
        self.levels = [0.0] * everyone
        for k in range(everyone):
            if self.noisy[k]:
                wrong = sum(higher(losses[k]))
                self.levels[k] = wrong / SIZES[k]
                for i in sorted(range(SIZES[k]), key=lambda i: -losses[k][i])[: int(wrong * method.relabel_share)]:
                    self.sure(k, i)

    def later(self, round: int, cohort: list[int]) -> None:
        after, streams = round - self.method.iterations, self.toy.context.streams
        if after < self.method.clean_rounds:
            clean = [k for k, mu in enumerate(self.levels) if mu <= max(self.method.clean_level, min(self.levels))]
            kept = [k for k in cohort if k in clean]
            rest = [k for k in clean if k not in kept]
            count = min(len(cohort), len(clean)) - len(kept)
            cohort = kept + streams.generator("fedcorr.clean", round).choice(rest, count, replace=False).tolist()
        elif after == self.method.clean_rounds > 0:
            for k in range(len(SIZES)):
                for i in range(SIZES[k]) if self.noisy[k] else ():
                    self.sure(k, i)
        self.model = self.mean({k: self.trained(k, round, 0.0) for k in cohort})


@pytest.mark.parametrize("name", ["default", "two-at-once", pytest.param("plain", marks=pytest.mark.slow)])
def test_inv_corr_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = FedCorr(**SETTINGS[name])
    toy = toy_of(method)
    oracle = Oracle(toy, method)
    before = [labels.clone() for labels in oracle.y]
    for round, cohort in enumerate(COHORTS):
        if round < method.iterations:
            oracle.first(round)
        else:
            oracle.later(round, list(cohort))
        toy.step(cohort)
        assert_close(toy.server["model"], oracle.model, 1e-12)
        assert_close(toy.server["levels"], torch.tensor(oracle.levels, dtype=torch.float64), 1e-15)
        assert toy.server["noisy"].tolist() == oracle.noisy
        torch.testing.assert_close(
            toy.server["dimensions"], torch.tensor(oracle.sums, dtype=torch.float64), rtol=1e-9, atol=0
        )
    states = toy.states()
    for k, labels in enumerate(oracle.y):
        if "labels" in states[k]:
            assert torch.as_tensor(states[k]["labels"]).tolist() == labels.tolist()
        else:
            assert labels.tolist() == before[k].tolist()
    assert any(not torch.equal(one, other) for one, other in zip(before, oracle.y, strict=True))
    assert any(oracle.noisy) and not all(oracle.noisy)


@pytest.mark.parametrize(
    ("make", "batch_size"),
    [
        (normalized_layers, 4),
        *(
            pytest.param(make, batch_size, marks=pytest.mark.slow)
            for make, batch_size in ((two_layers, 4), (two_layers, None), (three_layers, 4), (normalized_layers, None))
        ),
    ],
)
def test_inv_corr_2_looped_and_vectorized_agree_and_one_host_is_three(make: Any, batch_size: int | None) -> None:
    method = FedCorr(**{**SHORT, "clients_at_once": 3})
    train = TRAIN.model_copy(update={"batch_size": batch_size})
    toys = [toy_of(method, train, task=make(), mode=mode) for mode in ("looped", "vectorized")]
    toys.append(toy_of(method, train, task=make(), hosts=3))
    for toy in toys:
        for cohort in COHORTS:
            toy.step(cohort)
    assert_close(toys[0].server["model"], toys[1].server["model"], 1e-9)
    assert torch.equal(toys[0].server["noisy"], toys[1].server["noisy"])
    assert all(bool(leaf.isfinite().all()) for leaf in toys[0].server["model"].values())
    assert_equal(toys[2].server, toys[0].server)


def planted(clients: int = 8, samples: int = 80) -> tuple[ListDataset, list[int], list[Tensor]]:
    """Clients of six classes alike, of which some have random labels for 6 of 10 samples; and the right labels."""
    generator = torch.Generator().manual_seed(1)
    centres = 1.5 * torch.randn(6, 10, generator=generator, dtype=torch.float64)
    noisy, seen, right = [1, 4, 6], [], []
    for client in range(clients):
        y = torch.arange(samples) % 6
        x = centres[y] + torch.randn(samples, 10, generator=generator, dtype=torch.float64)
        right.append(y)
        if client in noisy:
            wrong = torch.rand(len(y), generator=generator) < 0.6
            y = torch.where(wrong, torch.randint(6, (len(y),), generator=generator), y)
        seen.append((x, y))
    return ListDataset(seen, 6), noisy, right


def test_inv_corr_6_planted_clients_are_told_and_their_labels_corrected() -> None:
    dataset, noisy, right = planted()
    train = TrainConfig(rounds=6, clients_per_round=4, batch_size=10, local_epochs=3, lr=0.1)
    toy = toy_of(FedCorr(iterations=3, clean_rounds=2), train, dataset=dataset, task=two_layers(10, 16, 6))
    toy.run()
    assert toy.server["noisy"].nonzero().flatten().tolist() == noisy
    assert bool((toy.server["levels"][noisy] > 0.2).all())
    for client, state in toy.states().items():
        if client in noisy:
            given = dataset.load(client)["train"].y
            now = torch.as_tensor(state["labels"])
            assert float((given == right[client]).double().mean()) < 0.6
            assert float((now == right[client]).double().mean()) > 0.9
        else:
            assert "labels" not in state


@MODES
def test_inv_corr_7_without_what_it_adds_one_pass_at_once_is_federated_averaging(mode: str) -> None:
    off = {"iterations": 1, "clients_at_once": 6, "clean_rounds": 0, "relabel_share": 0.0, "mixup_concentration": 0.0}
    ours, theirs = (toy_of(method, mode=mode) for method in (FedCorr(**off), FedAvg()))
    for cohort in (list(range(6)), [0, 2, 3], [1, 4, 5]):
        assert_close(ours.step(cohort)["model"], theirs.step(cohort)["model"], 1e-12)


def test_inv_corr_8_noisy_clients_rest_until_the_others_are_through() -> None:
    toy = toy_of(FedCorr(**SHORT))
    toy.server = {
        **toy.server,
        "levels": torch.tensor([0.0, 0.5, 0.1, 0.2, 0.0, 0.7], dtype=torch.float64),
        "noisy": torch.tensor([False, True, True, True, False, True]),
    }
    toy.round = 3
    toy.step([1, 3, 5])
    assert sorted(toy.federation.traffic.by_client) == [0, 2, 4]
    toy.step([0, 5])
    assert len(toy.federation.traffic.by_client) == 2 and 0 in toy.federation.traffic.by_client
    assert not {1, 3, 5} & set(toy.federation.traffic.by_client)
    assert not any("labels" in state for state in toy.states().values())
    toy.step([0, 5])
    assert sorted(toy.federation.traffic.by_client) == [0, 1, 2, 3, 5]
    assert sorted(client for client, state in toy.states().items() if "labels" in state) == [1, 2, 3, 5]


def test_where_nobody_is_clean_enough_the_cleanest_train() -> None:
    toy = toy_of(FedCorr(**SHORT))
    toy.server = {**toy.server, "levels": torch.tensor([0.4, 0.3, 0.9, 0.3, 0.5, 0.6], dtype=torch.float64)}
    toy.round = 3
    toy.step([0, 1, 2])
    assert sorted(toy.federation.traffic.by_client) == [1, 3]


def test_what_travels_in_a_pass() -> None:
    toy = toy_of(FedCorr(**SHORT))
    toy.step([0])
    size = num_bytes(toy.server["model"])
    for client, (down, up) in toy.federation.traffic.by_client.items():
        noisy = bool(toy.server["noisy"][client])
        assert (down, up) == (size + 8 + noisy * size, size + 8 + noisy * 8)
    assert len(toy.federation.traffic.by_client) == len(SIZES)


def test_a_client_without_samples_takes_no_part() -> None:
    toy = toy_of(FedCorr(**SHORT), dataset=random_clients((9, 0, 6, 11, 8, 12)))
    for cohort in COHORTS[:3]:
        toy.step(cohort)
        assert 1 not in toy.federation.traffic.by_client and not toy.server["noisy"][1]
    assert all(bool(leaf.isfinite().all()) for leaf in toy.server["model"].values())
    toy.server = {**toy.server, "levels": torch.tensor([0.4, 0.0, 0.9, 0.3, 0.5, 0.6], dtype=torch.float64)}
    toy.step([0, 2, 4])  # of clean clients alone
    assert sorted(toy.federation.traffic.by_client) == [3]


@pytest.mark.parametrize("private", [pytest.param("statistics", marks=pytest.mark.slow), "all"])
def test_private_layers_stay_with_the_clients(private: str) -> None:
    train = TRAIN.model_copy(update={"private_norm": private})
    method = FedCorr(**{**SHORT, "clients_at_once": 3})
    toys = [toy_of(method, train, task=normalized_layers(), mode=mode) for mode in ("looped", "vectorized")]
    for toy in toys:
        for cohort in COHORTS:
            toy.step(cohort)
    assert_close(toys[0].server["model"], toys[1].server["model"], 1e-9)


def test_what_is_refused_and_remarked() -> None:
    alone = toy_of(FedCorr(), TRAIN.model_copy(update={"clients_per_round": 1}), dataset=random_clients((9,)))
    with pytest.raises(ConfigError, match="there is one client"):
        alone.algorithm.check(alone.task, alone.context)
    context = toy_of(FedCorr()).context
    assert "iterations=5 and algorithm.clean_rounds=50 come first, and the run has 7" in FedCorr().remarks(context)[0]
    assert not FedCorr(**SHORT).remarks(context)
    assert len(FedCorr(clean_rounds=0, clean_level=0.3).idle_settings()) == 1
