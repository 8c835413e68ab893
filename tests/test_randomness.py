"""Random streams are pure functions of their coordinates."""

from __future__ import annotations

import hashlib
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfl.randomness import RandomStreams

SEEDS = st.integers(0, 2**64)
NAMES = st.sampled_from(["init.global", "init.local", "sampling", "batches", "batches.1", "mix", "dropout"])
COORDINATES = st.integers(-1, 10**6)


@given(SEEDS, NAMES, COORDINATES, COORDINATES)
def test_a_stream_starts_again_each_time_it_is_asked_for(seed: int, name: str, round: int, client: int) -> None:
    first = RandomStreams(seed).generator(name, round, client)
    first.random(3)
    again = RandomStreams(seed).generator(name, round, client)
    fresh = RandomStreams(seed).generator(name, round, client)
    np.testing.assert_array_equal(again.random(5), fresh.random(5))
    assert RandomStreams(seed).integer(name, round, client) == RandomStreams(seed).integer(name, round, client)


@given(SEEDS, NAMES, COORDINATES, COORDINATES)
def test_integers_suit_every_library_that_takes_a_seed(seed: int, name: str, round: int, client: int) -> None:
    value = RandomStreams(seed).integer(name, round, client)
    assert 0 <= value < 2**63
    torch.Generator().manual_seed(value)


def test_streams_differ_in_every_coordinate() -> None:
    coordinates = list(itertools.product([0, 1], ["batches", "batches.1", "mix"], [-1, 0, 1, 11], [-1, 0, 1, 11]))
    integers = {RandomStreams(seed).integer(name, t, k) for seed, name, t, k in coordinates}
    draws = {RandomStreams(seed).generator(name, t, k).bytes(16) for seed, name, t, k in coordinates}
    assert len(integers) == len(draws) == len(coordinates)


def test_a_stream_does_not_depend_on_others() -> None:
    streams = RandomStreams(3)
    alone = streams.generator("mix", 2, 5).random(4)
    streams.generator("batches", 2, 5).random(100)
    np.random.default_rng(0).random(3)
    torch.rand(2)
    np.testing.assert_array_equal(streams.generator("mix", 2, 5).random(4), alone)


def test_global_generators_are_left_alone() -> None:
    before = torch.random.get_rng_state()
    RandomStreams(0).generator("batches", 0, 0).permutation(10)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("coordinates", "expected"),
    [(("init.global",), 8891632980725391218), (("batches", 3, 7), 6476790422713847078)],
    ids=["without_coordinates", "of_a_client_in_a_round"],
)
def test_the_numbers_of_a_seed_are_the_same_for_ever(coordinates: tuple[str, int, int], expected: int) -> None:
    """Published results can be made again only while these stand."""
    assert RandomStreams(42).integer(*coordinates) == expected


def test_streams_are_those_of_philox_with_the_digest_as_its_key() -> None:
    digest = hashlib.blake2b(b"7/batches/3/11", digest_size=16).digest()
    expected = np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)))
    found = RandomStreams(7).generator("batches", 3, 11)
    assert np.array_equal(found.integers(0, 2**63, 9), expected.integers(0, 2**63, 9))
    assert np.array_equal(found.permutation(20), expected.permutation(20))
    again = pickle.loads(pickle.dumps(found))
    assert again.random() == found.random() == expected.random()
