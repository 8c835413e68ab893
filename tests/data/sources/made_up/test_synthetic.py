"""The data set Synthetic(alpha, beta)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rayfl.data.sources.base import Samples
from rayfl.data.sources.made_up.synthetic import SyntheticSource
from rayfl.randomness import RandomStreams

STREAMS = RandomStreams(5)


def clients(samples: Samples) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and labels of every client."""
    assert samples.clients is not None
    starts = np.unique(samples.clients, return_index=True)[1][1:]
    return list(zip(np.split(samples.x, starts), np.split(samples.y, starts), strict=True))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(2, 5), st.floats(0, 3), st.integers(0, 9))
def test_shapes_and_types(num_clients: int, dimension: int, num_classes: int, alpha: float, seed: int) -> None:
    source = SyntheticSource(alpha=alpha, num_clients=num_clients, dimension=dimension, num_classes=num_classes)
    samples = source.open(RandomStreams(seed))
    assert samples.spec.shape == (dimension,)
    assert samples.spec.num_classes == num_classes
    assert samples.x.shape == (len(samples.y), dimension)
    assert (samples.x.dtype, samples.y.dtype) == (np.float32, np.int64)
    assert set(np.unique(samples.y)) <= set(range(num_classes))
    assert samples.clients is not None
    # Names sort as their numbers do.
    assert list(samples.clients) == sorted(samples.clients)
    names, sizes = np.unique(samples.clients, return_counts=True)
    assert [int(name) for name in names] == list(range(num_clients))
    assert sizes.min() >= 50


def test_a_client_depends_on_the_seed_and_its_own_number_only() -> None:
    few, many = SyntheticSource(num_clients=3).open(STREAMS), SyntheticSource(num_clients=8).open(STREAMS)
    for (x, y), (same_x, same_y) in zip(clients(few), clients(many)[:3], strict=True):
        np.testing.assert_array_equal(x, same_x)
        np.testing.assert_array_equal(y, same_y)
    another = SyntheticSource(num_clients=3).open(RandomStreams(6))
    assert len(another.y) != len(few.y)


def test_sizes_are_lognormal() -> None:
    samples = SyntheticSource(num_clients=400, dimension=1, num_classes=2).open(STREAMS)
    sizes = np.unique(samples.clients, return_counts=True)[1]
    # floor(exp(z)) + 50 with z ~ N(4, 2^2); half a sample is lost to rounding down.
    logarithms = np.log(sizes - 50 + 0.5)
    assert abs(logarithms.mean() - 4) < 0.3
    assert abs(logarithms.std() - 2) < 0.25


def test_inputs_have_the_variances_of_the_paper() -> None:
    large = max((x for x, _ in clients(SyntheticSource(dimension=10).open(STREAMS))), key=len)
    assert len(large) > 2000
    np.testing.assert_allclose(large.var(axis=0), np.arange(1, 11) ** -1.2, rtol=0.2)


@pytest.mark.parametrize("beta", [0.0, 1.0, 5.0])
def test_beta_spreads_the_clients_inputs(beta: float) -> None:
    samples = SyntheticSource(num_clients=300, beta=beta).open(STREAMS)
    centers = np.array([x.mean() for x, _ in clients(samples)])
    # The mean of 60 entries of N(B_k, 1) around 0.
    assert abs(centers.std() / np.sqrt(beta**2 + 1 / 60) - 1) < 0.15


def test_labels_are_linear_and_differ_between_clients() -> None:
    samples = SyntheticSource(alpha=0, beta=0, num_clients=12, dimension=4, num_classes=3).open(STREAMS)
    agreement = []
    for x, y in clients(samples):
        # A linear classifier that is fit to scores can rank as the truth does; here least squares, by class.
        inputs = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        weights = np.linalg.lstsq(inputs, np.eye(3)[y], rcond=None)[0]
        agreement.append(((inputs @ weights).argmax(axis=1) == y).mean())
    assert np.mean(agreement) > 0.85
    first = np.array([np.bincount(y, minlength=3).argmax() for _, y in clients(samples)])
    assert len(set(first)) > 1


def test_iid_clients_share_one_model_and_inputs_around_zero() -> None:
    source = SyntheticSource(iid=True, alpha=0, beta=0, num_clients=20, dimension=3, num_classes=3)
    samples = source.open(STREAMS)
    parts = clients(samples)
    for x, _ in parts:
        assert np.all(np.abs(x.mean(axis=0)) < 5 / np.sqrt(len(x)))
    inputs = np.concatenate([samples.x, np.ones((len(samples.x), 1))], axis=1)
    weights = np.linalg.lstsq(inputs, np.eye(3)[samples.y], rcond=None)[0]
    correct = (inputs @ weights).argmax(axis=1) == samples.y
    # One rule fits every client.
    assert min(correct[samples.clients == name].mean() for name in np.unique(samples.clients)) > 0.7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"iid": True}, "set alpha=0 and beta=0"),
        ({"alpha": -1}, "alpha"),
        ({"beta": float("nan")}, "beta"),
        ({"num_clients": 0}, "num_clients"),
        ({"num_classes": 1}, "num_classes"),
        ({"dimension": 0}, "dimension"),
        ({"gamma": 1}, "gamma"),
    ],
)
def test_impossible_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SyntheticSource.model_validate(fields)
