"""Rules of aggregation that remember earlier rounds, or draw, in rounds of a method."""

from __future__ import annotations

import pytest

from algorithms.fedavg import FedAvg
from rayfl.messages.aggregators import CenteredClipping, DivideAndConquer, FoolsGold, Rule
from rayfl.messages.attack import AttackConfig
from rayfl.params import squared_distance, subtract, weighted_sum, zeros_like
from tests.algorithms.test_privacy import Talkative
from tests.algorithms.test_receiving import EVERYONE, toy
from tests.support.toys import assert_close, assert_equal


@pytest.mark.parametrize(
    "rule", [CenteredClipping(radius=0.1), DivideAndConquer(malicious=1, coordinates=9), FoolsGold()], ids=str
)
def test_rules_that_remember_or_draw_give_the_same_bits_on_several_hosts_and_stacked(rule: Rule) -> None:
    attack = AttackConfig(clients=[1], message="min_max")
    one, several = (toy(aggregator=rule, attack=attack, hosts=hosts) for hosts in (1, 2))
    stacked = toy(aggregator=rule, attack=attack, mode="vectorized")
    for _ in range(3):
        found = one.step(EVERYONE)
        assert_equal(found, several.step(EVERYONE))
        assert_close(found, stacked.step(EVERYONE), atol=1e-9)
    assert_equal(one.remembered, several.remembered)
    assert bool(one.remembered) is not isinstance(rule, DivideAndConquer)


def test_clipping_begins_where_the_last_round_has_ended() -> None:
    one, radius = toy(FedAvg(aggregation="uniform"), aggregator=CenteredClipping(radius=0.02)), 0.02
    center = zeros_like(one.server["model"])
    for round in range(3):
        start, own = one.server["model"], []
        for k in EVERYONE:
            alone = toy(FedAvg(aggregation="uniform"))
            alone.server, alone.round = one.server, round
            own.append(subtract(alone.step([k])["model"], start))
        shares = [min(1.0, radius / float(squared_distance(change, center)) ** 0.5) / len(own) for change in own]
        center = weighted_sum([center, *own], [1 - sum(shares), *shares])
        assert_close(subtract(one.step(EVERYONE)["model"], start), center, atol=1e-9)
        assert_close(one.remembered["centered_clipping 1"], center, atol=1e-9)


def test_each_mean_of_a_round_has_a_memory_of_its_own() -> None:
    one = toy(Talkative(way="twice"), aggregator=CenteredClipping(radius=0.02))
    one.step()
    assert set(one.remembered) == {"centered_clipping 1", "centered_clipping 2"}


def test_a_round_that_is_begun_again_remembers_what_was_before_it() -> None:
    one = toy(aggregator=FoolsGold())
    one.step([0, 1, 2])
    before, server = one.remembered, one.server
    after = one.step([0, 1, 3])
    again = one.federation
    again.begin_round(1, ("test",), remembered=before)
    assert_equal({**server, **one.algorithm.round(server, [0, 1, 3], again)}, after)
    assert_equal(again.remembered, one.remembered)
    assert set(before["foolsgold 1"]) == {"0", "1", "2"} and set(again.remembered["foolsgold 1"]) == {
        "0",
        "1",
        "2",
        "3",
    }
