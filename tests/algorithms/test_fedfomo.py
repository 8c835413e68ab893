"""FedFomo: invariants FOMO, who is asked, what travels, clients with nothing to compare on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.fedfomo import FedFomo, draw_peers, merits, mixing_weights
from algorithms.local import Local
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import copy, num_bytes, tensors
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round="all", local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)


def validated(sizes: Any = SIZES, **options: Any) -> ListDataset:
    """Random clients, each with its training samples for validation too."""
    parts = [random_clients(sizes, **options).load(k)["train"] for k in range(len(sizes))]
    return ListDataset([(p.x, p.y) for p in parts], validation=[(p.x, p.y) for p in parts])


def alike() -> ListDataset:
    """Clients whose labels follow one rule, with more samples for validation than for training."""
    whole = random_clients((120,)).load(0)["train"]
    parts = [(whole.x[k::4], whole.y[k::4]) for k in range(4)]
    return ListDataset([(x[:8], y[:8]) for x, y in parts], validation=[(x[8:], y[8:]) for x, y in parts])


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("fallback", ["own", "base"])
@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_fomo_1_without_peers_it_is_local_training(make: Any, fallback: Any) -> None:
    train = TRAIN.model_copy(update={"clients_per_round": 3})
    fomo = Toy(FedFomo(peers=0, fallback=fallback), validated(), make(), train)
    local = Toy(Local(), validated(), make(), train)
    for _ in range(TRAIN.rounds):
        fomo.step()
        local.step()
    left, right = fomo.scores(), local.scores()
    for client, state in local.states().items():
        # with its training samples for validation, every client's own model has merit
        assert_equal(fomo.states()[client]["personal"], state["local"])
    for client in range(4):
        assert left[client]["personalized"].vector.tolist() == right[client]["personalized"].vector.tolist()


def test_a_model_without_merit_is_kept_or_thrown_away() -> None:
    # the validation samples are where training leads away from
    data = quadratic_clients([3.0], [2])
    away = torch.full((2, 1), 1.0, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    dataset = ListDataset([(data.load(0)["train"].x, data.load(0)["train"].y)], 2, validation=[away])
    train = TrainConfig(rounds=2, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.1)
    found = {}
    for fallback in ("own", "base"):
        toy = Toy(FedFomo(fallback=fallback), dataset, Likely(), train)  # type: ignore[arg-type]
        toy.run()
        found[fallback] = float(toy.states()[0]["personal"]["theta"])
    assert found["base"] == pytest.approx(1 + 0.1 * 2)
    assert found["own"] == pytest.approx(1.2 + 0.1 * 1.8)


class Likely(Quadratic):
    """QUAD whose log-probability of a sample's label is minus its loss."""

    def predictions(self, models: Any, x: torch.Tensor) -> torch.Tensor:
        losses = 0.5 * ((models[0]["theta"] - x) ** 2).sum(-1)
        return torch.stack([-losses, -losses - 1], 1)


def test_inv_fomo_2_the_mixture_is_in_the_convex_hull() -> None:
    random = generator()
    for _ in range(200):
        count = int(random.integers(1, 6))
        found = mixing_weights(merits(random.random(), random.random(count), random.random(count)))
        assert (found >= 0).all()
        assert not found.any() or abs(found.sum() - 1) < 1e-12
    toy = Toy(FedFomo(peers=3), alike(), two_layers(), TRAIN)
    toy.step()
    before = copy(toy.server["own"])
    toy.step()
    moved = False
    for client, state in toy.states().items():
        known = [torch.cat([leaf.flatten() for leaf in tensors(model)]) for model in before.values()]
        start = torch.cat([leaf.flatten() for leaf in tensors(state["base"])])
        low, high = torch.stack(known).min(0).values, torch.stack(known).max(0).values
        assert bool(((start >= low - 1e-12) & (start <= high + 1e-12)).all())
        moved |= not torch.equal(start, known[client])
    assert moved


def test_inv_fomo_3_a_model_that_does_no_better_changes_no_weight() -> None:
    plain = merits(2.0, [1.5, 1.0], [1.0, 3.0])
    for loss, distance in ((2.0, 0.0), (2.0, 1.0), (9.0, 0.5)):
        more = merits(2.0, [1.5, 1.0, loss], [1.0, 3.0, distance])
        assert mixing_weights(more).tolist() == [*mixing_weights(plain).tolist(), 0.0]
        assert (more[2] < 0) == (loss > 2)


