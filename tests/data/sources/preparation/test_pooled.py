"""Pooled samples as clients, and the digits they can come from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rayfl.data.partitions.base import IIDPartition
from rayfl.data.partitions.holdout import HoldoutConfig, split_client
from rayfl.data.sources.images.digits import DigitsSource
from rayfl.data.sources.preparation.pooled import PooledDataset
from rayfl.errors import DataError
from rayfl.examples import SPLITS, InputSpec
from rayfl.randomness import RandomStreams

SPEC = InputSpec("image", (1, 2, 2), 3)
STREAMS = RandomStreams(5)


def arrays(size: int = 30) -> tuple[np.ndarray, np.ndarray]:
    return (np.arange(size * 4) % 256).astype(np.uint8).reshape(size, 1, 2, 2), np.arange(size) % 3


def pooled(
    x: np.ndarray, y: np.ndarray, parts: list[np.ndarray], spec: InputSpec = SPEC, streams: RandomStreams = STREAMS
) -> PooledDataset:
    return PooledDataset(x, y, spec, parts, HoldoutConfig(), streams)


def test_clients_get_their_own_samples_by_split():
    x, y = arrays()
    parts = [np.arange(0, 20), np.arange(20, 30)]
    dataset = pooled(x, y, parts)
    assert dataset.names == ("0", "1")
    assert dataset.num_clients == 2
    assert dataset.sizes().tolist() == [[15, 1, 4], [8, 0, 2]]
    assert dataset.sizes().dtype == np.int64
    for client, indices in enumerate(parts):
        expected = split_client(indices, HoldoutConfig(), STREAMS.generator("holdout", client=client))
        loaded = dataset.load(client)
        assert set(loaded) == set(SPLITS)
        for split, examples in loaded.items():
            assert examples.x.dtype == torch.float32
            assert examples.x.shape == (len(expected[split]), 1, 2, 2)
            assert torch.equal(examples.x, torch.from_numpy(x[expected[split]]).float().div(255))
            assert torch.equal(examples.y, torch.from_numpy(y[expected[split]]))


def test_float_inputs_stay_as_they_are_and_are_copied():
    x, y = np.full((10, 1, 2, 2), 0.3, np.float32), np.zeros(10, np.int64)
    x.setflags(write=False)
    examples = pooled(x, y, [np.arange(10)]).load(0)["train"]
    examples.x.add_(1)
    examples.y.add_(1)
    assert (x == np.float32(0.3)).all()
    assert not y.any()


def test_the_holdout_of_a_client_depends_on_the_seed_and_the_client_only():
    x, y = arrays()
    whole = np.arange(30)
    alone = pooled(x, y, [whole]).load(0)["test"].x
    assert torch.equal(alone, pooled(x, y, [whole, whole]).load(0)["test"].x)
    assert not torch.equal(alone, pooled(x, y, [whole, whole]).load(1)["test"].x)
    assert not torch.equal(alone, pooled(x, y, [whole], streams=RandomStreams(6)).load(0)["test"].x)


X, Y = arrays()


@pytest.mark.parametrize(
    ("x", "y", "parts", "message"),
    [
        (X.astype(np.float64), Y, [np.arange(30)], "type float64"),
        (X, Y.astype(np.int32), [np.arange(30)], "type int32"),
        (X.reshape(30, 4), Y, [np.arange(30)], r"shape \(30, 4\)"),
        (X, Y[:-1], [np.arange(29)], r"y \(29,\)"),
        (X, Y + 1, [np.arange(30)], "labels from 1 to 3"),
        (X, Y - 1, [np.arange(30)], "labels from -1 to 1"),
        (X, Y, [np.arange(30), np.arange(31)], "client 1: an index is outside"),
        (X, Y, [np.arange(-1, 3)], "client 0: an index is outside"),
        (X, Y, [np.arange(30), np.arange(0)], "client 1: a client with 0 samples"),
    ],
)
def test_unfit_arrays_are_refused(x, y, parts, message):
    with pytest.raises(DataError, match=message):
        pooled(x, y, parts)


def test_digits_can_be_divided():
    digits = DigitsSource().open()
    x, y, spec = digits.x, digits.y, digits.spec
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((1797, 1, 8, 8), np.float32, (1797,), np.int64)
    assert (x.min(), x.max()) == (0, 1)
    assert (spec.kind, spec.shape, spec.num_classes, spec.vocabulary) == ("image", (1, 8, 8), 10, 0)
    dataset = pooled(x, y, IIDPartition(num_clients=10).assign(y, STREAMS), spec)
    assert dataset.sizes().sum() == 1797
