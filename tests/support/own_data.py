"""Users' own data, named in configurations as tests.support.own_data:<function>."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rayfl.data.federated import FederatedDataset
from rayfl.data.partitions.base import IIDPartition
from rayfl.data.partitions.holdout import HoldoutConfig
from rayfl.data.sources.preparation.pooled import PooledDataset
from rayfl.examples import Examples, InputSpec
from rayfl.randomness import RandomStreams


def from_streams(streams: RandomStreams) -> tuple[Any, ...]:
    generator = streams.generator("own")
    return generator.normal(size=(40, 6)), generator.integers(0, 3, 40), 3


def from_seed(seed: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return torch.full((40, 1, 2, 2), seed, dtype=torch.uint8), torch.arange(40) % 4, 4


def with_many_clients(seed: int) -> Any:
    owner = np.random.default_rng(seed).permutation(np.repeat(np.arange(500), 4))
    return np.ones((2000, 6), np.float32), owner % 3, 3, owner


def with_clients(streams: RandomStreams) -> tuple[Any, ...]:
    x, y, num_classes = from_streams(streams)
    return x, y, num_classes, ["zoe" if row % 4 else "ann" for row in range(40)]


def whole(streams: RandomStreams) -> FederatedDataset:
    x, y, num_classes = from_streams(streams)
    parts = IIDPartition(num_clients=5).assign(y, streams)
    spec = InputSpec("image", (6,), num_classes)
    return PooledDataset(x.astype(np.float32), y, spec, parts, HoldoutConfig(), streams)


def without_training(streams: RandomStreams) -> FederatedDataset:
    """Four clients, of whom the second has test samples alone."""

    class Own(FederatedDataset):
        spec, names = InputSpec("image", (6,), 3), ("ann", "bob", "cyd", "dan")

        def sizes(self) -> np.ndarray:
            return np.array([[9, 2, 3], [0, 0, 3], [9, 2, 3], [9, 2, 3]])

        def load(self, client: int) -> Mapping[str, Examples]:
            raise AssertionError("it is refused before")

    return Own()


def failing(streams: RandomStreams) -> None:
    raise KeyError("no such thing")


def nothing(streams: RandomStreams) -> None:
    return None


def bad_x(streams: RandomStreams) -> tuple[Any, ...]:
    return np.zeros((4, 2), dtype=np.int64), np.zeros(4, dtype=np.int64), 2


def bad_y(streams: RandomStreams) -> tuple[Any, ...]:
    return np.zeros((4, 2), dtype=np.float32), np.zeros(3, dtype=np.int64), 2


def bad_classes(streams: RandomStreams) -> tuple[Any, ...]:
    return np.zeros((4, 2), dtype=np.float32), np.zeros(4, dtype=np.int64), 0


def bad_labels(streams: RandomStreams) -> tuple[Any, ...]:
    return np.zeros((4, 2), dtype=np.float32), np.full(4, 5), 2


def ragged(streams: RandomStreams) -> tuple[Any, ...]:
    return [[1.0, 2.0], [1.0]], np.zeros(2, dtype=np.int64), 2


def words(streams: RandomStreams) -> tuple[Any, ...]:
    return np.zeros((2, 2), dtype=np.float32), ["yes", "no"], 2


def bad_clients(streams: RandomStreams) -> tuple[Any, ...]:
    return np.zeros((4, 2), dtype=np.float32), np.zeros(4, dtype=np.int64), 2, ["ann"]


def texts(streams: RandomStreams) -> tuple[Any, ...]:
    """Texts of 1 to 12 tokens with their lengths, of four clients; the class is that of the first token."""
    generator = streams.generator("texts")
    lengths = np.where(generator.random(120) < 0.9, generator.integers(1, 5, 120), 12)
    tokens = generator.integers(0, 8, (120, 12))
    return (tokens, lengths), tokens[:, 0] // 4, 2, np.arange(120) % 4


def bad_lengths(streams: RandomStreams) -> tuple[Any, ...]:
    (tokens, lengths), y, classes, clients = texts(streams)
    return (tokens, np.where(np.arange(120) == 7, 13, lengths)), y, classes, clients


def few_lengths(streams: RandomStreams) -> tuple[Any, ...]:
    (tokens, lengths), y, classes, clients = texts(streams)
    return (tokens, lengths[1:]), y, classes, clients


def three_inputs(streams: RandomStreams) -> tuple[Any, ...]:
    (tokens, lengths), y, classes, clients = texts(streams)
    return (tokens, lengths, lengths), y, classes, clients


def left_padded(streams: RandomStreams) -> tuple[Any, ...]:
    return np.array([[0, 0, 3], [0, 2, 1], [4, 2, 0]] * 4), np.array([0, 1, 0] * 4), 2


def of_no_samples(seed: int) -> Any:
    return np.zeros((0, 4)), np.zeros(0, int), 2


def of_a_network(seed: int) -> Any:
    """Features that a network has computed are tensors that autograd follows, in its precision."""
    x = torch.arange(24.0).reshape(12, 2).requires_grad_()
    return x.to(torch.bfloat16), torch.arange(12) % 3, 3
