"""What the host does around the steps of a stack: as much for each further client, however many there are."""

from __future__ import annotations

from typing import Any

import pytest

from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from algorithms.superfed import SuPerFed
from rayfl.engine.updates.settings import TrainConfig
from tests.support.lines import Lines
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, random_clients

METHODS: dict[str, tuple[Any, int]] = {
    "fedavg": (FedAvg, 1000),
    "superfed": (lambda: SuPerFed(start=0.0), 1850),
    "ditto": (Ditto, 1980),
}
"""Methods, and the lines that are executed for each further client at most."""


def lines(method: Any, clients: int) -> int:
    """Lines of the third round, with all clients in one stack, one step each, and no scores."""
    train = TrainConfig(rounds=4, clients_per_round="all", local_epochs=1, batch_size=10, lr=0.1)
    toy = Toy(method(), random_clients([10] * clients, seed=1), two_layers(), train, mode="vectorized")
    toy.client_hosts[0].engine.width = clients
    for round in range(3):
        toy.federation.begin_round(round)
        with Lines() as counted:
            changed = toy.algorithm.round(toy.server, list(range(clients)), toy.federation)
        toy.server = {**toy.server, **changed}
    return counted.total


@pytest.mark.parametrize(
    ("method", "most"),
    [pytest.param(*one, id=name, marks=pytest.mark.slow if name == "ditto" else ()) for name, one in METHODS.items()],
)
def test_what_the_host_does_for_a_further_client_does_not_grow(method: Any, most: int) -> None:
    few, more, many = (lines(method, clients) for clients in (10, 20, 40))
    assert many - more <= 2.05 * (more - few)
    assert more - few <= 10 * most
