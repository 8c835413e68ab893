"""FedAvg and its fine-tuning: invariants AVG, LU, F11-F13 and fixture G7."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from algorithms.fedavg import FedAvg
from rayfl.data.federated import Examples
from rayfl.engine.batches import plan_batches
from rayfl.engine.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy
from rayfl.randomness import RandomStreams
from tests.toys import (
    ListDataset,
    Quadratic,
    Toy,
    assert_close,
    assert_equal,
    normalized_layers,
    quadratic_clients,
    random_clients,
    softmax_regression,
    two_layers,
)


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
        assert_equal(toy.step([0])["model"], {name: value.detach() for name, value in parameters.items()})


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


def finetuned(toy: Toy, clients: list[int]) -> dict[int, Tree]:
    """v_k of the given clients, as they fine-tune after the last round."""
    assert isinstance(toy.algorithm, FedAvg)
    toy.federation.begin_round(toy.round - 1)
    return toy.federation.map(toy.algorithm.finetune, clients, {"model": toy.server["model"]})


TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=1, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
SIZES = (8, 12, 6, 10)


def test_inv_lu_1_no_epochs_of_finetuning_is_the_global_model() -> None:
    toy = Toy(FedAvg(finetune_epochs=0), random_clients(SIZES), two_layers(), TRAIN)
    toy.run()
    for tuned in finetuned(toy, list(range(4))).values():
        assert_equal(tuned, toy.server["model"])
    for rows in toy.scores(final=True).values():
        assert np.array_equal(rows["finetuned"].vector, rows["global"].vector)


@pytest.mark.parametrize("epochs", [0, 1, 3])
def test_inv_lu_2_the_global_model_is_that_of_fedavg(epochs: int) -> None:
    plain, tuning = (
        Toy(algorithm, random_clients(SIZES), two_layers(), TRAIN)
        for algorithm in (FedAvg(), FedAvg(finetune_epochs=epochs))
    )
    assert_equal(tuning.run(), plain.run())
    expected, found = plain.scores(final=True), tuning.scores(final=True)
    for client in range(4):
        assert np.array_equal(found[client]["global"].vector, expected[client]["global"].vector)
    # clients that were never sampled fine-tune too, but only after the last round
    assert all("finetuned" in rows for rows in found.values())
    assert all("finetuned" not in rows for rows in tuning.scores(final=False).values())


def test_inv_lu_3_quadratic_closed_form() -> None:
    points, tau, eta = [0.0, 4.0, 10.0], 3, 0.25
    toy = quad(FedAvg(finetune_epochs=tau, finetune_lr=eta), points, [1, 3, 2], clients_per_round=2)
    final = float(toy.run()["model"]["theta"])
    for client, tuned in finetuned(toy, [0, 1, 2]).items():
        expected = points[client] + (1 - eta) ** tau * (final - points[client])
        assert abs(float(tuned["theta"]) - expected) < 1e-12


def test_lu_learning_rate_defaults_to_that_of_the_last_round() -> None:
    toy = quad(FedAvg(finetune_epochs=1), [0.0, 4.0], [1, 1], rounds=3, lr=0.4, lr_decay=0.5)
    final = float(toy.run()["model"]["theta"])
    assert abs(float(finetuned(toy, [1])[1]["theta"]) - (4 + (1 - 0.1) * (final - 4))) < 1e-12


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_lu_4_finetuning_does_not_depend_on_the_other_clients(make: object) -> None:
    toy = Toy(FedAvg(finetune_epochs=2), random_clients(SIZES), make(), TRAIN, hosts=2)  # type: ignore[operator]
    toy.run()
    together = finetuned(toy, [0, 1, 2, 3])
    for client in range(4):
        assert_equal(finetuned(toy, [client])[client], together[client])


@pytest.mark.parametrize("scope", ["head", "body"])
def test_lu_scope_moves_that_part_only(scope: str) -> None:
    toy = Toy(FedAvg(finetune_epochs=2, finetune_scope=scope), random_clients(SIZES), normalized_layers(), TRAIN)  # type: ignore[arg-type]
    toy.run()
    network = toy.task.network
    moving = set(network.head_names if scope == "head" else network.body_names)
    together = finetuned(toy, [0, 1, 2, 3])
    for client, tuned in together.items():
        assert list(tuned) == list(toy.server["model"])
        for name in network.parameter_names:
            assert torch.equal(tuned[name], toy.server["model"][name]) == (name not in moving), name
        # running statistics of one client must not leak into the next one's model
        assert_equal(finetuned(toy, [client])[client], tuned)


def test_lu_full_scope_is_another_pass_of_local_training() -> None:
    toy = Toy(
        FedAvg(finetune_epochs=2), random_clients((8, 8)), two_layers(), TRAIN.model_copy(update={"batch_size": None})
    )
    toy.run()
    # with full batches the order of the samples moves round-off only, so the next round's update is the same
    again = Toy(FedAvg(), toy.dataset, toy.task, toy.train.model_copy(update={"local_epochs": 2}))
    again.server = copy(toy.server)
    assert_close(finetuned(toy, [0])[0], again.step([0])["model"], 1e-12)


def test_lu_options_without_epochs_are_refused() -> None:
    toy = Toy(FedAvg(), random_clients((4,)), two_layers(), TRAIN)
    for algorithm in (FedAvg(finetune_lr=0.1), FedAvg(finetune_scope="head")):
        with pytest.raises(ConfigError, match="finetune_epochs"):
            algorithm.check(toy.task, toy.context)
    FedAvg(finetune_epochs=1, finetune_lr=0.1, finetune_scope="head").check(toy.task, toy.context)


def test_vectorized_finetuning_agrees_with_looped() -> None:
    looped, stacked = (
        Toy(FedAvg(finetune_epochs=2, finetune_scope="head"), random_clients(SIZES), two_layers(), TRAIN, mode=mode)
        for mode in ("looped", "vectorized")
    )
    assert_close(looped.run(), stacked.run())
    assert_close(finetuned(looped, [0, 1, 2, 3]), finetuned(stacked, [0, 1, 2, 3]))
