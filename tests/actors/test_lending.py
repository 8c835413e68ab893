"""Cores of hosts that have finished go to those that have not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.lending import _NEARLY, lent_threads, training_with
from actors.pool import InlinePool
from tests.actors.test_federation import World

EQUAL = dict.fromkeys(range(20), 7.0)


def test_the_last_of_five_equal_clients_on_two_cores_gets_both() -> None:
    assert lent_threads([[0, 2, 4], [1, 3]], EQUAL, [("a", 1), ("a", 1)], 1) == {4: 2}


def test_a_host_that_will_have_finished_in_a_moment_counts_as_finished() -> None:
    costs = {0: 100.0, 1: 104.0, 2: 100.0}
    assert lent_threads([[0, 2], [1]], costs, [("a", 1), ("a", 1)], 1) == {2: 2}
    assert lent_threads([[0, 2], [1]], costs | {1: 115.0}, [("a", 1), ("a", 1)], 1) == {}


@pytest.mark.parametrize(
    ("shares", "cores", "own"),
    [
        ([[0, 2, 4], [1, 3]], [("a", 1.0), ("b", 1.0)], 1),  # nobody beside it
        ([[0, 2], [1, 3]], [("a", 1.0), ("a", 1.0)], 1),  # all busy to the end
        ([[0, 1]], [("a", 8.0)], 1),  # its own cores are what threads_per_actor makes of them
        ([[0, 2, 4], [1, 3]], [("a", 1.0), ("a", 1.0)], 2),  # has more threads than that anyway
        ([[0], *([] for _ in range(9))], [("a", 0.1)] * 10, 1),  # one core among ten actors
    ],
)
def test_nothing_is_lent_that_is_not_idle(shares: list[list[int]], cores: list[tuple[str, float]], own: int) -> None:
    assert lent_threads(shares, EQUAL, cores, own) == {}


@given(
    st.lists(st.lists(st.integers(1, 30), max_size=6), min_size=1, max_size=5),
    st.lists(st.sampled_from("ab"), min_size=5, max_size=5),
    st.integers(1, 3),
)
def test_there_are_never_more_threads_than_cores(work: list[list[int]], machines: list[str], own: int) -> None:
    shares, costs = [], dict[int, float]()
    for items in work:
        shares.append(list(range(len(costs), len(costs) + len(items))))
        costs.update(enumerate(map(float, items), len(costs)))
    cores = [(machines[host], float(own)) for host in range(len(work))]
    lent = lent_threads(shares, costs, cores, own)
    spans: dict[int, tuple[float, float, str]] = {}
    for host, share in enumerate(shares):
        begins = 0.0
        for client in share:
            spans[client] = (begins, begins + costs[client], machines[host])
            begins += costs[client]
    assert all(threads > own for threads in lent.values())
    for machine in "ab":
        on = [client for client, span in spans.items() if span[2] == machine]
        for moment in (spans[client][0] + share * costs[client] for client in on for share in (0.11, 0.5, 0.99)):
            running = [client for client in on if spans[client][0] <= moment < spans[client][1]]
            if all(moment >= spans[client][0] + _NEARLY * costs[client] for client in running):
                used = sum(lent.get(client, own) for client in running)
                assert used <= sum(number for place, number in cores if place == machine)


def test_threads_are_given_back_whatever_happens() -> None:
    before = torch.get_num_threads()
    seen = []

    def fail() -> None:
        with training_with(before + 2):
            seen.append(torch.get_num_threads())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert seen == [before + 2]
    with training_with(None):
        assert torch.get_num_threads() == before


def test_hosts_of_one_process_lend_nothing(tmp_path: Path) -> None:
    pool = InlinePool(World(tmp_path, 3).hosts)
    assert lent_threads([[0, 1], [2], []], EQUAL, pool.cores, 1) == {}
