"""RoLoRA: an oracle in plain PyTorch, exact means, FFA-LoRA as its limit, what travels, privacy, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.rolora import RoLoRA
from rayfl.errors import ConfigError
from rayfl.messages.privacy import PrivacyConfig
from rayfl.params import Tree, num_bytes, subtract
from tests.support.adapted import TRAIN as IMAGES_TRAIN
from tests.support.adapted import adapted_toy
from tests.support.low_rank_toys import (
    COHORTS,
    SHAPES,
    SIZES,
    low_rank_toy,
    mean,
    mean_product,
    shares_of,
    trained_alone,
)
from tests.support.toys import assert_close, assert_equal

HEAD = ("head.weight", "head.bias")
FACTORS = {part: tuple(f"{site}.lora_{part}.weight" for site in SHAPES) for part in "AB"}


@pytest.mark.parametrize("weights", ["samples", "uniform", "population"])
@pytest.mark.parametrize(("options", "order"), [({}, "BABAB"), ({"b_rounds": 2}, "BBABB"), ({"a_rounds": 2}, "BAABA")])
def test_inv_rolora_1_rounds_are_those_of_an_oracle_in_plain_pytorch(options: Any, order: str, weights: Any) -> None:
    toy = low_rank_toy(RoLoRA(aggregation=weights, **options))
    model = dict(toy.server["model"])
    for round, (cohort, part) in enumerate(zip(COHORTS, order, strict=True)):
        names = (*FACTORS[part], *HEAD)
        sent = [trained_alone(toy, model, names, client, round) for client in cohort]
        shares = shares_of(cohort, weights)
        if weights == "population":
            shares = [SIZES[client] / sum(SIZES) for client in cohort]
            sent, shares = [*sent, model], [*shares, 1 - sum(shares)]
        before = dict(toy.server["model"])
        model = {**model, **{name: mean(sent, shares, name) for name in names}}
        for site in SHAPES:  # the mean of products is the product of means
            assert_close(mean_product([model], [1.0], site), mean_product(sent, shares, site), 1e-14)
        assert_close(toy.step(cohort)["model"], model, 1e-12)
        other = FACTORS["A" if part == "B" else "B"]
        assert all(torch.equal(toy.server["model"][name], before[name]) for name in other)
    assert all(bool(model[name].any()) for name in FACTORS["B"])


def test_inv_rolora_2_where_a_is_never_trained_it_is_ffa_lora_to_the_bit() -> None:
    model = {"adapter": {"r": 3, "alpha": 6, "trains": ["b"]}}
    own, ffa = adapted_toy(RoLoRA(a_rounds=0)), adapted_toy(FedAvg(), model=model)
    ffa.task.network.settle(ffa.context.streams.integer("init.global"))
    begun = dict(own.server["model"])
    found, expected = own.run()["model"], ffa.run()["model"]
    assert_equal({name: found[name] for name in expected}, expected)
    assert all(torch.equal(found[name], begun[name]) for name in begun if name not in expected)


def test_inv_rolora_3_a_round_of_one_factor_is_federated_averaging_of_it() -> None:
    """Where a cohort is one client, both rounds are local training of one factor; the other and its gradient stay."""
    toy = low_rank_toy(RoLoRA())
    for round, part in enumerate("BABA"):
        before = dict(toy.server["model"])
        names = (*FACTORS[part], *HEAD)
        assert_close(toy.step([round])["model"], trained_alone(toy, before, names, round, round), 1e-13)


def test_inv_rolora_4_the_moving_factor_moves_the_model_linearly() -> None:
    """Between two rounds the layer moves by s (B' - B) A, and then by s B' (A' - A)."""
    toy = low_rank_toy(RoLoRA())
    toy.step([0, 1])
    first = dict(toy.server["model"])
    second = dict(toy.step([2, 3])["model"])
    for site in SHAPES:
        moved = mean_product([second], [1.0], site) - mean_product([first], [1.0], site)
        a, b = f"{site}.lora_A.weight", f"{site}.lora_B.weight"
        assert_close(moved, first[b] @ (second[a] - first[a]), 1e-14)
        assert float(moved.abs().max()) > 1e-6


@pytest.mark.parametrize("options", [{}, {"b_rounds": 2}])
@pytest.mark.first_case
def test_stacked_is_looped_and_hosts_make_no_difference(options: Any) -> None:
    method = RoLoRA(**options)
    one, other, many = adapted_toy(method), adapted_toy(method, "vectorized"), adapted_toy(method, hosts=3)
    found = one.run()
    assert_close(found, other.run(), 1e-5)
    assert_equal(found, many.run())
    scores = other.scores()
    for client, own in one.scores().items():
        assert set(own) == {"global"} and abs(own["global"].loss - scores[client]["global"].loss) < 1e-5
    double, stacked = low_rank_toy(method), low_rank_toy(method, "vectorized")
    for cohort in COHORTS:
        assert_close(double.step(cohort), stacked.step(cohort), 1e-10)


def test_up_goes_one_factor_and_the_head() -> None:
    toy = low_rank_toy(RoLoRA())
    whole = num_bytes(toy.server["model"])
    for part in "BA":
        toy.step([1, 3])
        up = num_bytes({name: toy.server["model"][name] for name in (*FACTORS[part], *HEAD)})
        assert toy.federation.traffic.by_client == dict.fromkeys([1, 3], (whole, up))
    assert not any(toy.states().values())


def test_a_private_round_moves_one_factor_and_the_head_by_the_bound_at_most() -> None:
    method = RoLoRA(aggregation="uniform")
    free, wide = (low_rank_toy(method, privacy=PrivacyConfig(clip_norm=norm)) for norm in (None, 1e6))
    tight = low_rank_toy(method, privacy=PrivacyConfig(clip_norm=0.01, noise_multiplier=0.1))
    for part in "BA":
        assert_close(free.step([0, 1])["model"], wide.step([0, 1])["model"], 1e-8)
        before: Tree = dict(tight.server["model"])
        moved = subtract(tight.step([0, 1])["model"], before)
        assert {name for name, leaf in moved.items() if leaf.any()} == {*FACTORS[part], *HEAD}


def test_newcomers_have_the_server_s_model() -> None:
    toy = adapted_toy(RoLoRA(), unseen=1)
    toy.run()
    assert set(toy.scores(newcomers=True)[3]) == {"global"}


def test_what_cannot_work_is_refused() -> None:
    toy = adapted_toy(RoLoRA(), train=IMAGES_TRAIN.model_copy(update={"persist_optimizer": True}))
    with pytest.raises(
        ConfigError, match=r"rolora needs train\.persist_optimizer=false: the next round trains another"
    ):
        RoLoRA().check(toy.task, toy.context)
    for options in ({"b_rounds": 0}, {"a_rounds": -1}):
        with pytest.raises(ValueError, match="rounds"):
            RoLoRA(**options)