def test_inv_fomo_4_a_model_that_is_there_twice() -> None:
    once = merits(2.0, [1.5, 1.0], [1.0, 3.0])
    twice = mixing_weights(merits(2.0, [1.5, 1.5, 1.0], [1.0, 1.0, 3.0]))
    assert twice[0] + twice[1] == pytest.approx(2 * once[0] / (once.sum() + once[0]), abs=1e-15)


def test_inv_fomo_5_known_values() -> None:
    points = np.array([1.0, -1.0, 5.0])
    merit = merits(2.0, 0.5 * points**2, np.abs(points - 2))
    assert merit.tolist() == [1.5, 0.5, -3.5]
    weights = mixing_weights(merit)
    assert weights.tolist() == [0.75, 0.25, 0.0]
    assert float(weights @ points) == 0.5


@pytest.mark.parametrize("scale", [1e-3, 7.0])
def test_inv_fomo_6_scaled_losses_give_the_same_weights(scale: float) -> None:
    losses = np.array([2.0, 1.5, 1.0, 4.0])
    plain, scaled = (merits(found[0], found[1:], [1.0, 3.0, 2.0]) for found in (losses, scale * losses))
    assert np.allclose(scaled, scale * plain, rtol=1e-12)
    assert np.allclose(mixing_weights(scaled), mixing_weights(plain), rtol=1e-12)


