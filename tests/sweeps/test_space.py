from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayfl.errors import ConfigError
from rayfl.sweeps.space import parse_space


def points(*overrides: str, samples: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    return parse_space(overrides).points(samples, seed)


def test_lists_and_ranges_are_combined_the_first_slowest() -> None:
    assert points("algorithm=fedavg,floco", "seed=0:2", "train.rounds=5") == [
        {"algorithm": "fedavg", "seed": 0, "train.rounds": 5},
        {"algorithm": "fedavg", "seed": 1, "train.rounds": 5},
        {"algorithm": "floco", "seed": 0, "train.rounds": 5},
        {"algorithm": "floco", "seed": 1, "train.rounds": 5},
    ]
    assert [point["seed"] for point in points("seed=0:6:2,10,20:22")] == [0, 2, 4, 10, 20, 21]
    assert parse_space(["a=1,2", "b=3"]).varied == ("a",)


def test_what_is_bracketed_or_quoted_is_one_value() -> None:
    assert points("model.hidden=[12, 8],[4]") == [{"model.hidden": [12, 8]}, {"model.hidden": [4]}]
    assert points("algorithm={name: ditto, unseen: global}") == [{"algorithm": {"name": "ditto", "unseen": "global"}}]
    assert points("a='x,y','1:2'") == [{"a": "x,y"}, {"a": "1:2"}]
    assert points("a=null,true") == [{"a": None}, {"a": True}]


def test_numbers_with_an_exponent_are_numbers() -> None:
    assert points("train.lr=1e-3,1E2,.5e1") == [{"train.lr": 0.001}, {"train.lr": 100.0}, {"train.lr": 5.0}]
    assert points("name='1e3'") == [{"name": "1e3"}]
    assert 0.001 <= points("train.lr=log(1e-3, 1e-1)", samples=1)[0]["train.lr"] <= 0.1
    with pytest.raises(ConfigError, match="a value twice"):
        points("train.lr=0.001,1e-3")


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=40)
@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=5, unique=True), st.integers(1, 4), st.integers(0, 9))
def test_every_combination_with_every_sample(values: list[int], samples: int, seed: int) -> None:
    drawn = points(f"a={','.join(map(str, values))}", "lr=log(0.001, 0.1)", samples=samples, seed=seed)
    assert [point["a"] for point in drawn] == values * samples
    rates = [point["lr"] for point in drawn]
    assert all(0.001 <= rate <= 0.1 for rate in rates)
    # a sample is the same for all combinations, so that they can be compared
    assert [len({*rates[n * len(values) : (n + 1) * len(values)]}) for n in range(samples)] == [1] * samples
    assert (
        points(f"a={','.join(map(str, values))}", "lr=log(0.001, 0.1)", samples=samples + 1, seed=seed)[: len(drawn)]
        == drawn
    )


def test_draws_follow_their_distributions() -> None:
    drawn = points("lr=log(0.001, 0.1)", "momentum=uniform(0, 0.8)", "train.batch_size=choice(10, 20)", samples=400)
    below = sum(point["lr"] < 0.01 for point in drawn)
    assert 160 < below < 240  # half of the logarithm's range
    assert 0.35 < sum(point["momentum"] for point in drawn) / 400 < 0.45
    assert {point["train.batch_size"] for point in drawn} == {10, 20}
    assert all(math.isclose(point["lr"], float(f"{point['lr']:.6g}")) for point in drawn)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed"], "must look like"),
        (["a=1", "a=2"], "given twice"),
        (["a=1,1"], "a value twice"),
        (["a=1,,2"], "between two commas"),
        (["a=1,2,"], "after the last"),
        (["a=[1,2"], "] is missing"),
        (["a='x"], "' is missing"),
        (["seed=5:2"], "goes from a up to b - 1"),
        (["lr=log(0,1)"], "above 0"),
        (["lr=uniform(2,1)"], "the lower one first"),
        (["lr=uniform(1)"], "two numbers"),
        (["a=choice(1)"], "two values or more"),
        (["name=a,b"], "nothing to compare"),
        (["cluster.num_actors=1,2"], "nothing to compare"),
    ],
)
def test_what_cannot_be_read_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")) as error:
        parse_space(overrides)
    assert overrides[-1].partition("=")[0] in str(error.value)


def test_samples_belong_to_draws() -> None:
    with pytest.raises(ConfigError, match="how often with --samples"):
        points("lr=log(0.1,1)")
    with pytest.raises(ConfigError, match="a value that is drawn"):
        points("seed=0:2", samples=3)
    with pytest.raises(ConfigError, match="at least 1"):
        points("lr=log(0.1,1)", samples=0)
    with pytest.raises(ConfigError, match="more than 100000"):
        points("a=0:1000", "b=0:1000")
