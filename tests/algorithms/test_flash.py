"""Flash: rounds of an oracle in plain PyTorch, the drift term by hand, when clients stop, limits of other methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.fedopt import Adaptive, FedAdam
from algorithms.flash import Flash, drift_of
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, num_bytes
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10)
COHORTS = ([0, 2], [1, 2, 3], [0, 1], [1, 2, 3])
TRAIN = TrainConfig(
    rounds=4, clients_per_round=2, local_epochs=5, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)


def validated() -> ListDataset:
    """Clients with validation samples, but for the last one; those of client 2 have labels of another rule."""
    drawn = random_clients([n + 9 for n in SIZES])
    parts = [drawn.load(k)["train"] for k in range(4)]
    train = [(part.x[9:], part.y[9:]) for part in parts]
    held = [(part.x[:9], part.y[:9]) for part in parts]
    held[2] = held[2][0], held[2][1].flip(0)
    held[3] = held[3][0][:0], held[3][1][:0]
    return ListDataset(train, validation=held)


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, options.pop("dataset", None) or validated(), task or two_layers(), train, **options)


def logits_of(model: Tree, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    found: torch.Tensor = hidden @ model["head.weight"].T + model["head.bias"]
    return found


def trained(toy: Toy, model: Tree, client: int, round: int, gamma: float | None) -> tuple[Tree, int]:
    """The model that a client sends, and after how many epochs."""
    parts = toy.dataset.load(client)
    train, held = parts["train"], parts["validation"]
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
    generator, each = toy.context.streams.generator("batches", round, client), -(-SIZES[client] // 4)
    batches, last = list(plan_batches(SIZES[client], 4, 5 * each, generator).batches(CPU)), float("inf")
    for epoch in range(5):
        for index in batches[epoch * each : (epoch + 1) * each]:
            optimizer.zero_grad()
            F.cross_entropy(logits_of(leaves, train.x[index]), train.y[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if gamma is not None and len(held.y):
            loss = float(F.cross_entropy(logits_of(leaves, held.x), held.y).detach())
            if last - loss < gamma / (epoch + 1):
                break
            last = loss
    return {name: leaf.detach() for name, leaf in leaves.items()}, epoch + 1


@pytest.mark.parametrize(("gamma", "most"), [(0.0, 0.2), (0.1, 0.05), (None, None)])
def test_inv_flash_1_rounds_are_those_of_an_oracle_in_plain_pytorch(gamma: float | None, most: float | None) -> None:
    method = Flash(
        least_progress=gamma, most_drift=most, server_lr=0.02, first_decay=0.8, second_decay=0.9,
        initial_accumulator=1e-4,
    )  # fmt: skip
    toy = toy_of(method)
    model, epochs, bounded = toy.server["model"], set(), False
    m, d = ({key: torch.zeros_like(leaf) for key, leaf in model.items()} for _ in range(2))
    v = {key: torch.full_like(leaf, 1e-4) for key, leaf in model.items()}
    for round, cohort in enumerate(COHORTS):
        found = {k: trained(toy, model, k, round, gamma) for k in cohort}
        epochs |= {count for _, count in found.values()}
        total, moved = sum(SIZES[k] for k in cohort), {}
        for key, w in model.items():
            delta = sum(SIZES[k] * (found[k][0][key] - w) for k in cohort) / total
            m[key] = 0.8 * m[key] + 0.2 * delta
            old, v[key] = v[key], 0.9 * v[key] + 0.1 * delta**2
            beta = old / ((delta**2 - v[key]).abs() + old)
            d[key] = beta * d[key] + (1 - beta) * (delta**2 - v[key])
            counted = (
                d[key] if most is None else torch.where(d[key] > most * v[key].sqrt(), most * v[key].sqrt(), d[key])
            )
            bounded |= most is not None and bool((counted < d[key]).any())
            moved[key] = w + 0.02 * m[key] / (v[key].sqrt() - counted + 1e-3)
        model = moved
        server = toy.step(cohort)
        assert_close(server["moments"]["drift"], d, 1e-12)
        assert_close(server["model"], model, 1e-12)
    assert bounded == (most is not None)
    assert epochs == ({5} if gamma is None else epochs) and (gamma is None or {2, 5} <= epochs)


@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_flash_2_with_a_large_tau_it_is_federated_averaging(policy: Any, make: Any) -> None:
    large = {"first_decay": 0, "server_lr": 1e9, "adaptivity": 1e9}
    ours = toy_of(Flash(least_progress=None, aggregation=policy, **large), task=make())
    plain = toy_of(FedAvg(aggregation=policy), task=make())
    for cohort in COHORTS:
        assert_close(ours.step(cohort)["model"], plain.step(cohort)["model"], 1e-6)


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_flash_3_who_stops_at_once_has_made_two_epochs_to_the_bit(make: Any) -> None:
    stopping = toy_of(Flash(least_progress=1e9), task=make())
    twice = toy_of(Flash(least_progress=None), TRAIN.model_copy(update={"local_epochs": 2}), make())
    for cohort in ([0, 2], [1, 2], [0, 1]):
        assert_equal(stopping.step(cohort)["model"], twice.step(cohort)["model"])
    others = [toy_of(Flash(least_progress=gamma), task=make()) for gamma in (1e9, None)]
    assert_equal(*(toy.step([3])["model"] for toy in others))


def path(method: Adaptive, changes: list[float]) -> tuple[list[float], list[Tree]]:
    """The steps of one parameter, and what is kept after each."""
    model = {"theta": torch.zeros(1, dtype=torch.float64)}
    moments, steps, kept = method.moments({"theta": torch.zeros(1, dtype=torch.float64)}), [], []
    for change in changes:
        moved, moments = method.stepped(model, {"theta": model["theta"] + change}, moments)
        steps.append(float(moved["theta"] - model["theta"]))
        model = moved
        kept.append(moments)
    return steps, kept


def test_inv_flash_4_changes_of_one_size_have_no_drift_and_it_is_fedadam() -> None:
    alike = {"initial_accumulator": 0.25, "second_decay": 0.5, "server_lr": 0.01}
    (ours, kept), (adam, _) = (path(method(**alike), [0.5, -0.5, 0.5, 0.5]) for method in (Flash, FedAdam))
    assert ours == adam
    assert all(float(one["drift"]["theta"]) == 0 for one in kept)


def test_inv_flash_5_a_sudden_change_makes_the_step_longer_and_a_small_one_shorter() -> None:
    alike = {"initial_accumulator": 1e-4, "server_lr": 0.01, "first_decay": 0.0}
    (ours, kept), (adam, _) = (path(method(**alike), [0.01] * 9 + [0.05]) for method in (Flash, FedAdam))
    assert ours[:9] == pytest.approx(adam[:9]) and ours[9] > 1.05 * adam[9] > 0
    assert float(kept[9]["drift"]["theta"]) > 0
    (ours, kept), (adam, _) = (path(method(**alike), [0.01] * 9 + [0.001]) for method in (Flash, FedAdam))
    assert 0 < ours[9] < adam[9]
    assert float(kept[9]["drift"]["theta"]) < 0


def test_inv_flash_6_the_drift_term_by_hand_and_between_what_it_was_and_what_it_follows() -> None:
    def found(*numbers: float) -> float:
        return float(drift_of(*(torch.tensor(one, dtype=torch.float64) for one in numbers)))

    assert found(2.0, 9.0, 3.0, 6.0) == pytest.approx(0.5 * 2 + 0.5 * 3)
    assert found(2.0, 0.0, 1.0, 3.0) == pytest.approx(0.25 * 2 - 0.75 * 3)
    assert found(2.0, 4.0, 0.0, 3.0) == 1
    assert found(2.0, 0.0, 0.0, 0.0) == 2
    generator = torch.Generator().manual_seed(0)
    drift, squares, old, new = torch.rand(4, 500, generator=generator, dtype=torch.float64)
    both = torch.stack([drift, squares - new])
    between = drift_of(drift, squares, old, new)
    assert (between >= both.min(0).values - 1e-15).all() and (between <= both.max(0).values + 1e-15).all()


def test_inv_flash_7_a_bounded_drift_turns_no_step_round() -> None:
    changes = [0.01] * 5 + [1.0, 2.0]
    alike = {"initial_accumulator": 1e-4, "first_decay": 0.0}
    found = {most: path(Flash(most_drift=most, **alike), changes)[0] for most in (0.0, 0.5, 0.9, None)}
    adam = path(FedAdam(server_lr=0.01, **alike), changes)[0]
    for most in (0.0, 0.5, 0.9):
        assert all(0 < step <= one / (1 - most) + 1e-12 for step, one in zip(found[most], adam, strict=True))
    assert found[0.0][6] == pytest.approx(adam[6])
    assert found[None][:5] == pytest.approx(found[0.9][:5]) and min(found[None]) < 0


def test_only_the_model_travels_and_one_epoch_is_noted() -> None:
    toy = toy_of(Flash())
    size = num_bytes(toy.server["model"])
    for cohort in COHORTS:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))
    assert not any(toy.states().values())
    once = toy_of(Flash(), TRAIN.model_copy(update={"local_epochs": 1})).context
    assert "there is no second epoch" in Flash().remarks(once)[0]
    assert not Flash(least_progress=None).remarks(once) and not Flash().remarks(toy.context)


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_vectorized_agrees_with_looped(make: Any) -> None:
    looped, stacked = (toy_of(Flash(least_progress=0.1), task=make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], *COHORTS):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-8)
