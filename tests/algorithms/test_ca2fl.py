"""CA2FL: invariants CACHE, an oracle in plain PyTorch, and what the cache does to buffers of fast clients."""

from __future__ import annotations

import pytest
import torch

from algorithms.ca2fl import CA2FL
from algorithms.fedavg import FedAvg
from algorithms.fedbuff import FedBuff
from algorithms.fedvarp import FedVARP
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, num_bytes, subtract
from tests.support.fedbuff_toys import SIZES, Rounds, toy_of, trained
from tests.support.toy_networks import Quadratic, normalized_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients


def states(toy: Toy, like: Tree) -> list[Tree]:
    """y_i of all clients."""
    zeros = {name: torch.zeros_like(leaf) for name, leaf in like.items()}
    found = toy.states()
    return [found.get(client, {}).get("change", zeros) for client in range(toy.dataset.num_clients)]


@pytest.mark.parametrize("server_lr", [1.0, 0.3])
def test_inv_cache_1_rounds_are_those_of_an_oracle_in_plain_pytorch(server_lr: float) -> None:
    rounds = Rounds(toy_of(CA2FL(server_lr=server_lr)), [1, 2, 5, 3], 2, concurrency=4)
    models, ages = [copy(rounds.toy.server["model"])], set[int]()
    last = [{name: torch.zeros_like(leaf) for name, leaf in models[0].items()} for _ in SIZES]
    for t in range(8):
        found = rounds.step()
        turnout = rounds.turnouts[-1]
        changes = {}
        for client in turnout.cohort:
            began = turnout.started.get(client, t)
            ages.add(t - began)
            changes[client] = subtract(trained(rounds.toy, models[began], client, began), models[began])
        after = {}
        for name, leaf in models[t].items():
            step = sum(tree[name] for tree in last) / len(SIZES)
            step = step + sum(tree[name] - last[client][name] for client, tree in changes.items()) / len(changes)
            after[name] = leaf + server_lr * step
        for client, tree in changes.items():
            last[client] = tree
        models.append(after)
        assert_close(found["model"], after, 1e-12)
        assert_close(found["mean"], {name: sum(tree[name] for tree in last) / len(SIZES) for name in after}, 1e-12)
    assert len(ages) > 2


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_cache_2_where_nobody_is_late_it_is_fedvarp(mode: str) -> None:
    buffered = Rounds(toy_of(CA2FL(), mode=mode), [3] * 4, 2)
    plain = toy_of(FedVARP(), mode=mode)
    for _ in range(6):
        server = buffered.step()
        assert not buffered.turnouts[-1].started
        assert_close(server["model"], plain.step(buffered.turnouts[-1].cohort)["model"], 1e-12)
        assert plain.federation.traffic.by_client == buffered.toy.federation.traffic.by_client


def test_inv_cache_3_with_all_clients_in_every_buffer_it_is_federated_averaging() -> None:
    buffered, plain = Rounds(toy_of(CA2FL()), [3] * 4, 4), toy_of(FedAvg(aggregation="uniform"))
    for _ in range(4):
        server = buffered.step()
        assert buffered.turnouts[-1].cohort == (0, 1, 2, 3)
        assert_close(server["model"], plain.step(range(4))["model"], 1e-12)


def test_inv_cache_4_the_mean_is_that_of_what_clients_keep() -> None:
    rounds = Rounds(toy_of(CA2FL()), [1, 2, 5, 3], 2, concurrency=4)
    for t in range(7):
        server = rounds.step(absent=(0,) if t == 3 else ())
        kept = states(rounds.toy, server["mean"])
        mean = {name: torch.stack([tree[name] for tree in kept]).mean(0) for name in server["mean"]}
        assert_close(server["mean"], mean, 1e-12)


def test_inv_cache_5_slow_clients_count_as_much_as_fast_ones() -> None:
    """Client i's change is 0.1 (point_i - w): with points 0 and 4 the step is zero at the mean of both, 2."""
    ends = {}
    for method in (CA2FL(), FedBuff(staleness="constant")):
        train = TrainConfig(rounds=400, clients_per_round=1, local_epochs=1, batch_size=None, lr=0.1)
        toy = Toy(method, quadratic_clients([0.0, 4.0], [1, 1]), Quadratic(), train)
        rounds = Rounds(toy, [1, 9], 1, concurrency=2)
        path = [float(rounds.step()["model"]["theta"]) for _ in range(400)]
        ends[method.name] = sum(path[-50:]) / 50
    assert abs(ends["ca2fl"] - 2) < 0.1
    assert ends["fedbuff"] < 1


@pytest.mark.parametrize("hosts", [2, 3])
def test_inv_cache_6_rounds_are_the_same_on_any_number_of_hosts(hosts: int) -> None:
    found = [
        Rounds(toy_of(CA2FL(), hosts=number), [1, 2, 5, 3], 2, concurrency=4).run(6)["model"] for number in (1, hosts)
    ]
    assert_equal(*found)


def test_inv_cache_7_running_statistics_step_by_the_mean_of_the_buffer_and_are_not_kept() -> None:
    rounds = Rounds(toy_of(CA2FL(), task=normalized_layers()), [1, 2, 5, 3], 2, concurrency=4)
    buffered = Rounds(toy_of(FedBuff(staleness="constant"), task=normalized_layers()), [1, 2, 5, 3], 2, concurrency=4)
    first, other = rounds.step(), buffered.step()
    names = rounds.toy.task.network.buffer_names
    assert names and not set(names) & set(first["mean"])
    for name in names:
        assert torch.equal(first["model"][name], other["model"][name])
    for _ in range(4):
        rounds.step()
    assert all(not set(names) & set(state) for state in states(rounds.toy, first["mean"]))


def test_inv_cache_8_what_clients_keep_costs_no_message() -> None:
    toy = toy_of(CA2FL())
    rounds = Rounds(toy, [1, 2, 5, 3], 2, concurrency=4)
    for _ in range(5):
        rounds.step()
        size = num_bytes(toy.server["model"])
        assert toy.federation.traffic.by_client == dict.fromkeys(rounds.turnouts[-1].cohort, (size, size))
