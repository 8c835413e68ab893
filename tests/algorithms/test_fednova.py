"""FedNova: invariants NOVA, what it refuses, momentum of the server, and buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.fednova import FedNova, normalizer, overshoot
from algorithms.fedprox import FedProx
from algorithms.scaffold import sum_of_step_weights
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.objectives import TRAINED, inner_product
from rayfl.params import Tree, copy, interpolate, subtract
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, weight_decay=0.01)


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, sizes: Any = SIZES, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(sizes), task or two_layers(), train, **options)


def quad(algorithm: Any, **train: Any) -> Toy:
    """Points 0 and 4 with equal shares, of which the second takes three times as many steps."""
    settings = {"rounds": 3, "clients_per_round": 2, "batch_size": 1, "lr": 0.1, "local_epochs": 1}
    return Toy(algorithm, quadratic_clients([0.0, 4.0], [1, 3]), Quadratic(), TrainConfig(**{**settings, **train}))


def theta(tree: Tree) -> float:
    return float(tree["model"]["theta"])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("policy", ["samples", "uniform"])
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_nova_1_equal_steps_are_fedavg(momentum: float, policy: Any, mode: str) -> None:
    train = TRAIN.model_copy(update={"momentum": momentum})
    # 9 to 12 samples are three batches of 4 each
    nova, plain = (
        toy_of(algorithm, train, sizes=(9, 12, 11, 10), mode=mode)
        for algorithm in (FedNova(aggregation=policy), FedAvg(aggregation=policy))
    )
    for cohort in ([0, 1], [1, 2, 3], [0, 1, 2, 3]):
        assert_equal(nova.step(cohort)["model"], plain.step(cohort)["model"])


def test_inv_nova_1_equal_steps_with_a_proximal_term_are_fedprox() -> None:
    nova, prox = (
        toy_of(algorithm, sizes=(9, 12, 11, 10))
        for algorithm in (FedNova(proximal_weight=0.5), FedProx(proximal_weight=0.5))
    )
    for _ in range(TRAIN.rounds):
        assert_equal(nova.step(), prox.step())


@pytest.mark.parametrize("effective", ["normalizer", "steps"])
def test_inv_nova_2_of_a_single_client_the_model_is_taken(effective: Any) -> None:
    nova, plain = toy_of(FedNova(effective_steps=effective)), toy_of(FedAvg())
    for client in range(4):
        assert_equal(nova.step([client]), plain.step([client]))


def test_inv_nova_3_normalizers_are_sums_of_the_explicit_vectors() -> None:
    for steps, momentum, pulled in zip(
        range(1, 6), (1, 2.9, 5.61, 9.049, 13.1441), (1, 1.95, 2.8525, 3.709875, 4.52438125), strict=True
    ):
        assert abs(normalizer(steps, 0.9) - momentum) < 1e-12
        assert abs(normalizer(steps, 0.9) - sum_of_step_weights(steps, 0.9)) < 1e-12
        assert abs(normalizer(steps, 0, 0.05) - pulled) < 1e-12
        assert abs(normalizer(steps, 0, 0.05) - (1 - 0.95**steps) / 0.05) < 1e-12
        assert normalizer(steps) == steps
    # both, the pull after momentum: not what the authors' code computes
    for steps, value in ((1, 1.0), (2, 2.85), (3, 5.4175)):
        assert abs(normalizer(steps, 0.9, 0.05) - value) < 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_inv_nova_3_the_change_is_that_of_as_much_gradient(momentum: float) -> None:
    """With a constant gradient g, x = w - eta ||a|| g."""

    class Constant(FedNova):
        @property
        def objective(self) -> Any:
            return inner_product(TRAINED, "received")

    toy = quad(Constant(), momentum=momentum, rounds=1)
    assert abs(theta(toy.step([1])) - (1 - 0.1 * normalizer(3, momentum))) < 1e-12


def test_inv_nova_4_a_known_path() -> None:
    nova, plain = quad(FedNova(aggregation="uniform")), quad(FedAvg(aggregation="uniform"))
    for one, other in ((1.171, 1.3565), (1.309453, 1.64686925), (1.421553779, 1.883375004125)):
        assert abs(theta(nova.step()) - one) < 1e-9
        assert abs(theta(plain.step()) - other) < 1e-9


@pytest.mark.slow
def test_inv_nova_5_its_fixed_point_is_nearer_to_the_minimum_than_that_of_fedavg() -> None:
    nova, plain = quad(FedNova(aggregation="uniform")), quad(FedAvg(aggregation="uniform"))
    for toy in (nova, plain):
        toy.run(200)
    assert abs(theta(nova.server) - 1.898423817863) < 1e-9
    assert abs(theta(plain.server) - 2.921832884097) < 1e-9


def test_inv_nova_6_the_step_is_longer_than_to_the_mean_unless_all_are_equal() -> None:
    generator = np.random.default_rng(3)
    for _ in range(50):
        shares = generator.dirichlet(np.ones(5))
        applied = generator.uniform(1, 20, 5)
        assert overshoot(shares, applied, applied) > 1
        assert overshoot(shares, np.full(5, applied[0]), np.full(5, applied[0])) == 1


def test_inv_nova_7_splitting_a_reply_changes_nothing() -> None:
    shares, applied = np.array([0.25, 0.75]), np.array([2.0, 6.0])
    models = [torch.tensor([1.0, -2.0]).double(), torch.tensor([5.0, 0.5]).double()]
    split = [1, 0, 1], np.array([0.375, 0.25, 0.375])

    def stepped(members: list[int], weights: np.ndarray) -> torch.Tensor:
        normalized = weights / applied[members]
        mean = sum(c * models[k] for c, k in zip(normalized / normalized.sum(), members, strict=True))
        assert isinstance(mean, torch.Tensor)
        return overshoot(weights, applied[members], applied[members]) * mean

    assert_close(stepped(*split), stepped([0, 1], shares), 1e-12)


def test_a_round_is_the_formula() -> None:
    toy = toy_of(FedNova())
    cohort, samples, steps = [0, 1, 2], np.array([8, 12, 6]), np.array([4, 6, 4])
    before = copy(toy.server["model"])
    models = []
    for client in cohort:
        alone = toy_of(FedAvg())
        models.append(alone.step([client])["model"])
    shares = samples / samples.sum()
    effective = float(shares @ steps)
    found = toy.step(cohort)["model"]
    for name, leaf in before.items():
        change = sum(p * (x[name] - leaf) / tau for p, x, tau in zip(shares, models, steps, strict=True))
        assert_close(found[name], leaf + effective * change, 1e-12)


def test_steps_in_place_of_normalizers() -> None:
    nova, plain = (toy_of(FedNova(proximal_weight=1.0, effective_steps=e)) for e in ("steps", "normalizer"))
    start = copy(nova.server["model"])
    longer, shorter = nova.step([0, 1])["model"], plain.step([0, 1])["model"]
    shares, steps = np.array([0.4, 0.6]), np.array([4, 6])
    applied = np.array([normalizer(4, 0, 0.1), normalizer(6, 0, 0.1)])
    assert_close(longer, interpolate(start, shorter, float(shares @ steps / (shares @ applied))), 1e-12)


def test_momentum_of_the_server() -> None:
    train = TRAIN.model_copy(update={"lr_decay": 0.5})
    pushed, plain = toy_of(FedNova(server_momentum=0.6), train), toy_of(FedNova(), train)
    buffer: Tree = {}
    for t in range(3):
        start = copy(pushed.server["model"])
        plain.server, plain.round = {"model": start}, t
        step = subtract(plain.step()["model"], start)
        rate = 0.1 * 0.5**t
        buffer = {name: 0.6 * buffer.get(name, 0) + leaf / rate for name, leaf in step.items()}
        expected = {name: leaf + rate * buffer[name] for name, leaf in start.items()}
        assert_close(pushed.step()["model"], expected, 1e-12)
    assert set(pushed.server["momentum"]) == set(start)


@pytest.mark.parametrize("idle", [{"local_epochs": 0}, {"lr": 0.0}])
@pytest.mark.parametrize("algorithm", [FedNova(), FedNova(server_momentum=0.5)])
def test_without_training_the_model_stays(idle: dict[str, Any], algorithm: FedNova) -> None:
    toy = toy_of(algorithm, TRAIN.model_copy(update=idle))
    before = copy(toy.server)
    for _ in range(2):
        assert_equal(toy.step(), before)


def test_more_steps_where_there_is_a_least_number() -> None:
    toy = toy_of(FedNova(), TRAIN.model_copy(update={"min_local_steps": 6}))
    plain = toy_of(FedAvg(), toy.train)
    # all take six steps
    assert_equal(toy.step([0, 1, 2]), plain.step([0, 1, 2]))


def test_buffers_are_means() -> None:
    toy = toy_of(FedNova(), task=normalized_layers())
    alone = [toy_of(FedAvg(), task=normalized_layers()).step([client])["model"] for client in (0, 1)]
    toy.step([0, 1])
    weights = np.array([8 / 4, 12 / 6])
    weights = weights / weights.sum()
    for name in toy.task.network.buffer_names:
        expected = sum(weight * model[name] for weight, model in zip(weights, alone, strict=True))
        assert_close(toy.server["model"][name], expected, 1e-12)


@pytest.mark.parametrize(
    ("train", "options", "named"),
    [
        ({"optimizer": "adam"}, {}, r"train\.optimizer=sgd"),
        ({"momentum": 0.9, "nesterov": True}, {}, r"train\.nesterov=false"),
        ({"momentum": 0.9, "dampening": 0.1}, {}, r"train\.dampening=0"),
        ({"max_grad_norm": 1.0}, {}, r"train\.max_grad_norm=null"),
        ({"momentum": 0.9, "persist_optimizer": True}, {}, r"train\.persist_optimizer=false"),
        ({"momentum": 0.9}, {"proximal_weight": 0.1}, r"train\.momentum=0"),
        ({}, {"proximal_weight": 10.0}, r"lower one of the two"),
    ],
)
def test_what_has_no_normalizer_is_refused(train: dict[str, Any], options: dict[str, Any], named: str) -> None:
    algorithm = FedNova(**options)
    toy = toy_of(FedAvg(), TrainConfig(**{**TRAIN.model_dump(), **train}))
    with pytest.raises(ConfigError, match=named):
        algorithm.check(toy.task, toy.context)
    FedNova().check(toy.task, toy_of(FedAvg(), TRAIN).context)
