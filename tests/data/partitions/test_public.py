"""Public samples: taken out of the train parts, nothing twice, nothing lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rayfl.data.partitions.holdout import HoldoutConfig
from rayfl.data.partitions.public import draw_public
from rayfl.data.sources.natural import NaturalDataset, NaturalHeader, write_natural
from rayfl.data.sources.preparation.pooled import PooledDataset
from rayfl.errors import DataError
from rayfl.examples import SPLITS, InputSpec
from rayfl.randomness import RandomStreams

STREAMS = RandomStreams(3)
SPEC = InputSpec("image", (1,), 2)
TOKENS = NaturalHeader(kind="toy", input="tokens", shape=(2,), num_classes=200, vocabulary=200)
PARTS = [np.arange(0, 40), np.arange(40, 52), np.arange(52, 100)]


def pooled(public: int, streams: RandomStreams = STREAMS, validation: float = 0.2) -> PooledDataset:
    """100 samples, whose input is their number, of three clients."""
    x, y = np.arange(100, dtype=np.float32)[:, None], np.arange(100, dtype=np.int64) % 2
    return PooledDataset(x, y, SPEC, PARTS, HoldoutConfig(test=0.25, validation=validation, public=public), streams)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three clients with 30, 8 and 20 train and 4 test samples each; input and label are the sample's number."""
    path, number, groups = tmp_path_factory.mktemp("natural") / "f.parquet", 0, []
    for client, train in (("ann", 30), ("bob", 8), ("eve", 20)):
        numbers = range(number, number + train + 4)
        content = {
            "client": [client] * len(numbers),
            "split": ["train"] * train + ["test"] * 4,
            "x": [[n, n] for n in numbers],
            "y": list(numbers),
        }
        groups.append(pa.Table.from_pydict(content, schema=TOKENS.arrow_schema()))
        number += len(numbers)
    write_natural(path, TOKENS.arrow_schema(), groups)
    return path


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.floats(0, 1), st.integers(0, 5))
def test_a_draw_takes_as_many_as_asked_from_the_places_there_are(sizes: list[int], share: float, seed: int) -> None:
    count = int(share * sum(sizes))
    if count == sum(sizes):
        with pytest.raises(DataError, match=r"all of which holdout\.public"):
            draw_public(np.array(sizes), count, RandomStreams(seed))
        return
    sizes = [size + count for size in sizes]  # so that nobody can lose all
    taken = draw_public(np.array(sizes), count, RandomStreams(seed))
    assert len(taken) == len(sizes)
    assert sum(map(len, taken)) == count
    for size, positions in zip(sizes, taken, strict=True):
        assert len(positions) < size
        assert (np.diff(positions) > 0).all()
        assert all(0 <= position < size for position in positions)


def test_every_train_sample_is_equally_likely() -> None:
    counts = np.zeros(60)
    for seed in range(2000):
        taken = draw_public(np.array([10, 50]), 6, RandomStreams(seed))
        counts[np.concatenate([taken[0], taken[1] + 10])] += 1
    # 200 expected, with a standard deviation of 13.4
    assert counts.sum() == 12000
    assert abs(counts - 200).max() < 65


def test_more_than_there_are_cannot_be_drawn() -> None:
    with pytest.raises(DataError, match=r"holdout\.public is 31, but there are only 30 train samples; lower it"):
        draw_public(np.array([10, 20]), 31, STREAMS)
    with pytest.raises(DataError, match=r"client 0 has only 10 train samples.*holdout\.public = 30.*lower it"):
        draw_public(np.array([10, 20]), 30, STREAMS)


@pytest.mark.parametrize("public", [-1, 1.5])
def test_a_count_is_a_natural_number(public: float) -> None:
    with pytest.raises(ValidationError, match="public"):
        HoldoutConfig(public=public)  # type: ignore[arg-type]


@pytest.mark.parametrize("public", [0, 1, 25])
def test_pooled_samples_are_moved_from_train_to_public(public: int) -> None:
    without, dataset = pooled(0), pooled(public)
    found = dataset.load_public()
    assert found.shape == (public, 1)
    assert found.dtype == torch.float32
    numbers = found.flatten().tolist()
    assert numbers == sorted(numbers)
    assert dataset.public_labels().tolist() == [number % 2 for number in numbers]
    for client, indices in enumerate(PARTS):
        before, after = without.load(client), dataset.load(client)
        for split in ("validation", "test"):
            assert torch.equal(after[split].x, before[split].x)
        mine = [number for number in numbers if number in indices]
        assert sorted(after["train"].x.flatten().tolist() + mine) == before["train"].x.flatten().tolist()
        assert torch.equal(after["train"].y, after["train"].x.flatten().long() % 2)
        assert dataset.sizes()[client].tolist() == [len(after[split]) for split in SPLITS]
    loaded = [part.x.flatten().tolist() for client in range(3) for part in dataset.load(client).values()]
    everything = sum(loaded, numbers)
    assert sorted(everything) == list(range(100))


@pytest.mark.parametrize("public", [0, 1, 25])
def test_natural_samples_are_moved_from_train_to_public(public: int, file: Path) -> None:
    without, dataset = NaturalDataset(file, 0.2, STREAMS), NaturalDataset(file, 0.2, STREAMS, public)
    found = dataset.load_public()
    assert found.shape == (public, 2)
    assert found.dtype == torch.int64
    numbers = found[:, 0].tolist()
    assert numbers == sorted(numbers)
    assert dataset.public_labels().tolist() == numbers
    everything = list(numbers)
    for client in range(3):
        before, after = without.load(client), dataset.load(client)
        for split in ("validation", "test"):
            assert torch.equal(after[split].y, before[split].y)
        mine = set(before["train"].y.tolist()) & set(numbers)
        assert sorted([*after["train"].y.tolist(), *mine]) == before["train"].y.tolist()
        assert torch.equal(after["train"].x[:, 0], after["train"].y)
        assert dataset.sizes()[client].tolist() == [len(after[split]) for split in SPLITS]
        everything += [n for part in after.values() for n in part.y.tolist()]
    assert sorted(everything) == list(range(70))


def test_the_draw_depends_on_the_seed_alone(file: Path) -> None:
    for make in (
        lambda seed: pooled(20, RandomStreams(seed)),
        lambda seed: NaturalDataset(file, 0, RandomStreams(seed), 20),
    ):
        assert torch.equal(make(1).load_public(), make(1).load_public())
        assert not torch.equal(make(1).load_public(), make(2).load_public())


def test_loading_in_any_order_gives_the_same(file: Path) -> None:
    one, other = (NaturalDataset(file, 0.2, STREAMS, 20) for _ in range(2))
    public = one.load_public()
    assert torch.equal(one.load(2)["train"].y, other.load(2)["train"].y)
    assert torch.equal(other.load_public(), public)


def test_no_client_may_lose_all_its_train_samples(file: Path) -> None:
    nothing_left = r"client \d has only \d+ train samples, all of which holdout\.public = {} would take; lower it"
    too_many = r"holdout\.public is {}, but there are only {} train samples; lower it"
    with pytest.raises(DataError, match=nothing_left.format(61)):
        pooled(61)
    with pytest.raises(DataError, match=too_many.format(62, 61)):
        pooled(62)
    with pytest.raises(DataError, match=nothing_left.format(58)):
        NaturalDataset(file, 0, STREAMS, 58)
    with pytest.raises(DataError, match=too_many.format(59, 58)):
        NaturalDataset(file, 0, STREAMS, 59)
