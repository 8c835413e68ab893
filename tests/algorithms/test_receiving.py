"""Malicious clients and robust rules in rounds of methods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from algorithms.base import Algorithm
from algorithms.clients import Clients
from algorithms.fedavg import FedAvg
from rayfl.engine.client import Client
from rayfl.errors import ClientError, ConfigError, MethodError
from rayfl.messages.aggregators import GeometricMedian, Krum, Mean, Median, NormBounding, Rule, TrimmedMean
from rayfl.messages.attack import AttackConfig
from rayfl.params import Tree, interpolate, squared_distance, subtract, weighted_sum
from rayfl.randomness import RandomStreams
from tests.algorithms.test_privacy import PRIVATE, Talkative, uniform
from tests.support.cases import TRAIN, of_kinds, toy_of
from tests.support.cases.base import SIZES, Case
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

EVERYONE = list(range(len(SIZES)))
UNTOUCHED = NormBounding(radius=1e6)
"""A rule that needs the messages one by one, and makes their mean of them."""


def toy(algorithm: Algorithm | None = None, **options: Any) -> Toy:
    clients = random_clients(SIZES, dtype=torch.float64)
    return Toy(algorithm or FedAvg(), clients, two_layers(double=True), TRAIN, **options)


@of_kinds(PRIVATE)
def test_a_rule_that_changes_nothing_changes_nothing(case: Case) -> None:
    chosen = replace(case, algorithm=uniform(case))
    summed, one_by_one = toy_of(chosen), toy_of(chosen, aggregator=UNTOUCHED)
    for _ in range(2):
        assert_close(summed.step(), one_by_one.step(), atol=1e-8)


@of_kinds(PRIVATE)
def test_every_method_goes_on_under_attack(case: Case) -> None:
    attack = AttackConfig(clients=[1], message="sign_flip")
    several = toy_of(replace(case, algorithm=uniform(case)), aggregator=GeometricMedian(), attack=attack, hosts=2)
    one = toy_of(replace(case, algorithm=uniform(case)), aggregator=GeometricMedian(), attack=attack)
    for _ in range(2):
        assert_equal(one.step(), several.step())


def changes(**options: Any) -> tuple[Tree, dict[int, Tree], Tree]:
    """Returns the start, each client's change, and the change of the server's model with all clients."""
    one = toy(FedAvg(aggregation="uniform"), **options)
    start = one.server["model"]
    alone = {k: subtract(toy().step([k])["model"], start) for k in EVERYONE}
    return start, alone, subtract(one.step(EVERYONE)["model"], start)


def test_the_mean_is_of_what_malicious_clients_send() -> None:
    _, own, moved = changes(attack=AttackConfig(clients=[0, 3], message="scaled", strength=5))
    factors = [5 if k in (0, 3) else 1 for k in EVERYONE]
    expected = weighted_sum([own[k] for k in EVERYONE], [factor / len(own) for factor in factors])
    assert_close(moved, expected, atol=1e-9)


def test_reversed_changes_and_those_against_the_honest_mean() -> None:
    _, own, moved = changes(attack=AttackConfig(clients=[2], message="sign_flip"))
    signs = [-1 if k == 2 else 1 for k in EVERYONE]
    assert_close(moved, weighted_sum([own[k] for k in EVERYONE], [sign / len(own) for sign in signs]), atol=1e-9)
    _, own, moved = changes(attack=AttackConfig(clients=[2], message="ipm", strength=0.5))
    honest = len(own) - 1
    shares = [(1 - 0.5 / honest) / len(own) if k != 2 else 0.0 for k in EVERYONE]
    assert_close(moved, weighted_sum([own[k] for k in EVERYONE], shares), atol=1e-9)


def test_a_median_of_three_ignores_one_that_is_far_away() -> None:
    attack = AttackConfig(clients=[1], message="gaussian", strength=1e4)
    start = toy().server["model"]
    trained = {k: toy().step([k])["model"] for k in (0, 2)}
    attacked = toy(aggregator=Median(), attack=attack).step([0, 1, 2])["model"]
    for name, leaf in attacked.items():
        low = torch.minimum(trained[0][name], trained[2][name])
        high = torch.maximum(trained[0][name], trained[2][name])
        assert bool(((low <= leaf) & (leaf <= high)).all()), name
    wild = toy(attack=attack).step([0, 1, 2])["model"]
    assert max(float((wild[name] - start[name]).abs().max()) for name in start) > 1e3


def test_alie_hides_within_the_spread_of_the_honest() -> None:
    attack = AttackConfig(clients=[0], message="alie", strength=1)
    own = [toy().step([k])["model"] for k in (1, 2, 3)]
    mean = weighted_sum(own, [1 / 3] * 3)
    spread = {name: torch.stack([one[name] for one in own]).std(0, correction=0) for name in mean}
    found = toy(FedAvg(aggregation="uniform"), attack=attack).step([0, 1, 2, 3])["model"]
    assert_close(found, {name: mean[name] - spread[name] / 4 for name in mean}, atol=1e-9)


@pytest.mark.parametrize("kind", ["min_max", "min_sum"])
def test_a_message_no_further_than_the_honest_ones_is_sent_by_all_malicious_clients(kind: Any) -> None:
    own = [toy().step([k])["model"] for k in (1, 2, 4)]
    apart = [[float(squared_distance(a, b)) for b in own] for a in own]
    attack = AttackConfig(clients=[0, 3], message=kind, perturbation="sign")
    found = toy(FedAvg(aggregation="uniform"), attack=attack).step(EVERYONE)["model"]
    mean = weighted_sum(own, [1 / 3] * 3)
    sent = weighted_sum([found, mean], [5 / 2, -3 / 2])  # two of five are alike
    reached = [float(squared_distance(sent, one)) for one in own]
    pair = (max(reached), max(map(max, apart))) if kind == "min_max" else (sum(reached), max(map(sum, apart)))
    assert pair[0] == pytest.approx(pair[1], rel=1e-6)
    moved, start = subtract(sent, mean), toy().server["model"]
    for name, change in subtract(mean, start).items():
        assert bool((moved[name].sign() == -change.sign()).all()), name


def test_stacked_clients_send_the_same() -> None:
    attack = AttackConfig(clients=[1, 4], message="gaussian", strength=0.1)
    looped, stacked = (
        toy(aggregator=TrimmedMean(malicious=1), attack=attack, mode=mode) for mode in ("looped", "vectorized")
    )
    for _ in range(2):
        assert_close(looped.step(EVERYONE), stacked.step(EVERYONE), atol=1e-9)


def test_noise_is_another_in_each_round_and_of_each_client() -> None:
    attack = AttackConfig(clients=[0, 1], message="gaussian", strength=1)
    one = toy(FedAvg(aggregation="uniform"), attack=attack)
    seen = []
    for client in (0, 1, 0):
        before = one.server["model"]
        moved = subtract(one.step([client])["model"], before)
        seen.append(torch.cat([leaf.flatten() for leaf in moved.values()]))
    assert float(torch.corrcoef(torch.stack(seen)).fill_diagonal_(0).abs().max()) < 0.5


def test_with_malicious_clients_alone_nobody_is_left_to_hide_among() -> None:
    for attack in (
        AttackConfig(clients=[0, 1], message="ipm", strength=1),
        AttackConfig(clients=[0, 1], message="min_sum"),
    ):
        assert_equal(toy(attack=attack).step([0, 1]), toy(aggregator=Mean()).step([0, 1]))


def test_weights_of_the_method_count_where_the_rule_has_a_place_for_them() -> None:
    bounded, summed = toy(aggregator=UNTOUCHED).step([0, 1]), toy().step([0, 1])
    assert_close(bounded, summed, atol=1e-9)
    middle = toy(aggregator=Median()).step([0, 1])["model"]
    own = [toy().step([k])["model"] for k in (0, 1)]
    assert_close(middle, interpolate(own[0], own[1], 0.5), atol=1e-9)


def test_too_few_messages_end_the_run_with_the_reason() -> None:
    with pytest.raises(ClientError, match=r"round 1, local_update: aggregator=krum needs 5 messages, and 2 have come"):
        toy(aggregator=Krum(malicious=1)).step([0, 1])


@pytest.mark.parametrize("rule", [Mean(), Median()], ids=str)
@pytest.mark.parametrize(
    ("way", "asked"), [("map", "Clients.map"), ("groups", "Clients.means"), ("also", r"Clients.mean\(also=...\)")]
)
def test_other_messages_of_ones_own_method_are_refused(rule: Rule, way: str, asked: str) -> None:
    attack = AttackConfig(clients=[0], message="sign_flip")
    with pytest.raises(MethodError, match=f"selections that go by updates are for means .*; this is {asked}"):
        toy(Talkative(way=way), aggregator=rule, attack=attack).step()
    toy(Talkative(way="twice"), aggregator=rule, attack=attack).step()


class Unlike(FedAvg):
    """One client sends another tensor, or all send one that nobody received."""

    name: Literal["unlike"] = "unlike"  # type: ignore[assignment]
    all_send: bool = False

    def round(self, server: Tree, cohort: Any, clients: Clients) -> Tree:
        return {"model": clients.mean(self.local_update, cohort, broadcast={"model": server["model"]})}

    async def local_update(self, client: Client, model: Tree) -> Any:
        sent = await super().local_update(client, model)
        if self.all_send:
            return replace(sent, tree={"new": torch.zeros(2)})
        first = next(iter(sent.tree))
        return sent if client.id != 2 else replace(sent, tree={first: sent.tree[first]})


def test_messages_that_have_no_mean_together_are_named() -> None:
    with pytest.raises(ClientError, match="client 2 sends other tensors than client 0"):
        toy(Unlike(), aggregator=Median()).step([0, 1, 2])
    with pytest.raises(MethodError, match="local_update sends 'new', which is no change of a tensor"):
        toy(Unlike(all_send=True), aggregator=Median()).step([0, 1, 2])


@pytest.mark.parametrize(
    ("kind", "strength", "message"),
    [
        ("scaled", 1e20, "weighted values are summed exactly up to .*; or lower attack.strength"),
        ("gaussian", 1.7e308, "what client 0 sends is not finite any more"),
    ],
)
def test_a_message_that_leaves_the_range_is_named(kind: Any, strength: float, message: str) -> None:
    attack = AttackConfig(clients=[0], message=kind, strength=strength)
    with pytest.raises(ClientError, match=f"the clients, round 1, local_update: .*{message}"):
        toy(attack=attack).step([0, 1])


@pytest.mark.parametrize(
    ("options", "clients", "message"),
    [
        ({"share": 0.1}, 5, "attack.share is 0.1, which of 5 clients is not a single one"),
        ({"clients": [5]}, 5, "attack.clients: there is no client 5; there are 0 to 4"),
        ({"clients": [0, 1]}, 2, "attack.clients: all clients are malicious"),
    ],
)
def test_who_cannot_be_malicious(options: dict[str, Any], clients: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AttackConfig(message="sign_flip", **options).attackers(clients, RandomStreams(0))


def test_a_share_is_drawn_by_the_seed() -> None:
    attack = AttackConfig(message="sign_flip", share=0.25)
    drawn = [attack.attackers(20, RandomStreams(seed)) for seed in (0, 0, 1)]
    assert [len(one) for one in drawn] == [5, 5, 5] and drawn[0] == drawn[1] != drawn[2]
    assert AttackConfig().attackers(20, RandomStreams(0)) == frozenset()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0.2}, "malicious clients would do nothing"),
        ({"labels": "random"}, "there are none: set attack.share"),
        ({"share": 0.2, "clients": [1], "labels": "random"}, "leave one out"),
        ({"share": 0.2, "labels": "random", "strength": 2}, "strength is of the message"),
        ({"share": 0.2, "message": "min_max", "strength": 2}, "strength is of the message, which finds its own"),
        ({"share": 0.2, "message": "alie", "perturbation": "unit"}, "perturbation is of message=min_max"),
        ({"share": 0.2, "message": "scaled"}, "message=scaled needs attack.strength"),
        ({"clients": [1, 1], "labels": "random"}, "names a client twice"),
    ],
)
def test_options_that_do_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttackConfig(**options)