def test_inv_fomo_7_without_exploring_the_best_are_asked() -> None:
    affinities = [0.1, -3.0, 2.0, 0.5, 0.4, 7.0]
    for seed in range(20):
        assert draw_peers(affinities, [0, 1, 2, 3, 4], 3, 0.0, generator(seed)) == [2, 3, 4]
    assert draw_peers(affinities, [1, 0], 5, 0.3, generator()) == [0, 1]
    ties = {tuple(draw_peers([0.0] * 6, range(6), 2, 0.0, generator(seed))) for seed in range(200)}
    assert len(ties) == 15  # all pairs
    drawn = {tuple(draw_peers(affinities, range(6), 2, 1.0, generator(seed))) for seed in range(200)}
    assert len(drawn) == 15
    algorithm = FedFomo(explore=0.3, explore_decay=0.05)
    assert [round(algorithm.explore_in(t), 12) for t in range(8)] == [0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_model_whose_loss_is_not_finite_gets_no_weight(bad: float) -> None:
    found = merits(2.0, [1.0, bad], [1.0, 1.0])
    assert np.isfinite(found).all()
    assert mixing_weights(found).tolist() == [1.0, 0.0]
    # from a base that is lost, to any that is not
    assert mixing_weights(merits(bad, [1.0, 1.0, bad], [1.0, 1.0, 1.0])).tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_a_round_by_hand(norm: Any, mode: str) -> None:
    points, dimension = [[3.0, 0.0], [-1.0, 1.0], [4.0, 2.0]], 2
    data = quadratic_clients(points, [2, 2, 2])
    parts = [(data.load(k)["train"].x, data.load(k)["train"].y) for k in range(3)]
    train = TrainConfig(rounds=2, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.5)
    algorithm = FedFomo(peers=2, explore=0, norm=norm)
    toy = Toy(algorithm, ListDataset(parts, 2, validation=parts), Likely(dimension), train, mode=mode)
    base, a = np.ones(2), np.array(points)
    w = base + 0.5 * (a - base)
    toy.step()
    assert not toy.server["affinities"].any()
    toy.server["affinities"] += 7  # of earlier rounds, to which merits are added
    toy.step()
    for i in range(3):
        loss = [0.5 * ((model - a[i]) ** 2).sum() for model in (base, *w)]
        r = (loss[0] - np.array(loss[1:])) / np.linalg.norm(w - base, ord=1 if norm == "l1" else 2, axis=1)
        c = np.maximum(r, 0) / np.maximum(r, 0).sum()
        start = base + c @ (w - base)
        state = toy.states()[i]
        assert_close(state["base"]["theta"], torch.tensor(start), 1e-12)
        assert_close(state["personal"]["theta"], torch.tensor(start + 0.5 * (a[i] - start)), 1e-12)
        expected = torch.tensor(np.where(np.arange(3) == i, 7.0, 7.0 + r))
        assert_close(toy.server["affinities"][i], expected, 1e-12)


def test_compared_with_the_trained_model_it_has_no_merit_itself() -> None:
    toy = Toy(FedFomo(peers=3, base="trained"), validated(), two_layers(), TRAIN)
    toy.run(3)
    assert {key for state in toy.states().values() for key in state} == {"personal"}
    assert toy.server["affinities"].any()


def test_clients_are_asked_once_they_have_trained_and_traffic_counts_each_model() -> None:
    toy = Toy(FedFomo(peers=2), validated(), two_layers(), TRAIN, hosts=2)
    size = num_bytes(toy.task.network.initialize(0))
    toy.step([1, 3])
    assert toy.federation.traffic.by_client == {1: (0, size), 3: (0, size)}
    assert set(toy.server["own"]) == {"1", "3"}
    toy.step([0, 3])
    # a newcomer trains the initial model; the other is sent the one model that there is
    assert toy.federation.traffic.by_client == {0: (0, size), 3: (size, size + 8)}
    toy.step([0, 1, 2, 3])
    assert toy.federation.traffic.by_client == {2: (0, size)} | dict.fromkeys((0, 1, 3), (2 * size, size + 16))
    assert not toy.server["affinities"].diagonal().any()
    assert not toy.server["affinities"][2].any()


def test_a_client_never_sampled_has_the_initial_model() -> None:
    for evaluate in ("stored", "federated"):
        toy = Toy(FedFomo(evaluate=evaluate), validated(), two_layers(), TRAIN)
        first = {client: rows["personalized"].vector.tolist() for client, rows in toy.scores().items()}
        for _ in range(3):
            toy.step([0, 1, 3])
        assert toy.scores()[2]["personalized"].vector.tolist() == first[2]
        assert toy.scores()[1]["personalized"].vector.tolist() != first[1]


def test_the_federated_evaluation_is_where_the_next_round_would_begin() -> None:
    toy = Toy(FedFomo(peers=2, explore=0, evaluate="federated"), alike(), two_layers(), TRAIN)
    toy.run(3)
    rows = toy.scores()
    # affinities differ by now, so that nothing is left to chance
    toy.federation.begin_round(3, ("test",))
    toy.step()
    for client, found in toy.federation.trained_scores.items():
        assert np.allclose(found["test"]["start"].vector, rows[client]["personalized"].vector, rtol=0, atol=1e-12)
    assert any(r["personalized"].loss != r["local"].loss for r in rows.values())


def test_what_models_are_compared_on() -> None:
    without = random_clients(SIZES)
    sizes = without.sizes()
    with pytest.raises(ConfigError, match=r"holdout\.validation .* algorithm\.select_on=train"):
        FedFomo().check_data(None, sizes, 0)  # type: ignore[arg-type]
    FedFomo(select_on="train").check_data(None, sizes, 0)  # type: ignore[arg-type]
    parts = [without.load(k)["train"] for k in range(4)]
    some = ListDataset(
        [(p.x, p.y) for p in parts],
        validation=[(p.x, p.y) if k else (p.x[:0], p.y[:0]) for k, p in enumerate(parts)],
    )
    FedFomo().check_data(None, some.sizes(), 0)  # type: ignore[arg-type]
    left, right = Toy(FedFomo(), some, two_layers(), TRAIN), Toy(FedFomo(), validated(), two_layers(), TRAIN)
    for _ in range(3):
        # client 0 compares on its training samples, which the other data set has as validation samples
        assert_equal(left.step(), right.step())


def test_a_model_of_others_replaces_a_worse_one() -> None:
    # client 0 has one wrong sample to train on, and validates on what client 1 trains on
    good = random_clients((40,), seed=3).load(0)["train"]
    poor = good.x[:1], (good.y[:1] + 1) % 3
    dataset = ListDataset([poor, (good.x, good.y)], validation=[(good.x, good.y)] * 2)
    train = TrainConfig(rounds=4, clients_per_round="all", local_epochs=5, batch_size=10, lr=0.1)
    fomo, local = (Toy(a, dataset, two_layers(), train) for a in (FedFomo(evaluate="federated"), Local()))
    fomo.run()
    local.run()
    found, alone = fomo.scores(split="validation"), local.scores(split="validation")
    assert found[0]["personalized"].loss < alone[0]["personalized"].loss - 0.2
