"""FedEM: invariants EM, what a step weighs samples by, clients never sampled, camps that contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedem import FedEM, responsibilities
from algorithms.parts.sample_rows import by_step
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, num_bytes
from tests.support.toy_networks import normalized_layers, softmax_regression, two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, random_clients, two_camps

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
PLAIN = TRAIN.model_copy(update={"momentum": 0.0, "weight_decay": 0.0})


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, make: Any = two_layers, **options: Any) -> Toy:
    return Toy(algorithm, options.pop("dataset", random_clients(SIZES)), make(), train, **options)


def give(toy: Toy, mixtures: Mapping[int, list[float]]) -> None:
    """Puts weights of components into clients' states."""
    for client, mixture in mixtures.items():
        state = {"mixture": torch.tensor(mixture, dtype=torch.float64)}
        toy.client_hosts[0].states.replace(client, state, 0)


def losses_of(toy: Toy, models: Tree, client: int) -> Tensor:
    """l_im, shape (n, M)."""
    part = toy.dataset.load(client)["train"]
    logits = [toy.task.network.logits(model, part.x, training=False) for model in models.values()]
    return torch.stack([F.cross_entropy(found, part.y, reduction="none") for found in logits], 1)


def bound(losses: Tensor, mixture: Tensor) -> float:
    """-(1/n) sum_i log sum_m pi_m exp(-l_im)."""
    return -float(torch.logsumexp(mixture.log() - losses, 1).mean())


@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_em_1_one_component_is_fedavg(make: Any, policy: Any) -> None:
    one, plain = (toy_of(a, make=make) for a in (FedEM(components=1, aggregation=policy), FedAvg(aggregation=policy)))
    for _ in range(TRAIN.rounds):
        assert_equal(one.step()["models"]["0"], plain.step()["model"])
    left, right = one.scores(), plain.scores()
    for client in range(4):
        assert np.allclose(left[client]["personalized"].vector, right[client]["global"].vector, rtol=0, atol=1e-12)


def test_inv_em_2_weights_are_in_the_simplex() -> None:
    toy = toy_of(FedEM())
    toy.run()
    for state in toy.states().values():
        assert abs(float(state["mixture"].sum()) - 1) < 1e-12
        assert bool((state["mixture"] >= 0).all())
    found = responsibilities(torch.rand(50, 4) * 900, torch.tensor([0.5, 0.0, 1e-300, 0.5]).double())
    assert_close(found.sum(1), torch.ones(50, dtype=torch.float64), 1e-12)
    assert not found[:, 1].any()


def test_inv_em_3_known_values() -> None:
    losses = torch.tensor([[0.1, 1.5], [2.0, 0.2], [1.0, 1.0]], dtype=torch.float64)
    before = torch.tensor([0.25, 0.75], dtype=torch.float64)
    found = responsibilities(losses, before)
    assert_close(found[:, 0], torch.tensor([0.574781719285, 0.052222205251, 0.25], dtype=torch.float64), 1e-11)
    after = found.mean(0)
    assert_close(after, torch.tensor([0.292334641512, 0.707665358488], dtype=torch.float64), 1e-11)
    assert bound(losses, before) == pytest.approx(0.788858768918, abs=1e-11)
    assert bound(losses, after) == pytest.approx(0.780497533513, abs=1e-11)


def test_inv_em_3_the_e_step_never_raises_the_bound() -> None:
    toy = toy_of(FedEM(), PLAIN.model_copy(update={"lr": 0.0, "clients_per_round": "all"}))
    found: dict[int, list[float]] = {client: [] for client in range(4)}
    for _ in range(4):
        toy.step()
        for client, state in toy.states().items():
            found[client].append(bound(losses_of(toy, toy.server["models"], client), state["mixture"]))
    for bounds in found.values():
        assert bounds[0] > bounds[1] > bounds[2] > bounds[3]


def test_inv_em_4_equal_models_stay_equal() -> None:
    toy = toy_of(FedEM(components=2), PLAIN)
    first = toy.server["models"]["0"]
    toy.server = {"models": {"0": first, "1": copy(first)}}
    give(toy, {client: [0.5, 0.5] for client in range(4)})
    toy.run(2)
    assert_equal(toy.server["models"]["0"], toy.server["models"]["1"])
    toy.server = {"models": {"0": first, "1": copy(first)}}
    give(toy, {0: [0.3, 0.7]})
    toy.step([0])
    assert_close(toy.states()[0]["mixture"], torch.tensor([0.3, 0.7], dtype=torch.float64), 1e-15)


def test_inv_em_5_permuted_components_permute_everything() -> None:
    plain, permuted = toy_of(FedEM()), toy_of(FedEM())
    order = ["2", "0", "1"]
    permuted.server = {"models": {str(m): plain.server["models"][old] for m, old in enumerate(order)}}
    for _ in range(3):
        left, right = plain.step()["models"], permuted.step()["models"]
        for m, old in enumerate(order):
            assert_close(right[str(m)], left[old], 1e-13)
    for client, state in plain.states().items():
        expected = state["mixture"][[int(old) for old in order]]
        assert_close(permuted.states()[client]["mixture"], expected, 1e-13)
    for client, rows in plain.scores().items():
        vector = permuted.scores()[client]["personalized"].vector
        assert np.allclose(vector, rows["personalized"].vector, rtol=0, atol=1e-11)


def test_inv_em_6_weights_go_to_the_one_that_fits_geometrically() -> None:
    losses, mixture = torch.tensor([[0.0, 1.0]] * 3).double(), torch.tensor([0.5, 0.5]).double()
    for step in range(1, 6):
        mixture = responsibilities(losses, mixture).mean(0)
        assert float(mixture[1] / mixture[0]) == pytest.approx(np.exp(-step), rel=1e-12)


