"""FedAvg: invariants AVG, F11-F13, fixture G7, and momentum that persists."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from algorithms.fedavg import FedAvg
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import Examples
from rayfl.params import Tree, copy
from rayfl.randomness import RandomStreams
from tests.support.toy_networks import Quadratic, softmax_regression, two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, quadratic_clients, random_clients


def quad(algorithm: FedAvg, points: list[float], copies: list[int], **train: object) -> Toy:
    """QUAD with full batches, everybody sampled unless told otherwise."""
    settings = {"rounds": 3, "clients_per_round": len(points), "batch_size": None, "lr": 0.1, "local_epochs": 2}
    return Toy(algorithm, quadratic_clients(points, copies), Quadratic(), TrainConfig(**{**settings, **train}))  # type: ignore[arg-type]


def alone(toy: Toy, client: int) -> Tree:
    """What one client uploads in the first round: the mean of one client is its model bit for bit."""
    single = Toy(FedAvg(), toy.dataset, toy.task, toy.train)
    return single.step([client])["model"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("clients", "sampled"), [(1, 1), (3, 3), (5, 2)])
def test_inv_avg_1_identical_clients_follow_one_clients_path(clients: int, sampled: int) -> None:
    # one sample a client: whatever the permutation, the batches are the same
    x, y = torch.randn(1, 5, generator=torch.Generator().manual_seed(1)), torch.tensor([2])
    train = TrainConfig(
        rounds=4, clients_per_round=sampled, local_epochs=3, batch_size=10, lr=0.2, momentum=0.5, weight_decay=0.01
    )
    many = Toy(FedAvg(), ListDataset([(x, y)] * clients), two_layers(double=False), train)
    path = Toy(FedAvg(), ListDataset([(x, y)]), two_layers(double=False), train)
    start = copy(path.server)
    for _ in range(train.rounds):
        assert_equal(many.step(), path.step([0]))
    assert not torch.equal(start["model"]["head.weight"], path.server["model"]["head.weight"])


def test_inv_avg_2_weights_of_two_clients() -> None:
    sizes, total = (1, 3, 4), 8
    train = TrainConfig(rounds=1, local_epochs=2, batch_size=2, lr=0.1)
    toys = {
        policy: Toy(
            FedAvg(aggregation=policy), random_clients(sizes, dtype=torch.float32), two_layers(double=False), train
        )
        for policy in ("samples", "uniform", "population")
    }
    old = copy(toys["samples"].server["model"])
    first, second = (alone(toys["samples"], client) for client in (0, 1))
    share = 4 / total
    expected = {"samples": (0, 0.25, 0.75), "uniform": (0, 0.5, 0.5), "population": (1 - share, 1 / total, 3 / total)}
    for policy, toy in toys.items():
        stay, of_first, of_second = expected[policy]
        model = toy.step([0, 1])["model"]
        for name in old:
            # binary fractions: in float64 every product and sum is exact, so one rounding remains
            value = stay * old[name].double() + of_first * first[name].double() + of_second * second[name].double()
            assert torch.equal(model[name], value.float()), (policy, name)


def test_inv_avg_2_population_of_everybody_is_samples() -> None:
    train = TrainConfig(rounds=2, clients_per_round=3, local_epochs=1, batch_size=2, lr=0.1)
    population, samples = (
        Toy(FedAvg(aggregation=policy), random_clients((1, 3, 4)), two_layers(), train)
        for policy in ("population", "samples")
    )
    assert_equal(population.run(), samples.run())


def test_inv_avg_3_splitting_a_reply_changes_uniform_only() -> None:
    whole, halves = ([0.0, 4.0], [2, 6]), ([0.0, 0.0, 4.0], [1, 1, 6])
    results = {
        policy: [quad(FedAvg(aggregation=policy), *clients).step() for clients in (whole, halves)]
        for policy in ("samples", "uniform")
    }
    assert_equal(*results["samples"])
    assert abs(results["uniform"][0]["model"]["theta"] - results["uniform"][1]["model"]["theta"]) > 0.1


def test_inv_f11_one_client_is_centralised_sgd() -> None:
    dataset, task, rounds = random_clients((23,)), two_layers(), 4
    train = TrainConfig(
        rounds=rounds, clients_per_round=1, local_epochs=1, batch_size=5, lr=0.1, momentum=0.9, weight_decay=0.01
    )
    toy = Toy(FedAvg(), dataset, task, train)
    names = list(toy.server["model"])
    parameters = {name: toy.server["model"][name].clone().requires_grad_() for name in names}
    examples: Examples = dataset.load(0)["train"]
    for epoch in range(rounds):
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9, weight_decay=0.01)
        plan = plan_batches(23, 5, 5, RandomStreams(0).generator("batches", epoch, 0))
        for index in plan.batches(torch.device("cpu")):
            hidden = torch.relu(
                nn.functional.linear(examples.x[index], parameters["inner.weight"], parameters["inner.bias"])
            )
            logits = nn.functional.linear(hidden, parameters["head.weight"], parameters["head.bias"])
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, examples.y[index]).backward()
            optimizer.step()
        assert_close(toy.step([0])["model"], {name: value.detach() for name, value in parameters.items()}, 1e-12)


def test_inv_f12_one_full_batch_step_is_a_step_on_the_pooled_loss() -> None:
    dataset, task = random_clients((4, 9, 7)), softmax_regression()
    toy = Toy(
        FedAvg(), dataset, task, TrainConfig(rounds=1, clients_per_round=3, local_epochs=1, batch_size=None, lr=0.5)
    )
    model = {name: leaf.clone().requires_grad_() for name, leaf in toy.server["model"].items()}
    parts = [dataset.load(client)["train"] for client in range(3)]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    loss = nn.functional.cross_entropy(nn.functional.linear(x, model["head.weight"], model["head.bias"]), y)
    gradients = torch.autograd.grad(loss, list(model.values()))
    expected = {name: (leaf - 0.5 * g).detach() for (name, leaf), g in zip(model.items(), gradients, strict=True)}
    assert_close(toy.step([0, 1, 2])["model"], expected, 1e-12)


def test_inv_f13_quadratic_closed_form() -> None:
    points, copies, tau, eta = [-2.0, 1.0, 5.0], [1, 2, 5], 4, 0.1
    toy = quad(FedAvg(), points, copies, local_epochs=tau, lr=eta, rounds=5)
    mean = float(np.dot(points, copies) / sum(copies))
    theta = 1.0
    for _ in range(5):
        for client, point in enumerate(points):
            received = Toy(FedAvg(), toy.dataset, toy.task, toy.train)
            received.server = copy(toy.server)
            reply = float(received.step([client])["model"]["theta"])
            assert abs(reply - (point + (1 - eta) ** tau * (theta - point))) < 1e-12
        theta = mean + (1 - eta) ** tau * (theta - mean)
        assert abs(float(toy.step()["model"]["theta"]) - theta) < 1e-12


def test_g7_fedavg() -> None:
    toy = quad(FedAvg(), [0.0, 4.0], [1, 3])
    assert abs(float(alone(toy, 0)["theta"]) - 0.81) < 1e-9
    assert abs(float(alone(toy, 1)["theta"]) - 1.57) < 1e-9
    assert abs(float(toy.step()["model"]["theta"]) - 1.38) < 1e-9


def test_persist_optimizer_continues_momentum_at_the_next_participation() -> None:
    point, eta, momentum = 4.0, 0.1, 0.5
    train = {"momentum": momentum, "lr": eta, "persist_optimizer": True, "local_epochs": 2}
    toy = quad(FedAvg(), [point, 0.0], [1, 1], **train)
    theta, velocity = 1.0, 0.0
    for cohort in ([0], [1], [0], [0]):
        theta = float(toy.server["model"]["theta"])
        toy.step(cohort)
        if cohort == [0]:
            for _ in range(2):
                velocity = momentum * velocity + (theta - point)
                theta -= eta * velocity
            assert abs(float(toy.server["model"]["theta"]) - theta) < 1e-12
        assert abs(float(toy.states()[0]["optimizer"]["main"]["theta"]) - velocity) < 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_persist_optimizer_matters_from_the_second_participation_on(momentum: float) -> None:
    train = TrainConfig(rounds=3, clients_per_round=2, local_epochs=1, batch_size=4, lr=0.1, momentum=momentum)
    kept, fresh = (
        Toy(FedAvg(), random_clients((8, 12, 6)), two_layers(), train.model_copy(update={"persist_optimizer": persist}))
        for persist in (True, False)
    )
    for cohort in ([0], [1, 2]):
        assert_equal(kept.step(cohort), fresh.step(cohort))
    differs = not torch.equal(kept.step([0, 1])["model"]["head.weight"], fresh.step([0, 1])["model"]["head.weight"])
    assert differs == (momentum > 0)
    assert set(kept.states()) == ({0, 1, 2} if momentum else set())
    assert fresh.states() == {}


def test_persist_optimizer_vectorized_agrees_with_looped() -> None:
    train = TrainConfig(
        rounds=4, clients_per_round=2, local_epochs=1, batch_size=4, lr=0.1, momentum=0.5, persist_optimizer=True
    )
    looped, stacked = (
        Toy(FedAvg(), random_clients((8, 12, 6)), two_layers(), train, mode=mode) for mode in ("looped", "vectorized")
    )
    assert_close(looped.run(), stacked.run())
    assert_close(looped.states(), stacked.states())
