"""A client's own division into train, validation and test."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rayfl.data.partitions.holdout import HoldoutConfig, split_client
from rayfl.errors import DataError


def split(size: int, seed: int = 0, **fractions: float) -> dict[str, np.ndarray]:
    return split_client(np.arange(size) * 3, HoldoutConfig(**fractions), np.random.default_rng(seed))


@given(st.integers(1, 300), st.floats(0, 0.99), st.floats(0, 0.99), st.integers(0, 5))
def test_parts_are_sorted_disjoint_and_complete(size, test, validation, seed):
    parts = split(size, seed, test=test, validation=validation)
    assert list(parts) == ["train", "validation", "test"]
    assert np.array_equal(np.sort(np.concatenate(list(parts.values()))), np.arange(size) * 3)
    assert all((np.diff(part) > 0).all() for part in parts.values())
    assert len(parts["train"]) >= 1
    again = split(size, seed, test=test, validation=validation)
    assert all(np.array_equal(parts[name], again[name]) for name in parts)


@pytest.mark.parametrize("size", [1, 10, 50, 99, 100, 600, 1200])
def test_sizes_follow_decimal_arithmetic(size):
    for percent in range(100):
        parts = split(size, test=percent / 100, validation=0.1)
        num_test = percent * size // 100
        num_validation = (size - num_test) // 10
        assert [len(parts[name]) for name in ("train", "validation", "test")] == [
            size - num_test - num_validation,
            num_validation,
            num_test,
        ]


def test_float_noise_does_not_lose_a_sample():
    assert 0.29 * 100 < 29
    assert len(split(100, test=0.29, validation=0.0)["test"]) == 29
    assert len(split(100, test=0.0, validation=0.29)["validation"]) == 29


def test_defaults_are_a_fifth_and_a_tenth_of_the_rest():
    assert {name: len(part) for name, part in split(100).items()} == {"train": 72, "validation": 8, "test": 20}


def test_parts_depend_on_the_generator():
    assert not np.array_equal(split(100, seed=0)["test"], split(100, seed=1)["test"])


def test_nothing_to_train_on_names_the_size():
    with pytest.raises(DataError, match="a client with 0 samples"):
        split(0)
    with pytest.raises(DataError, match="a client with 5 samples"):
        split(5, test=1 - 1e-12)


@pytest.mark.parametrize(
    "fields", [{"test": 1.0}, {"test": -0.1}, {"validation": 1.0}, {"validation": -0.1}, {"typo": 0}]
)
def test_bad_fractions_are_refused(fields):
    with pytest.raises(ValidationError):
        HoldoutConfig(**fields)