@pytest.mark.parametrize("make", [two_layers, softmax_regression])
@pytest.mark.parametrize("size", [4, None])
def test_inv_em_7_vectorized_agrees_with_looped(make: Any, size: Any) -> None:
    train = TRAIN.model_copy(update={"batch_size": size})
    looped, stacked = (toy_of(FedEM(), train, make, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2], [1, 3], [0, 1, 2, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-13)
        assert_close(looped.states(), stacked.states(), 1e-13)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_em_8_a_client_of_one_component_leaves_the_others(mode: str) -> None:
    toy = toy_of(FedEM(), PLAIN, mode=mode)
    give(toy, {client: [0.0, 1.0, 0.0] for client in range(4)})
    before = copy(toy.server["models"])
    after = toy.step([0, 2, 3])["models"]
    assert_equal(after["0"], before["0"])
    assert_equal(after["2"], before["2"])
    plain = toy_of(FedAvg(), PLAIN, mode=mode)
    plain.server = {"model": before["1"]}
    assert_close(after["1"], plain.step([0, 2, 3])["model"], 1e-14)
    assert toy.states()[0]["mixture"].tolist() == [0.0, 1.0, 0.0]


def test_every_sample_has_the_weight_of_its_own_e_step() -> None:
    rows = np.arange(10.0)[:, None].repeat(2, 1)
    plan = plan_batches(10, 4, 6, np.random.default_rng(0))
    found = by_step(rows, plan, 4, np.random.default_rng(1), 6)["rows"]
    assert found.shape == (6, 4, 2)
    for step in range(6):
        samples = plan.order[plan.bounds[step] : plan.bounds[step + 1]].tolist()
        assert found[step, : len(samples), 0].tolist() == samples
        assert not found[step, len(samples) :].any()


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_a_local_update_by_hand(mode: str) -> None:
    train = TrainConfig(rounds=1, clients_per_round="all", local_epochs=2, batch_size=5, lr=0.1)
    toy = toy_of(FedEM(components=2), train, dataset=random_clients((12,)), mode=mode)
    models = copy(toy.server["models"])
    q = responsibilities(losses_of(toy, models, 0), torch.tensor([0.5, 0.5]).double())
    part = toy.dataset.load(0)["train"]
    plan = plan_batches(12, 5, 6, toy.context.streams.generator("batches", 0, 0))
    for m, model in models.items():
        for index in plan.batches(torch.device("cpu")):
            leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
            found = F.cross_entropy(toy.task.network.logits(leaves, part.x[index]), part.y[index], reduction="none")
            gradients = torch.autograd.grad((q[index, int(m)] * found).mean(), list(leaves.values()))
            model |= {name: model[name] - 0.1 * g for name, g in zip(leaves, gradients, strict=True)}
    assert_close(toy.step()["models"], models, 1e-13)
    assert_close(toy.states()[0]["mixture"], q.mean(0), 1e-14)


def test_the_prediction_mixes_probabilities() -> None:
    toy = toy_of(FedEM())
    toy.run(2)
    for client, state in toy.states().items():
        part = toy.dataset.load(client)["test"]
        members = [toy.task.network.logits(m, part.x).softmax(-1) for m in toy.server["models"].values()]
        mixed = sum(w * p for w, p in zip(state["mixture"], members, strict=True))
        expected = float(F.nll_loss(mixed.log(), part.y))  # type: ignore[union-attr]
        assert toy.scores()[client]["personalized"].loss == pytest.approx(expected, abs=1e-12)


def test_a_client_never_sampled_makes_one_e_step() -> None:
    toy = toy_of(FedEM(components=2))
    for _ in range(2):
        toy.step([0, 1])
    (rows,) = [rows for client, rows in toy.scores().items() if client == 3]
    losses = losses_of(toy, toy.server["models"], 3)
    mixture = responsibilities(losses, torch.tensor([0.5, 0.5]).double()).mean(0)
    # the test samples of these clients are those they train on
    assert rows["personalized"].loss == pytest.approx(-float(torch.logsumexp(mixture.log() - losses, 1).mean()))
    assert set(toy.states()) == {0, 1}


def test_all_models_travel_both_ways() -> None:
    toy = toy_of(FedEM(), hosts=2)
    size = 3 * num_bytes(toy.task.network.initialize(0))
    toy.step([0, 2])
    assert toy.federation.traffic.by_client == dict.fromkeys((0, 2), (size, size))


def test_clipping_would_couple_the_components() -> None:
    toy = toy_of(FedEM(), TRAIN.model_copy(update={"max_grad_norm": 1.0}))
    with pytest.raises(ConfigError, match=r"train\.max_grad_norm"):
        toy.algorithm.check(toy.task, toy.context)
    FedEM(components=1).check(toy.task, toy.context)


@pytest.mark.slow
def test_two_camps_that_contradict_each_other_are_told_apart() -> None:
    train = TrainConfig(rounds=20, clients_per_round=4, local_epochs=2, batch_size=10, lr=0.5)
    mixed, plain = (
        Toy(a, ListDataset(two_camps(6)), softmax_regression(), train) for a in (FedEM(components=2), FedAvg())
    )
    mixed.run()
    plain.run()
    own = np.mean([rows["personalized"].top1 for rows in mixed.scores().values()])
    shared = np.mean([rows["global"].top1 for rows in plain.scores().values()])
    assert own > 0.9
    assert shared < 0.65
