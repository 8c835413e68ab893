"""Label noise: the transition matrices, the frequencies, and who is spared."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rayfl.data.partitions.base import IIDPartition
from rayfl.data.partitions.holdout import HoldoutConfig
from rayfl.data.partitions.noise import LabelNoise
from rayfl.data.sources.preparation.pooled import PooledDataset
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.randomness import RandomStreams

KINDS = pytest.mark.parametrize("kind", ["pair", "symmetric"])


@KINDS
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.4, 0.6, 1.0])
def test_transition_matrices(kind: str, ratio: float) -> None:
    matrix = LabelNoise(kind=kind, ratio=ratio).transitions(10)  # type: ignore[arg-type]
    assert np.allclose(matrix.sum(1), 1)
    ones = np.ones((10, 10))
    expected = {
        "pair": (1 - ratio) * np.eye(10) + ratio * np.eye(10)[:, (np.arange(10) - 1) % 10],
        "symmetric": (1 - ratio * 10 / 9) * np.eye(10) + ratio / 9 * ones,
    }[kind]
    assert np.allclose(matrix, expected)
    if kind == "pair":
        assert matrix[3, 4] == ratio and matrix[9, 0] == ratio


@KINDS
def test_frequencies_are_those_of_the_matrix(kind: str) -> None:
    noise = LabelNoise(kind=kind, ratio=0.4)  # type: ignore[arg-type]
    labels = np.repeat(np.arange(5), 20_000)
    noisy = noise.corrupt(labels, 5, np.random.default_rng(0))
    found = np.array([np.bincount(noisy[labels == c], minlength=5) for c in range(5)]) / 20_000
    bound = 5 * np.sqrt(0.25 / 20_000)
    assert np.abs(found - noise.transitions(5)).max() < bound
    assert np.array_equal(labels, np.repeat(np.arange(5), 20_000))


def test_no_noise_changes_nothing() -> None:
    labels = np.arange(100) % 7
    for noise in (LabelNoise(), LabelNoise(kind="pair", ratio=0)):
        assert np.array_equal(noise.corrupt(labels, 7, np.random.default_rng(0)), labels)
        assert not noise.active
    for options in ({"ratio": 0.5}, {"legacy": True}, {"clients": 0.5}):
        with pytest.raises(ValueError, match="does nothing with kind=none: set kind=pair"):
            LabelNoise.model_validate(options)


def test_legacy_swaps_the_kinds_and_reaches_the_test_part() -> None:
    plain = LabelNoise(kind="symmetric", ratio=0.6)
    legacy = LabelNoise(kind="pair", ratio=0.6, legacy=True)
    assert np.array_equal(plain.transitions(10), legacy.transitions(10))
    assert (plain.in_test, legacy.in_test) == (False, True)


def dataset(noise: LabelNoise, clients: int = 4, seed: int = 0) -> PooledDataset:
    generator = np.random.default_rng(0)
    x = generator.random((400, 1, 2, 2)).astype(np.float32)
    y = (np.arange(400) % 5).astype(np.int64)
    streams = RandomStreams(seed)
    parts = IIDPartition(num_clients=clients).assign(y, streams)
    spec = InputSpec("image", (1, 2, 2), 5)
    return PooledDataset(x, y, spec, parts, HoldoutConfig(test=0.2, validation=0.2), streams, noise)


@pytest.mark.parametrize("legacy", [False, True])
def test_train_and_validation_parts_are_noisy_and_test_parts_clean(legacy: bool) -> None:
    clean, noisy = dataset(LabelNoise()), dataset(LabelNoise(kind="pair", ratio=0.5, legacy=legacy))
    changed = dict.fromkeys(("train", "validation", "test"), 0.0)
    for client in range(4):
        before, after = clean.load(client), noisy.load(client)
        for split in changed:
            assert torch.equal(before[split].x, after[split].x)
            changed[split] += float((before[split].y != after[split].y).float().mean()) / 4
    assert 0.35 < changed["train"] < 0.65
    assert 0.2 < changed["validation"] < 0.8
    assert (0.2 < changed["test"] < 0.8) if legacy else changed["test"] == 0


@pytest.mark.parametrize("legacy", [False, True])
def test_only_some_clients_have_wrong_labels(legacy: bool) -> None:
    noise = LabelNoise(kind="pair", ratio=0.5, clients=0.5, legacy=legacy)
    clean, everybody = dataset(LabelNoise()), dataset(noise.model_copy(update={"clients": 1.0}))
    found = dataset(noise)
    owners = noise.owners(4, RandomStreams(0))
    assert len(owners) == 2 and owners != noise.owners(4, RandomStreams(1))
    for client in range(4):
        like = everybody if client in owners else clean
        for split, labels in found.labels(client).items():
            assert np.array_equal(labels, like.labels(client)[split])
            assert np.array_equal(labels, found.load(client)[split].y.numpy())


def test_a_share_of_no_client_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"noise\.clients is 0\.2, which of 4 clients is not a single one"):
        dataset(LabelNoise(kind="pair", ratio=0.5, clients=0.2))
    assert LabelNoise(kind="pair", clients=0.2).owners(4, RandomStreams(0)) == frozenset()
    assert len(LabelNoise(kind="pair", ratio=1, clients=0.29).owners(100, RandomStreams(0))) == 29


def test_noise_does_not_depend_on_the_owner() -> None:
    noise = LabelNoise(kind="symmetric", ratio=0.5)
    wrong = []
    for clients in (2, 8):
        data = dataset(noise, clients)
        labels = np.full(400, -1)
        for client in range(clients):
            for split in ("train", "validation"):
                labels[data.places(client)[split]] = data.load(client)[split].y.numpy()
        wrong.append(labels)
    both = (wrong[0] >= 0) & (wrong[1] >= 0)
    assert both.sum() > 200
    assert np.array_equal(wrong[0][both], wrong[1][both])
