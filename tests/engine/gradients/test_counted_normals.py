"""Counted normal numbers: their distribution, what they depend on, and that stacked clients have the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vmap

from rayfl.engine.gradients.counted_normals import drawn_keys, normals, uniforms

COUNT = 200_000


def keys(number: int = 3, seed: int = 0) -> Tensor:
    return torch.from_numpy(drawn_keys(np.random.default_rng(seed), number))


def mixed(number: int) -> int:
    """A word of SplitMix64, in Python's integers."""
    ones = (1 << 64) - 1
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & ones
    number = (number ^ number >> 27) * 0x94D049BB133111EB & ones
    return number ^ number >> 31


def test_numbers_are_those_of_box_and_muller_on_splitmix() -> None:
    key = keys()[0]
    number = sum(int(byte) << 8 * place for place, byte in enumerate(key.tolist()))
    words = [mixed(number + place * 0x9E3779B97F4A7C15 & (1 << 64) - 1) for place in range(3)]
    lengths = [math.sqrt(-2 * math.log(((word >> 32) + 0.5) / 2**32)) for word in words]
    angles = [2 * math.pi * (word & (1 << 32) - 1) / 2**32 for word in words]
    waves = [*map(math.cos, angles), *map(math.sin, angles)]
    expected = [length * wave for length, wave in zip([*lengths, *lengths], waves, strict=True)]
    for count in (5, 6):
        assert normals(key, count).tolist() == pytest.approx(expected[:count], abs=1e-13)


def test_uniform_numbers_are_the_halves_of_splitmix_words() -> None:
    key = keys()[0]
    number = sum(int(byte) << 8 * place for place, byte in enumerate(key.tolist()))
    words = [mixed(number + place * 0x9E3779B97F4A7C15 & (1 << 64) - 1) for place in range(3)]
    halves = [*(word >> 32 for word in words), *(word & (1 << 32) - 1 for word in words)]
    for count in (5, 6):
        assert uniforms(key, count).tolist() == [(half + 0.5) / 2**32 for half in halves[:count]]
    some = keys()
    stacked = vmap(lambda one: uniforms(one, 7))(some)
    assert torch.equal(stacked, torch.stack([uniforms(one, 7) for one in some]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_standard_normal_and_independent(dtype: torch.dtype) -> None:
    one, other = (normals(key.to(dtype), COUNT) for key in keys(2))
    assert one.dtype == dtype
    off = 4 / COUNT**0.5
    ordered = one.double().sort().values
    quantiles = torch.special.ndtr(ordered)
    places = (torch.arange(COUNT) + 0.5) / COUNT
    assert (quantiles - places).abs().max() < 1.95 / COUNT**0.5, "Kolmogorov and Smirnov, at the level 0.001"
    assert abs(one.mean()) < off
    assert abs(one.var() - 1) < 2 * off
    half = COUNT // 2
    for left, right in ((one, other), (one[:-1], one[1:]), (one[:half], one[half:]), (one.square(), other.square())):
        assert abs(float(torch.corrcoef(torch.stack([left, right]))[0, 1])) < off


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stacked_clients_have_the_numbers_of_each_alone(dtype: torch.dtype) -> None:
    some = keys().to(dtype)
    together = vmap(lambda key: normals(key, 101))(some)
    alone = torch.stack([normals(key, 101) for key in some])
    assert (together - alone).abs().max() < 1e-6 * (1 if dtype == torch.float32 else 1e-7)
    assert len({tuple(row) for row in alone.tolist()}) == len(some)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_key_is_the_same_in_every_type(dtype: torch.dtype) -> None:
    key = keys()[0]
    assert torch.equal(key.to(dtype).double(), key)
    assert torch.allclose(normals(key.to(dtype), 50).double(), normals(key, 50), atol=2e-2)
