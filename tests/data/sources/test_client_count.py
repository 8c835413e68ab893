"""Drawing an exact number of the clients that a data set comes with."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.federated import FederatedDataset
from rayfl.data.images.transform import TransformConfig
from rayfl.data.partitions.base import NaturalPartition
from rayfl.data.partitions.noise import LabelNoise
from rayfl.data.sources.natural import NaturalDataset, NaturalHeader
from rayfl.errors import ConfigError, DataError
from rayfl.examples import InputSpec
from rayfl.experiment.parts import Parts
from rayfl.randomness import RandomStreams
from tests.data.sources.rows.test_parquet import SHARED
from tests.data.sources.test_natural import labels, samples, write

BASE = {"model": "two_nn", "algorithm": "fedavg"}
PIXELS = NaturalHeader(kind="toy", input="image", shape=(2,), num_classes=50)


def opened(dataset: Any, seed: int = 0, **partition: Any) -> FederatedDataset:
    content = {**BASE, "dataset": dataset, "seed": seed, "partition": {"name": "natural", **partition}}
    return Parts(load_config(Experiment, content, [])).dataset


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    least=st.integers(0, 30),
    data=st.data(),
    seed=st.integers(0, 99),
)
def test_exactly_so_many_large_enough_clients(sizes: list[int], least: int, data: st.DataObject, seed: int) -> None:
    large = [client for client, size in enumerate(sizes) if size >= least]
    count = data.draw(st.integers(1, len(sizes) + 1))
    partition = NaturalPartition(num_clients=count, min_samples=least)
    if count > len(large):
        found = (
            f"{len(large)} of {len(sizes)} clients with at least {least} samples" if least else f"{len(large)} clients"
        )
        with pytest.raises(DataError, match=f"num_clients is {count}, but the data set has only {found}; lower it"):
            partition.chosen(np.array(sizes), RandomStreams(seed))
        return
    chosen = partition.chosen(np.array(sizes), RandomStreams(seed)).tolist()
    assert len(chosen) == count and chosen == sorted(set(chosen)) and set(chosen) <= set(large)
    assert chosen == partition.chosen(np.array(sizes), RandomStreams(seed)).tolist()


def test_without_a_number_all_that_are_large_enough() -> None:
    sizes = np.array([3, 9, 1, 4])
    assert NaturalPartition().chosen(sizes, RandomStreams(0)).tolist() == [0, 1, 2, 3]
    assert NaturalPartition(min_samples=4).chosen(sizes, RandomStreams(0)).tolist() == [1, 3]
    with pytest.raises(DataError, match=r"min_samples is 10, but .* only 0 of 4 clients with at least 10 samples"):
        NaturalPartition(min_samples=10).chosen(sizes, RandomStreams(0))


def test_every_client_is_equally_likely() -> None:
    sizes, partition = np.array([5, 50, 500, 1, 7]), NaturalPartition(num_clients=2, min_samples=2)
    drawn = Counter(c for seed in range(2000) for c in partition.chosen(sizes, RandomStreams(seed)).tolist())
    assert 3 not in drawn
    assert all(abs(drawn[client] / 2000 - 0.5) < 0.04 for client in (0, 1, 2, 4))


def test_drawn_clients_have_the_samples_that_are_theirs(tmp_path: Path) -> None:
    people = [(f"p{i}", 2 + i, i % 3) for i in range(8)]
    path = write(tmp_path / "f", *(samples(*person) for person in people))
    everybody = NaturalDataset(path, 0, RandomStreams(7))
    drawn = NaturalDataset(path, 0, RandomStreams(7), partition=NaturalPartition(num_clients=3, min_samples=4))
    assert drawn.num_clients == 3 == len(drawn.sizes())
    for client, name in enumerate(drawn.names):
        assert labels(drawn, client) == labels(everybody, everybody.names.index(name))
        assert drawn.sizes()[client].sum() >= 4
    others = {
        NaturalDataset(path, 0, RandomStreams(seed), partition=NaturalPartition(num_clients=3)).names
        for seed in range(20)
    }
    assert len(others) > 5


def test_the_file_s_moments_do_not_depend_on_who_is_drawn(tmp_path: Path) -> None:
    path = write(tmp_path / "f", *(samples(f"p{i}", 2 + i, 1) for i in range(5)), header=PIXELS)
    normalized = TransformConfig(normalize="dataset")
    few = NaturalDataset(
        path, 0, RandomStreams(0), 0, LabelNoise(), normalized, partition=NaturalPartition(num_clients=2)
    )
    everybody = NaturalDataset(path, 0, RandomStreams(0), 0, LabelNoise(), normalized)
    np.testing.assert_array_equal(few.preprocess.mean, everybody.preprocess.mean)
    np.testing.assert_array_equal(few.preprocess.std, everybody.preprocess.std)


def test_a_function_s_clients_are_drawn_too() -> None:
    function = "tests.support.own_data:with_clients"
    assert opened(function).names == ("ann", "zoe")
    assert opened(function, min_samples=20).names == ("zoe",)
    assert {opened(function, seed, num_clients=1).names for seed in range(9)} == {("ann",), ("zoe",)}
    with pytest.raises(DataError, match=r"num_clients is 2, .* 1 of 2 clients .* lower it or partition.min_samples"):
        opened(function, num_clients=2, min_samples=20)


def test_a_whole_data_set_of_the_user_s_own_has_its_clients() -> None:
    with pytest.raises(ConfigError, match="partition: a FederatedDataset of your own is used as it is"):
        opened("tests.support.own_data:whole", num_clients=2)


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no data in {SHARED}; set RAYFL_TEST_DATA to a folder with it")
def test_exactly_100_of_leaf_s_300_writers(tmp_path: Path) -> None:
    files = [str(SHARED / f"femnist_{part}.parquet") for part in ("train", "test")]
    dataset = {"name": "parquet", "paths": files, "x": "image", "shape": [1, 28, 28], "root": str(tmp_path)}
    drawn = opened(dataset, num_clients=100, min_samples=50)
    assert drawn.num_clients == 100 and drawn.spec == InputSpec("image", (1, 28, 28), 62)
    assert drawn.sizes().sum(1).min() >= 50
    assert opened(dataset, seed=1, num_clients=100, min_samples=50).names != drawn.names
