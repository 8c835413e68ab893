"""Writes in place to what the server sends, or to what a forward pass records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import rayfl
from algorithms.base import Clients
from algorithms.fedavg import FedAvg
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.updates.write_guard import WriteGuard
from rayfl.errors import ClientError, MethodError
from rayfl.params import Tree, copy
from tests.data.sources.test_official_test import settings
from tests.support.experiments import small_experiment
from tests.support.in_place import toy_of
from tests.support.toys import assert_equal

COHORT = (0, 1, 3)


class Server(FedAvg):
    """Momentum at the server, in place."""

    name: str = "server"

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        mean = super().round(server, cohort, clients)["model"]
        for name, leaf in server["model"].items():
            leaf.lerp_(mean[name], 0.9)
        return {"model": server["model"]}


class CarefulServer(Server):
    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        return super().round(copy(server), cohort, clients)


def test_the_server_returns_new_tensors() -> None:
    """A commit of the round before may still be reading the old ones."""

    def played(method: FedAvg) -> Tree:
        toy = toy_of(method)
        return toy.federation.play(method, toy.server, COHORT)

    played(CarefulServer())
    with pytest.raises(MethodError, match=r"server: round 1 on the server writes to 'model/inner\.weight' of its tree"):
        played(Server())


class Addressed(FedAvg):
    """Each client has a payload of its own, which it may do with as it likes: nobody else sees it."""

    name: str = "addressed"
    writes: bool = False

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        own = {client: {"model": server["model"]} for client in cohort}
        return {"model": clients.mean(self.local_update, cohort, broadcast={}, payloads=own)}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        if self.writes:
            model["inner.weight"].mul_(0.5)
        else:
            model = {**model, "inner.weight": model["inner.weight"] * 0.5}
        return await super().local_update(client, model)


def test_a_payload_belongs_to_its_client() -> None:
    writing, copying = (toy_of(Addressed(writes=writes)) for writes in (True, False))
    for _ in range(2):
        before = copy(writing.server)
        server = writing.server
        assert_equal(writing.step(COHORT), copying.step(COHORT))
        assert_equal(before, server)


def test_a_tensor_in_the_payloads_of_clients_that_are_stacked_is_all_of_theirs() -> None:
    with pytest.raises(ClientError, match=r"addressed writes to 'model/inner\.weight' of what is sent to several"):
        toy_of(Addressed(writes=True), "vectorized").step(COHORT)


@pytest.mark.parametrize("backend", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", [{}, {"on_error": "skip"}])
def test_whatever_the_policy_and_the_backend(policy: Mapping[str, Any], backend: str, tmp_path: Path) -> None:
    config = small_experiment(tmp_path, "run", "fedavg", backend=backend) | {"clients": dict(policy)}
    config["algorithm"] = {"name": "tests.actors.hosting.test_in_place:EveryBias"}
    with pytest.raises(
        ClientError, match=r"client \d+, round 1, local_update: MethodError: .*EveryBias writes to 'mod"
    ):
        rayfl.run(config)


def test_the_official_test_part_is_scored_on_what_was_sent(tmp_path: Path) -> None:
    config = settings(tmp_path, algorithm={"name": "tests.actors.hosting.test_in_place:Official"})
    with pytest.raises(MethodError, match=r"Official: global_predictors, .* the server's 'model/head\.bias'"):
        rayfl.run(config)


def test_what_a_forward_pass_records_is_compared() -> None:
    """PyTorch counts no write there."""
    module = torch.nn.BatchNorm1d(2)
    tree = {"a": {"running_mean": torch.zeros(2)}, "b": {"running_var": torch.ones(2)}}
    module._buffers.update(running_mean=tree["a"]["running_mean"], running_var=tree["b"]["running_var"])
    recorded = {"running_mean", "running_var"}
    lent, uncompared = WriteGuard(tree, recorded), WriteGuard(tree)
    assert lent.written() is None
    with torch.no_grad():
        module(torch.randn(5, 2))
    assert lent.written() == "a/running_mean"
    assert uncompared.written() is None


def test_versions_tell() -> None:
    tree = {"a": {"b": torch.ones(2)}, "n": 3, "empty": torch.zeros(0)}
    lent = WriteGuard(tree)
    assert lent.written() is None
    tree["a"] = {"b": torch.zeros(2)}
    assert lent.written() is None
    with torch.inference_mode():
        made = torch.ones(2)
    assert WriteGuard({"made": made}).written() is None
    inner = torch.ones(3)
    lent = WriteGuard({"view": inner[1:]})
    inner[0] = 2  # a view's version is that of all its memory
    assert lent.written() == "view"
