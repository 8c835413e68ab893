"""Which host runs which clients."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.federation.assignment import assign

COSTS = st.dictionaries(st.integers(0, 500), st.integers(1, 1000).map(float), max_size=40)
HOSTS = st.integers(1, 7)


def makespan(shares: list[list[int]], costs: dict[int, float]) -> float:
    return max(sum(costs[client] for client in share) for share in shares)


@given(COSTS, HOSTS, st.data())
def test_every_client_runs_once(costs: dict[int, float], hosts: int, data: st.DataObject) -> None:
    home = data.draw(st.dictionaries(st.integers(0, 500), st.integers(0, hosts - 1)))
    shares = assign(costs, [1.0] * hosts, home)
    assert len(shares) == hosts
    assert sorted(client for share in shares for client in share) == sorted(costs)


@given(COSTS, HOSTS, st.data())
def test_the_same_question_has_the_same_answer(costs: dict[int, float], hosts: int, data: st.DataObject) -> None:
    home = data.draw(st.dictionaries(st.integers(0, 500), st.integers(0, hosts - 1)))
    shuffled = list(costs.items())
    random.Random(0).shuffle(shuffled)
    assert assign(dict(shuffled), [1.0] * hosts, dict(reversed(home.items()))) == assign(costs, [1.0] * hosts, home)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_without_homes_the_busiest_host_has_at_most_four_thirds_of_the_optimum(costs: list[int], hosts: int) -> None:
    by_client = {k: float(cost) for k, cost in enumerate(costs)}
    optimum = min(
        max(sum(cost for cost, host in zip(costs, choice, strict=True) if host == h) for h in range(hosts))
        for choice in itertools.product(range(hosts), repeat=len(costs))
    )
    assert makespan(assign(by_client, [1.0] * hosts, {}), by_client) <= (4 / 3 - 1 / (3 * hosts)) * optimum + 1e-9


@given(COSTS.filter(bool), HOSTS, st.data())
def test_whatever_the_homes_no_host_is_much_busier_than_the_mean(
    costs: dict[int, float], hosts: int, data: st.DataObject
) -> None:
    home = data.draw(st.dictionaries(st.sampled_from(sorted(costs)), st.integers(0, hosts - 1)))
    mean = sum(costs.values()) / hosts
    bound = max(1.1 * mean, mean + (1 - 1 / hosts) * max(costs.values()))
    assert makespan(assign(costs, [1.0] * hosts, home), costs) <= bound + 1e-9


@given(COSTS, HOSTS)
def test_an_assignment_is_kept_when_it_is_asked_for_again(costs: dict[int, float], hosts: int) -> None:
    shares = assign(costs, [1.0] * hosts, {})
    home = {client: host for host, share in enumerate(shares) for client in share}
    assert assign(costs, [1.0] * hosts, home) == shares


def test_clients_stay_at_home_while_hosts_are_balanced() -> None:
    costs = {client: 10.0 + client % 3 for client in range(12)}
    home = {client: (client // 3 + 1) % 4 for client in range(12)}
    shares = assign(costs, [1.0] * 4, home)
    for host, share in enumerate(shares):
        assert sorted(share) == [client for client in range(12) if home[client] == host]


def test_clients_move_off_an_overloaded_host() -> None:
    costs = dict.fromkeys(range(8), 10.0)
    shares = assign(costs, [1.0] * 2, dict.fromkeys(range(8), 0))
    assert [len(share) for share in shares] == [4, 4]
    assert shares[0] == [0, 1, 2, 3]


def test_a_tenth_more_than_the_mean_is_no_overload() -> None:
    costs = dict.fromkeys(range(20), 1.0)
    eleven = {client: 0 if client < 11 else 1 for client in range(20)}
    assert [len(share) for share in assign(costs, [1.0] * 2, eleven)] == [11, 9]
    twelve = {client: 0 if client < 12 else 1 for client in range(20)}
    assert [len(share) for share in assign(costs, [1.0] * 2, twelve)] == [11, 9]


def test_large_clients_go_first() -> None:
    costs = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 4.0}
    assert assign(costs, [1.0] * 2, {}) == [[4], [0, 1, 2, 3]]


def test_a_slow_host_gets_less() -> None:
    costs = dict.fromkeys(range(30), 1.0)
    assert [len(share) for share in assign(costs, [2.0, 1.0], {})] == [10, 20]
    assert [len(share) for share in assign(costs, [1.0, 1.0, 0.25], {})] == [5, 5, 20]


def test_clients_leave_a_home_that_is_slow() -> None:
    costs, home = dict.fromkeys(range(30), 1.0), {client: client % 2 for client in range(30)}
    shares = assign(costs, [2.0, 1.0], home)
    assert [len(share) for share in shares] == [11, 19]  # ten, and a tenth more
    assert set(shares[0]) < {client for client, host in home.items() if host == 0}
    assert [len(share) for share in assign(costs, [1.05, 1.0], home)] == [15, 15]


@pytest.mark.parametrize("hosts", [1, 3])
def test_no_clients(hosts: int) -> None:
    assert assign({}, [1.0] * hosts, {}) == [[] for _ in range(hosts)]
