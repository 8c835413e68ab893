"""Cores of actors that have finished go to those that have not, if the configuration says so."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

import rayfl
from algorithms.fedavg import FedAvg
from rayfl.aggregation import Weighted
from rayfl.engine.client import Client
from rayfl.errors import ConfigError
from rayfl.params import Tree
from tests.cluster.experiments import outcome, small_experiment


class Threads(FedAvg):
    """FedAvg whose clients note with how many threads they were trained."""

    name: Literal["threads"] = "threads"  # type: ignore[assignment]

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        client.state["threads"] = torch.tensor(torch.get_num_threads())
        return await super().local_update(client, model)


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("lend", [False, True])
def test_actors_train_with_the_cores_that_others_have_left(lend: bool, tmp_path: Path) -> None:
    content = small_experiment(tmp_path, "run", "fedavg", num_actors=2) | {
        "partition": {"name": "iid", "num_clients": 5},
        "algorithm": {"name": "tests.cluster.test_lending:Threads"},
        "engine": {"lend_cores": lend},
    }
    content["train"] |= {"clients_per_round": "all", "rounds": 2}
    rayfl.run(content)
    threads = sorted(int(state["threads"]) for state in outcome(tmp_path / "run").states.values())
    assert threads == ([1, 1, 1, 1, 2] if lend else [1, 1, 1, 1, 1])


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    content = small_experiment(tmp_path, "run", "fedavg", backend="inline") | {"engine": {"lend_cores": True}}
    with pytest.raises(ConfigError, match="lend_cores needs cluster"):
        rayfl.run(content)
    with pytest.raises(ConfigError, match="lend_cores is for clients trained one by one"):
        rayfl.run(content | {"engine": {"lend_cores": True, "mode": "vectorized"}})
