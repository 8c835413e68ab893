"""Which methods can be made private by clipping and noise, and that their messages are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from algorithms.base import Algorithm, Averaging
from algorithms.clients import Clients
from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from algorithms.registry import METHODS
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.errors import ClientError, MethodError
from rayfl.messages.privacy import PrivacyConfig
from rayfl.params import Tree, leaves, subtract
from tests.support.cases import ALGORITHMS, TRAIN, of_kinds, toy_of
from tests.support.cases.base import SIZES, Case
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

PRIVATE = {name: case for name, case in ALGORITHMS.items() if not case.algorithm.no_privacy}
WIDE = PrivacyConfig(clip_norm=1e6)


def uniform(case: Case) -> Any:
    has = "aggregation" in type(case.algorithm).model_fields
    return case.algorithm.model_copy(update={"aggregation": "uniform"} if has else {})


def toy(algorithm: Algorithm, privacy: PrivacyConfig, **options: Any) -> Toy:
    return Toy(
        algorithm,
        random_clients(SIZES, dtype=torch.float64),
        two_layers(double=True),
        TRAIN,
        privacy=privacy,
        **options,
    )


def norm(tree: Tree) -> float:
    return math.sqrt(sum(float(leaf.square().sum()) for _, leaf in leaves(tree)))


def test_methods_say_why_not() -> None:
    with_a_reason = {name for name, method in METHODS.items() if method.no_privacy}
    said = f"{len(METHODS) - len(with_a_reason)} of the {len(METHODS)} can be private"
    assert said in (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
    assert {"floco", "fedproto", "scaffold", "fedmd", "local"} <= with_a_reason
    assert not {"fedavg", "superfed", "ditto", "fedper", "fedphp", "fedadam"} & with_a_reason


@of_kinds(PRIVATE)
def test_limits_that_bind_nobody_change_nothing(case: Case) -> None:
    chosen = replace(case, algorithm=uniform(case))
    free, limited = toy_of(chosen), toy_of(chosen, privacy=WIDE)
    for _ in range(2):
        assert_close(free.step(), limited.step(), atol=1e-8)


def test_what_stays_with_a_client_is_no_part_of_its_message() -> None:
    train = TRAIN.model_copy(update={"batch_size": 3, "private_norm": "statistics"})
    case = Case(FedAvg(aggregation="uniform"))
    free, limited = (toy_of(case, task=normalized_layers(), train=train, **one) for one in ({}, {"privacy": WIDE}))
    for _ in range(2):
        assert_close(free.step(), limited.step(), atol=1e-8)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_the_server_moves_by_the_bound_at_most(mode: str) -> None:
    one = toy(Ditto(aggregation="uniform"), PrivacyConfig(clip_norm=0.01), mode=mode)
    before = one.server["model"]
    moved = norm(subtract(one.step()["model"], before))
    assert 0 < moved <= 0.01 * (1 + 1e-12)


def test_a_client_counts_as_much_as_its_clipped_change_over_the_expected_number() -> None:
    bound = 0.05
    one = toy(FedAvg(aggregation="uniform"), PrivacyConfig(clip_norm=bound))
    start = one.server["model"]
    changes = []
    for client in (0, 2, 4):
        alone = toy(FedAvg(aggregation="uniform"), PrivacyConfig())
        changes.append(subtract(alone.step([client])["model"], start))
    factors = [min(1, bound / norm(change)) for change in changes]
    assert min(factors) < 1
    expected = {
        name: leaf + sum(factor * change[name] for factor, change in zip(factors, changes, strict=True)) / 3
        for name, leaf in start.items()
    }
    assert_close(one.step([0, 2, 4])["model"], expected, atol=1e-10)
    two = toy(FedAvg(aggregation="uniform"), PrivacyConfig(clip_norm=bound))
    expected = {name: leaf + factors[0] * changes[0][name] / 3 for name, leaf in start.items()}
    assert_close(two.step([0])["model"], expected, atol=1e-10)


def test_noise_is_of_the_round_and_the_same_on_any_number_of_hosts() -> None:
    limited = PrivacyConfig(clip_norm=0.1)
    noisy = limited.model_copy(update={"noise_multiplier": 1.0})
    method = FedAvg(aggregation="uniform")
    quiet = toy(method, limited).step()["model"]
    one, several = (toy(method, noisy, hosts=hosts) for hosts in (1, 3))
    first, second = one.step()["model"], one.step()["model"]
    assert_equal(first, several.step()["model"])
    assert_equal(second, several.step()["model"])
    drawn = torch.cat([leaf.flatten() for _, leaf in leaves(subtract(first, quiet))])
    assert float(drawn.std()) == pytest.approx(0.1 / 3, rel=0.25)
    again = torch.cat([leaf.flatten() for _, leaf in leaves(subtract(second, first))])
    assert abs(float(torch.corrcoef(torch.stack([drawn, again]))[0, 1])) < 0.5  # other noise in another round


class Talkative(Averaging):
    """Sends what is not private, in one of several ways."""

    name: Literal["talkative"] = "talkative"
    aggregation: Literal["samples", "uniform", "population"] = "uniform"
    way: str = "map"

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        sent = {"model": server["model"]}
        if self.way == "map":
            clients.map(self.one_by_one, cohort, sent)
        if self.way == "twice":
            clients.mean(self.local_update, cohort, sent)
        if self.way == "groups":
            clients.means(self.local_update, cohort, sent)
        if self.way == "others":
            cohort = [*cohort, 2]
        also = Weighted(server["model"], 1) if self.way == "also" else None
        return {"model": clients.mean(self.local_update, cohort, sent, also=also)}

    async def one_by_one(self, client: Client, model: Tree) -> Tree:
        return model

    def weighted(self, client: Client, tree: Tree) -> Weighted:
        return Weighted(tree, client.num_samples if self.way == "weights" else 1)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("map", r"this is Clients.map, call 1 of the round"),
        ("twice", r"this is Clients.mean, call 2 of the round"),
        ("groups", r"this is Clients.means, call 1"),
        ("also", r"this is Clients.mean\(also=...\), call 1"),
    ],
)
def test_other_messages_of_ones_own_method_are_refused(way: str, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        toy(Talkative(way=way), WIDE).step()
    toy(Talkative(way=way), PrivacyConfig()).step()


def test_clients_that_were_not_sampled_are_not_asked() -> None:
    """What is promised counts who was sampled; where that is not known, nothing is checked."""
    one, method = toy(Talkative(way="others"), WIDE), Talkative(way="others")
    for asked, refused in (([0, 1], True), ([0, 1, 2], False), ([], False)):
        one.federation.begin_round(0, asked=asked)
        if refused:
            with pytest.raises(
                MethodError, match=r"privacy: local_update is asked of client 2, who is not of the round"
            ):
                one.federation.play(method, one.server, [0, 1])
        else:
            one.federation.play(method, one.server, [0, 1])


def test_weights_of_ones_own_method_are_refused() -> None:
    with pytest.raises(ClientError, match=r"privacy: local_update returns a weight of 9"):
        toy(Talkative(way="weights"), WIDE).step([0])
