"""Values of clients on a host: against an oracle in plain PyTorch, on whose samples, and what gives them up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from algorithms.base import Clients
from algorithms.fedavg import FedAvg
from rayfl.engine.client import Client
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ClientError, MethodError
from rayfl.messages.attack import AttackConfig
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task
from rayfl.valuation.section import LeaveOneOut, Shapley
from tests.support.toy_networks import two_layers
from tests.support.toys import ListDataset, Toy, assert_equal, random_clients

SIZES, COHORT = (9, 12, 6, 10), [0, 1, 2, 3]
TRAIN = TrainConfig(rounds=3, clients_per_round=4, local_epochs=2, batch_size=4, lr=0.3)


def data(public: int = 0) -> ListDataset:
    """Clients with validation parts of several sizes, one of them empty."""
    clients, others = random_clients(SIZES, public=public), random_clients([5, 0, 8, 3], seed=1)
    own = [(part["train"].x, part["train"].y) for part in map(clients.load, range(4))]
    validation = [(part["train"].x, part["train"].y) for part in map(others.load, range(4))]
    return ListDataset(own, public=clients.load_public(), validation=validation)


def toy_of(section: Any, algorithm: Any = None, hosts: int = 1, public: int = 0, **options: Any) -> Toy:
    chosen = algorithm or FedAvg()
    return Toy(chosen, data(public), two_layers(), TRAIN, hosts, contribution=section, **options)


def stepped(toy: Toy, cohort: Sequence[int] = tuple(COHORT)) -> tuple[Tree, Tree]:
    """A round, and the values of its clients as the driver asks for them: what is given, and what is found."""
    before = toy.server
    after = toy.step(cohort)
    messages = toy.federation.messages
    given = {
        "messages": {str(client): message.tree for client, message in messages.items()},
        "weights": {str(client): float(message.weight) for client, message in messages.items()},
        "before": before["model"],
        "after": after["model"],
        "server": {},
    }
    return given, toy.federation.on_one_host("global_predictors", "value", given)


def oracle(toy: Toy, given: Tree, x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    """Shapley values for minus the mean cross-entropy, by the definition: over all orders of the clients."""
    clients, network = [*given["messages"]], toy.task.network

    def utility(members: Sequence[str]) -> float:
        model = given["before"]
        if members:
            whole = sum(given["weights"][k] for k in members)
            model = {
                name: sum(given["weights"][k] / whole * given["messages"][k][name] for k in members)
                for name in given["before"]
            }
        return -float(F.cross_entropy(network.logits(model, x, training=False), y))

    orders = list(itertools.permutations(clients))
    found = dict.fromkeys(clients, 0.0)
    for order in orders:
        for place, client in enumerate(order):
            found[client] += (utility(order[: place + 1]) - utility(order[:place])) / len(orders)
    return np.array([found[client] for client in clients])


@pytest.mark.parametrize("cohort", [COHORT, [1, 3], [2]])
@pytest.mark.parametrize("samples", ["validation", "public"])
def test_inv_contribution_6_values_are_those_of_an_oracle_in_plain_pytorch(samples: Any, cohort: list[int]) -> None:
    toy = toy_of(Shapley(metric="loss", samples=samples), public=11)
    if samples == "public":
        x, y = toy.dataset.load_public(), torch.from_numpy(toy.dataset.public_labels())
    else:
        parts = [toy.dataset.load(client)["validation"] for client in COHORT]
        x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    for _ in range(2):
        given, found = stepped(toy, cohort)
        assert np.abs(found["values"].numpy() - oracle(toy, given, x, y)).max() < 1e-12
        assert (found["found"], found["evaluations"]) == ("exact", 2 ** len(cohort))
        assert float(found["values"].sum()) == pytest.approx(found["after"] - found["before"], abs=1e-12)


def test_inv_contribution_7_clients_that_send_the_same_are_worth_the_same() -> None:
    x, y = data().load(0)["train"].x, data().load(0)["train"].y
    twins = ListDataset([(x, y)] * 3, validation=[(x, y), (x[:0], y[:0]), (x[:0], y[:0])])
    train = TRAIN.model_copy(update={"batch_size": 100, "clients_per_round": 3})
    toy = Toy(FedAvg(), twins, two_layers(), train, contribution=Shapley(metric="loss"))
    _, found = stepped(toy, [0, 1, 2])
    assert float(found["values"].max() - found["values"].min()) < 1e-12 < float(found["values"][0])


def test_malicious_clients_are_valued_on_samples_of_the_honest_ones() -> None:
    attack = AttackConfig(clients=(2,), message="sign_flip")
    toy = toy_of(Shapley(metric="loss"), attack=attack)
    parts = [toy.dataset.load(client)["validation"] for client in (0, 3)]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    given, found = stepped(toy)
    assert np.abs(found["values"].numpy() - oracle(toy, given, x, y)).max() < 1e-12
    assert int(found["values"].argmin()) == 2


@pytest.mark.parametrize("section", [Shapley(exact_up_to=2, passes=2, within=0.01), LeaveOneOut(metric="loss")])
def test_hosts_find_the_same_and_rounds_are_those_without(section: Any) -> None:
    one, two = toy_of(section), toy_of(section, hosts=2)
    plain = Toy(FedAvg(), data(), two_layers(), TRAIN)
    for _ in range(2):
        (_, found), (_, again) = stepped(one), stepped(two)
        assert_equal(found, again)
        assert_equal(one.server, plain.step(COHORT))
    assert one.federation.messages and not plain.federation.messages


def test_values_are_drawn_by_the_round_of_the_seed() -> None:
    section = Shapley(exact_up_to=0, passes=1, tolerance=None, metric="loss")
    toy, other = toy_of(section), toy_of(section, seed=1)
    given, found = stepped(toy)
    again = toy.federation.on_one_host("global_predictors", "value", given)
    assert_equal(found, again)
    other.federation.begin_round(0)
    drawn = other.federation.on_one_host("global_predictors", "value", given)
    assert not torch.equal(drawn["values"], found["values"])
    assert float(drawn["values"].sum()) == pytest.approx(float(found["values"].sum()), abs=1e-12)


def test_a_job_that_nobody_waits_for_ends() -> None:
    toy = toy_of(Shapley())
    toy.step(COHORT)
    (host,) = toy.client_hosts
    host.abandon()
    job = toy.federation._job("global_predictors", "value", counted=False)
    model = {name: leaf.numpy() for name, leaf in toy.server["model"].items()}
    given = {"messages": {"0": model}, "weights": {"0": 1.0}, "before": model, "after": model, "server": {}}
    assert host.run(job, given).abandoned


class Faulty(FedAvg):
    """Its model cannot be evaluated."""

    name: Any = "faulty"

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        raise ValueError("there is none")


class Asking(FedAvg):
    """Asks its clients for something else, too."""

    name: Any = "asking"

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        clients.map(self.count, cohort, {})
        return super().round(server, cohort, clients)

    async def count(self, client: Client) -> Tree:
        return {"n": client.num_samples}


def test_what_fails_is_named() -> None:
    with pytest.raises(ClientError, match=r"the valuation of the clients, round 1, .*there is none"):
        stepped(toy_of(Shapley(), Faulty()))
    with pytest.raises(MethodError, match=r"contribution, .* are for means over clients .*; this is Clients.map"):
        toy_of(Shapley(), Asking()).step(COHORT)
