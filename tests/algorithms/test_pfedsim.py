"""pFedSim: invariants PSIM, fixture G12, both phases, who receives what, and clients in two camps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.fedavg import FedAvg
from algorithms.local import Local
from algorithms.pfedsim import PFedSim, head_similarity, mixing_weights
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, map_leaves
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import ListDataset, RelabelledStreams, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10, 16)
TRAIN = TrainConfig(
    rounds=6, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
COHORTS = ([0, 1, 2], [1, 3, 4], [0, 2, 3], [0, 1, 2], [2, 4], [0, 3, 4])


def toy_of(algorithm: Any = None, make: Any = two_layers, **options: Any) -> Toy:
    return Toy(algorithm or PFedSim(), random_clients(SIZES), make(), TRAIN, **options)


def whole(parts: Tree) -> Tree:
    return {**parts["body"], **parts["head"]}


def received(toy: Toy, client: int) -> Tree:
    assert isinstance(toy.algorithm, PFedSim)
    return toy.algorithm.received_by(client, toy.server)


def heads(seed: int, m: int = 4, classes: int = 3, features: int = 7) -> torch.Tensor:
    return torch.randn(m, classes, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
def test_inv_psim_1_all_rounds_in_the_first_phase_are_fedavg(policy: Any) -> None:
    similar, plain = toy_of(PFedSim(warmup=1, aggregation=policy)), toy_of(FedAvg(aggregation=policy))
    for _ in range(TRAIN.rounds):
        assert_equal(similar.step()["model"], plain.step()["model"])
    left, right = similar.scores(final=True), plain.scores(final=True)
    for client in range(5):
        for row in ("global", "personalized"):
            assert (left[client][row].vector == right[client]["global"].vector).all()


def test_where_the_first_phase_comes_back_the_second_one_begins_again() -> None:
    toy, fork, plain = toy_of(PFedSim(warmup=0.5)), toy_of(PFedSim(warmup=1)), toy_of(FedAvg())
    for cohort in COHORTS[:5]:
        toy.step(cohort)
    assert toy.server["own"]
    fork.server, plain.server, fork.round, plain.round = toy.server, {"model": toy.server["model"]}, 5, 5
    assert_equal(fork.step(COHORTS[5])["model"], plain.step(COHORTS[5])["model"])
    assert torch.equal(fork.server["similarities"], torch.eye(5).double())
    for client in range(5):
        assert_equal(received(fork, client), fork.server["model"])


@pytest.mark.parametrize("form", ["rows", "matrix"])
def test_inv_psim_2_similarities_are_symmetric_in_0_to_1_with_unit_diagonal(form: Any) -> None:
    toy = toy_of(PFedSim(similarity=form, warmup=0.3))
    before = toy.server["similarities"]
    assert torch.equal(before, torch.eye(5, dtype=torch.float64))
    for round, cohort in enumerate(COHORTS):
        found = toy.step(cohort)["similarities"]
        assert torch.equal(found, found.T)
        assert torch.equal(found.diagonal(), torch.ones(5, dtype=torch.float64))
        assert found.min() >= 0 and found.max() <= 1
        sampled = torch.zeros(5, 5, dtype=torch.bool)
        if round >= 1:
            index = torch.tensor(cohort)
            sampled[index[:, None], index] = True
            for i in cohort:
                for j in cohort:
                    one, other = (toy.server["own"][str(k)]["head"]["head.weight"] for k in (i, j))
                    assert abs(float(found[i, j]) - expected_similarity(one, other, form, i == j)) < 1e-12
        assert torch.equal(found[~sampled], before[~sampled])
        before = found
    assert (before[~torch.eye(5, dtype=torch.bool)] > 0).any()


def expected_similarity(one: torch.Tensor, other: torch.Tensor, form: str, same: bool) -> float:
    if same:
        return 1.0
    a, b = (
        (one.numpy(), other.numpy()) if form == "rows" else (one.numpy().reshape(1, -1), other.numpy().reshape(1, -1))
    )
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return max(0.0, float(cosines.mean()))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.data())
@settings(deadline=None, max_examples=50)
def test_inv_psim_3_weights_sum_to_one(values: list[float], data: st.DataObject) -> None:
    own = data.draw(st.integers(0, len(values) - 1))
    similarities = torch.tensor(values, dtype=torch.float64)
    similarities[own] = 1
    weights = mixing_weights(similarities)
    assert (weights >= 0).all() and abs(float(weights.sum()) - 1) < 1e-12
    assert weights[own] == weights.max()
    assert torch.equal(weights > 0, similarities > 0) or similarities[similarities > 0].min() < 1e-300


@pytest.mark.parametrize("double", [True, False])
def test_inv_psim_3_a_client_similar_to_nobody_receives_its_own_model(double: bool) -> None:
    dtype = torch.float64 if double else torch.float32
    toy = Toy(PFedSim(warmup=0), random_clients(SIZES, dtype=dtype), two_layers(double=double), TRAIN)
    start = copy(toy.server["model"])
    assert_equal(received(toy, 1), start)
    toy.step([0, 1, 2])
    toy.server["similarities"] = torch.eye(5, dtype=torch.float64)
    for client in range(3):
        own = whole(toy.server["own"][str(client)])
        assert_equal(received(toy, client), own)
        assert (own["inner.weight"] - start["inner.weight"]).abs().max() > 1e-3


def test_inv_psim_4_clients_with_equal_heads_are_mixed_evenly() -> None:
    for by_class in (True, False):
        similarities = head_similarity(heads(0)[[0, 0, 1, 0]] * torch.tensor([1.0, 3, 1, 0.1])[:, None, None], by_class)
        weights = mixing_weights(similarities[0])
        assert torch.isfinite(weights).all()
        assert float((weights[[0, 1, 3]] - weights[0]).abs().max()) < 1e-9
        assert float(weights[2]) < 0.1
    assert torch.equal(mixing_weights(torch.ones(4, dtype=torch.float64)), torch.full((4,), 0.25, dtype=torch.float64))


def test_inv_psim_5_heads_never_mix() -> None:
    toy = toy_of(PFedSim(warmup=0))
    network = toy.task.network
    for cohort in COHORTS:
        toy.step(cohort)
        for client, parts in toy.server["own"].items():
            sent = received(toy, int(client))
            assert list(sent) == list(toy.server["model"])
            assert_equal({name: sent[name] for name in network.head_names}, parts["head"])
    moved = sent["inner.weight"] - parts["body"]["inner.weight"]
    assert moved.abs().max() > 1e-4


def test_bodies_are_mixed_by_the_weights_over_all_clients_own_models() -> None:
    toy = toy_of(PFedSim(warmup=0))
    for cohort in COHORTS:
        toy.step(cohort)
    for client in range(5):
        weights = mixing_weights(toy.server["similarities"][client])
        bodies = [toy.server["own"][str(j)]["body"] for j in range(5)]
        mixed = map_leaves(lambda *leaves, u=weights: sum(w * leaf for w, leaf in zip(u, leaves, strict=True)), *bodies)
        sent = received(toy, client)
        assert_close({name: sent[name] for name in mixed}, mixed, 1e-12)
        assert int((weights > 0).sum()) > 2


def test_g12() -> None:
    weights = mixing_weights(torch.tensor([1, 0.5, 0, 0.9], dtype=torch.float64))
    expected = torch.tensor([0.754570338834, 0.056787076457, 0, 0.188642584709], dtype=torch.float64)
    assert (weights - expected).abs().max() < 1e-9


def test_heads_that_point_apart_or_are_zero_are_not_similar() -> None:
    one = heads(1, 1)[0]
    for by_class in (True, False):
        found = head_similarity(torch.stack([one, -one, torch.zeros_like(one)]), by_class)
        assert torch.equal(found, torch.eye(3, dtype=torch.float64))


def test_the_two_similarities_differ_where_rows_differ_in_length() -> None:
    tilted = torch.tensor([[[1.0, 0], [0, 3]], [[-1, 0], [0, 3]]])
    assert abs(float(head_similarity(tilted, by_class=True)[0, 1])) < 1e-12
    assert abs(float(head_similarity(tilted, by_class=False)[0, 1]) - 0.8) < 1e-7


def test_the_second_phase_trains_what_a_client_receives_and_leaves_the_global_model() -> None:
    toy, plain = toy_of(), toy_of(FedAvg())
    for cohort in COHORTS[:3]:
        assert_equal(toy.step(cohort)["model"], plain.step(cohort)["model"])
        assert "own" not in toy.server
    frozen = copy(toy.server["model"])
    for round, cohort in enumerate(COHORTS[3:], 3):
        expected = {}
        for client in cohort:
            alone = toy_of(FedAvg())
            alone.round = round
            alone.server = {"model": received(toy, client)}
            expected[client] = alone.step([client])["model"]
        before = copy(toy.server.get("own", {}))
        toy.step(cohort)
        for client in cohort:
            assert_equal(whole(toy.server["own"][str(client)]), expected[client])
        for client in set(before) - {str(client) for client in cohort}:
            assert_equal(toy.server["own"][client], before[client])
        assert_equal(toy.server["model"], frozen)


def test_an_evaluation_sends_each_client_its_own_model_alone() -> None:
    toy = toy_of(PFedSim(warmup=0), hosts=2)
    toy.step([0, 2, 3])
    common, own = toy.algorithm.served(toy.server, toy.context)
    assert set(common) == {"model"} and set(own) == {0, 2, 3}
    for client, sent in own.items():
        assert_equal(sent, {"own": whole(toy.server["own"][str(client)])})
    scores = toy.scores(final=True)
    for client in range(5):
        same = (scores[client]["personalized"].vector == scores[client]["global"].vector).all()
        assert same == (client not in own)


def test_running_statistics_are_part_of_the_body() -> None:
    toy = toy_of(PFedSim(warmup=0), make=normalized_layers)
    toy.step([0, 1, 2])
    for parts in toy.server["own"].values():
        assert set(toy.task.network.buffer_names) < set(parts["body"])
        assert set(parts["head"]) == {"head.weight", "head.bias"}
    assert all(np.isfinite(rows["personalized"].loss) for rows in toy.scores().values())


def test_relabelled_clients_have_the_same_models() -> None:
    original = (3, 0, 4, 1, 2)
    label = {k: original.index(k) for k in range(5)}
    plain = toy_of(PFedSim(warmup=0.3))
    parts = [plain.dataset.load(k)["train"] for k in original]
    other = Toy(
        plain.algorithm,
        ListDataset([(part.x, part.y) for part in parts]),
        plain.task,
        TRAIN,
        streams=RelabelledStreams(0, original),
    )
    for cohort in COHORTS:
        plain.step(cohort)
        other.step(sorted(label[k] for k in cohort))
    assert_close(other.server["model"], plain.server["model"], 1e-12)
    for client, k in label.items():
        assert_close(other.server["own"][str(k)], plain.server["own"][str(client)], 1e-12)


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy_of(PFedSim(warmup=0.3), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort), stacked.step(cohort))


@pytest.mark.slow
def test_clients_that_contradict_each_other_in_two_camps_help_their_own_camp() -> None:
    generator = torch.Generator().manual_seed(0)
    rule = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    parts: list[Any] = []
    tests: list[Any] = []
    for client in range(8):
        for into, n in ((parts, 12), (tests, 200)):
            x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
            into.append((x, ((x @ rule).argmax(1) + client % 2) % 3))
    train = TrainConfig(rounds=24, clients_per_round=8, local_epochs=3, batch_size=4, lr=0.1)
    toy, plain, local = (
        Toy(algorithm, ListDataset(parts), two_layers(hidden=16), train) for algorithm in (PFedSim(), FedAvg(), Local())
    )
    for run in (toy, plain, local):
        run.run()
    similarities = toy.server["similarities"]
    same = torch.tensor([[i % 2 == j % 2 for j in range(8)] for i in range(8)])
    off_diagonal = ~torch.eye(8, dtype=torch.bool)
    assert similarities[same & off_diagonal].min() > similarities[~same].max()

    def accuracy(models: list[Tree]) -> float:
        logits = [toy.task.network.logits(model, x) for model, (x, _) in zip(models, tests, strict=True)]
        hits = [(z.argmax(1) == y).double().mean() for z, (_, y) in zip(logits, tests, strict=True)]
        return float(torch.stack(hits).mean())

    own = accuracy([whole(toy.server["own"][str(client)]) for client in range(8)])
    assert own > accuracy([plain.server["model"]] * 8) + 0.2
    assert own > accuracy([local.states()[client]["local"] for client in range(8)]) + 0.05
