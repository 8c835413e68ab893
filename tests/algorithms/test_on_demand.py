"""What clients are served is made for few of them at a time, and is the same as if it were made for all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.fedap import FedAP
from algorithms.fedavg import FedAvg
from algorithms.fedcac import FedCAC
from algorithms.on_demand import OnDemand, trees_of
from algorithms.pfedla import PFedLA
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, leaves, num_bytes
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, random_clients

SIZES = (8, 12, 6, 10, 9)
TRAIN = TrainConfig(rounds=3, clients_per_round=3, local_epochs=1, batch_size=4, lr=0.1)
METHODS: dict[str, tuple[Any, TrainConfig]] = {
    "fedap": (FedAP(warmup=0.0), TRAIN.model_copy(update={"private_norm": "all"})),
    "pfedla": (PFedLA(hidden=8), TRAIN),
    "fedcac": (FedCAC(collaboration_rounds=3), TRAIN),
}


class Made:
    """Trees of clients 0 to 9, and who was asked for together."""

    def __init__(self, size: int = 8) -> None:
        self.asked: list[list[int]] = []
        self.trees = OnDemand(range(10), size, self._make)

    def _make(self, clients: Sequence[int]) -> Mapping[int, Tree]:
        self.asked.append(list(clients))
        return {client: {"number": torch.tensor(client)} for client in clients}


def test_nothing_is_made_before_it_is_asked_for() -> None:
    made = Made()
    assert len(made.trees) == 10 and list(made.trees) == list(range(10)) and 3 in made.trees and 10 not in made.trees
    assert made.asked == []
    assert made.trees[4]["number"] == 4 and made.trees.get(10) is None
    with pytest.raises(KeyError):
        made.trees[10]
    assert list(made.trees.of([7, 12, 2])) == [7, 2]
    assert made.asked == [[4], [7, 2]]


def test_trees_that_are_there_are_taken_from_where_they_are() -> None:
    trees: dict[int, Tree] = {client: {"x": torch.ones(2)} for client in range(3)}
    found = trees_of(trees, [2, 5, 0])
    assert list(found) == [2, 0] and found[2] is trees[2]
    assert list(trees_of(Made().trees, [2, 15, 0])) == [2, 0]


@pytest.mark.parametrize("name", METHODS)
def test_who_is_served_together_makes_no_difference(name: str) -> None:
    """To the bit; else results would depend on the number of actors."""
    algorithm, train = METHODS[name]
    task = normalized_layers() if name == "fedap" else two_layers()
    toy = Toy(algorithm, random_clients(SIZES), task, train)
    toy.run()
    _, own = toy.algorithm.served(toy.server, toy.context)
    assert isinstance(own, OnDemand) and own
    together = own.of(list(own))
    assert num_bytes(toy.server["model"]) == own.size == num_bytes(together[next(iter(own))])
    pairs = {client: tree for begin in range(0, len(SIZES), 2) for client, tree in own.of([begin, begin + 1]).items()}
    assert pairs.keys() == together.keys()
    for client, tree in together.items():
        for other in (pairs[client], own[client]):
            assert [path for path, _ in leaves(tree)] == [path for path, _ in leaves(other)]
            for (_, one), (_, two) in zip(leaves(tree), leaves(other), strict=True):
                assert one.numpy().tobytes() == two.numpy().tobytes()


@pytest.mark.parametrize(("size", "most"), [(1, 10), (64 << 20, 2), (1 << 40, 1)])
def test_an_evaluation_makes_few_at_a_time(size: int, most: int) -> None:
    toy = Toy(FedAvg(), random_clients([8] * 10), two_layers(), TRAIN)
    made = Made(size)
    toy.federation.begin_round(0)
    scores = toy.federation.evaluate(toy.server, ("test",), False, made.trees)
    assert list(scores) == list(range(10))
    assert np.concatenate(made.asked).tolist() == list(range(10))
    assert max(map(len, made.asked)) == most
