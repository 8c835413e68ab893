"""Methods of users that draw from generators that no seed controls are warned of, once for each generator."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import rayfl
from algorithms.fedavg import FedAvg
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.params import Tree
from tests.support.experiments import small_experiment


class Seeded(FedAvg):
    """Draws as it should."""

    name: str = "seeded"

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        self.draw(client)
        return await super().local_update(client, model)

    def draw(self, client: Client) -> None:
        client.context.streams.generator("mine", client.round, client.id).random()


class Torch(Seeded):
    def draw(self, client: Client) -> None:
        torch.rand(3)


class Numpy(Seeded):
    def draw(self, client: Client) -> None:
        np.random.rand()


class Python(Seeded):
    def draw(self, client: Client) -> None:
        random.random()


def warned_of(method: str, folder: Path) -> list[str]:
    config = small_experiment(folder, method, "fedavg", backend="inline")
    drops = {"dataset": {"name": "wine"}, "model": {"name": "tabular_mlp", "dropout": 0.2}}  # draws of rayfl's own
    rayfl.run(config | drops | {"algorithm": f"{__name__}:{method}"})
    lines = (folder / method / "rayfl.log").read_text().splitlines()
    return [line for line in lines if "global generator" in line]


@pytest.mark.parametrize(("method", "named"), [("Torch", "torch"), ("Numpy", "numpy.random"), ("Python", "random")])
def test_a_global_generator_is_named_once(method: str, named: str, tmp_path: Path) -> None:
    [line] = warned_of(method, tmp_path)
    assert "round 1, local_update: warning: draws from the global generator of " + named in line


def test_draws_from_the_experiments_streams_are_right(tmp_path: Path) -> None:
    assert warned_of("Seeded", tmp_path) == []
