"""Natural clients in a memory-mapped Arrow file, and files without a test part of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from rayfl.data.files.natural_file import NaturalHeader, open_natural, write_natural
from rayfl.data.images.transform import TransformConfig
from rayfl.data.partitions.noise import LabelNoise
from rayfl.data.sources.natural import NaturalDataset
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams
from tests.data.sources.test_natural import Row, rows_of, samples

STREAMS = RandomStreams(5)
IMAGES = NaturalHeader(kind="toy", input="image", shape=(1, 2, 2), num_classes=50)
GROUPS = [[*samples("ann", 12, 4), *samples("bob", 7, 2)], samples("eve", 20, 5)]


def write(path: Path, *groups: list[Row], header: NaturalHeader = IMAGES) -> Path:
    write_natural(path, header.arrow_schema(), [rows_of(header, rows) for rows in groups])
    return path


def test_an_arrow_file_holds_the_same_clients_as_a_parquet_file(tmp_path: Path) -> None:
    noise = LabelNoise(kind="symmetric", ratio=0.4)
    datasets = [
        NaturalDataset(write(tmp_path / name, *GROUPS), 0.3, STREAMS, 6, noise) for name in ("f.arrow", "f.parquet")
    ]
    assert datasets[0].names == datasets[1].names == ("ann", "bob", "eve")
    np.testing.assert_array_equal(datasets[0].sizes(), datasets[1].sizes())
    assert torch.equal(datasets[0].load_public(), datasets[1].load_public())
    for client in range(3):
        arrow, parquet = (dataset.load(client) for dataset in datasets)
        for split, examples in arrow.items():
            assert torch.equal(examples.x, parquet[split].x) and torch.equal(examples.y, parquet[split].y)
            assert datasets[0].labels(client)[split].tolist() == examples.y.tolist()


def test_only_some_clients_of_a_file_have_wrong_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "f.arrow", *GROUPS)
    all_wrong = LabelNoise(kind="symmetric", ratio=1)
    noise = all_wrong.model_copy(update={"clients": 0.4})
    clean, wrong, some = (NaturalDataset(path, 0.3, STREAMS, 6, kind) for kind in (LabelNoise(), all_wrong, noise))
    (owner,) = noise.owners(3, STREAMS)
    for client in range(3):
        like = (wrong if client == owner else clean).labels(client)
        assert all(found.tolist() == like[split].tolist() for split, found in some.labels(client).items())


def test_rows_of_an_arrow_file_are_read_in_place(tmp_path: Path) -> None:
    file = open_natural(write(tmp_path / "f.arrow", *GROUPS))
    before = pa.total_allocated_bytes()
    x, y = file.rows(16, 20)
    assert pa.total_allocated_bytes() == before
    assert not x.flags.owndata and x.shape == (4, 4) and y.tolist() == [0, 1, 2, 3]
    assert len(file) == 50 and file.rows(3, 3)[0].shape == (0, 4)
    x, _ = file.rows(20, 30)  # over two groups
    assert x[:, 0].tolist() == [4, 5, 6, 7, 8, 0, 1, 2, 3, 4]


def test_without_an_own_test_part_one_is_drawn_from_each_client(tmp_path: Path) -> None:
    header = IMAGES.model_copy(update={"own_test": False})
    path = write(tmp_path / "f.arrow", samples("ann", 20, 0), samples("bob", 10, 0), header=header)
    dataset = NaturalDataset(path, 0.25, STREAMS)
    np.testing.assert_array_equal(dataset.sizes(), [[12, 4, 4], [6, 2, 2]])
    parts = dataset.load(0)
    assert sorted(torch.cat([part.y for part in parts.values()]).tolist()) == list(range(20))
    np.testing.assert_array_equal(NaturalDataset(path, 0, STREAMS, test=0.5).sizes(), [[10, 0, 10], [5, 0, 5]])


def test_a_test_fraction_for_a_file_with_an_own_test_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"f\.arrow comes with its own test part; set holdout\.test=null"):
        NaturalDataset(write(tmp_path / "f.arrow", *GROUPS), 0, STREAMS, test=0.2)


def test_normalization_uses_the_train_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "f.parquet", samples("ann", 5, 30), samples("bob", 9, 0))
    dataset = NaturalDataset(path, 0, STREAMS, transform=TransformConfig(normalize="dataset", resize=3))
    assert dataset.spec.shape == (1, 3, 3)
    train = torch.cat([dataset.load(client)["train"].x for client in range(2)])
    assert train.mean().item() == pytest.approx(0, abs=1e-5)
    assert train.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert dataset.load(0)["test"].x.max() > train.max()


def test_a_damaged_arrow_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "f.arrow", *GROUPS)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"f\.arrow is not a readable Arrow file: .*`rayfl data prepare`"):
        NaturalDataset(path, 0, STREAMS)
