"""Files whose images stay encoded, and files with many clients, of which only what is asked for is read."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from rayfl.data.files.natural_file import NaturalHeader, open_natural, write_natural
from rayfl.data.images import images as decoding
from rayfl.data.sources.natural import NaturalDataset
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

CLIENTS, TRAIN, TEST, SIDE = 12, 5, 2, 6
HEADER = NaturalHeader(
    version=2, kind="made_up", input="image", shape=(3, SIDE, SIDE), num_classes=3, storage="encoded"
)


def pixels(client: int, row: int) -> np.ndarray:
    generator = np.random.default_rng(100 * client + row)
    return generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def png(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    return buffer.getvalue()


def table(client: int, split: str, rows: range, image: Any = None) -> pa.Table:
    columns = [
        pa.array([f"client_{client:02d}"] * len(rows)),
        pa.array([split] * len(rows)),
        pa.array([image or png(pixels(client, row)) for row in rows], pa.binary()),
        pa.array(np.array([row % 3 for row in rows], dtype=np.int16)),
    ]
    return pa.Table.from_arrays(columns, schema=HEADER.arrow_schema())


def groups() -> Iterator[pa.Table]:
    for client in range(CLIENTS):
        yield table(client, "train", range(TRAIN))
        yield table(client, "test", range(TRAIN, TRAIN + TEST))


@pytest.fixture(params=["many.parquet", "many.arrow"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path: Path = tmp_path / request.param
    write_natural(path, HEADER.arrow_schema(), groups())
    return path


def test_encoded_images_are_decoded_when_a_client_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = decoding.decode_images

    def counting(count: int, *more: Any) -> np.ndarray:
        decoded.append(count)
        return decode(count, *more)

    monkeypatch.setattr("rayfl.data.files.natural_file.decode_images", counting)
    data = NaturalDataset(path, 0.0, RandomStreams(0))
    assert data.sizes().tolist() == [[TRAIN, 0, TEST]] * CLIENTS
    assert not decoded
    splits = data.load(7)
    assert not decoded
    expected = torch.from_numpy(np.stack([pixels(7, row).transpose(2, 0, 1) for row in range(TRAIN + TEST)])) / 255
    torch.testing.assert_close(torch.cat([splits["train"].x, splits["test"].x]), expected)
    assert splits["train"].y.tolist() == [0, 1, 2, 0, 1]
    assert decoded == [TRAIN, TEST]  # each once, and those of nobody else
    assert data.labels(8)["train"].tolist() == [0, 1, 2, 0, 1]
    assert decoded == [TRAIN, TEST]  # labels are known without images


def test_opening_reads_no_row_where_statistics_say_whose_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "many.parquet"
    write_natural(path, HEADER.arrow_schema(), groups())
    read: list[Any] = []
    for name in ("read", "read_row_group", "read_row_groups"):
        whole = getattr(pq.ParquetFile, name)

        def noting(self: Any, *places: Any, whole: Any = whole, **options: Any) -> Any:
            read.append(places)
            return whole(self, *places, **options)

        monkeypatch.setattr(pq.ParquetFile, name, noting)
    data = NaturalDataset(path, 0.0, RandomStreams(0))
    assert data.num_clients == CLIENTS and not read
    _ = data.load(3)["train"].x
    assert read == [([6, 7],)]  # the client's own two groups of rows


def test_groups_of_rows_with_several_clients_are_looked_at(tmp_path: Path) -> None:
    parts = list(groups())
    path = tmp_path / "mixed.parquet"
    mixed = [pa.concat_tables(parts[:3]), parts[3], pa.concat_tables(parts[4:])]
    write_natural(path, HEADER.arrow_schema(), mixed)
    found, whole = NaturalDataset(path, 0.0, RandomStreams(0)), open_natural(path)
    assert found.names == tuple(f"client_{client:02d}" for client in range(CLIENTS))
    assert found.sizes().tolist() == [[TRAIN, 0, TEST]] * CLIENTS
    assert whole.runs()[1:3] == [("client_00", "test", 5, 7), ("client_01", "train", 7, 12)]
    assert len(whole.runs()) == 2 * CLIENTS


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"no image", r"row 0: the image cannot be decoded \(it is no image\)"),
        (
            png(np.zeros((4, 4, 3), dtype=np.uint8)),
            r"images have the shape \(3, 4, 4\), but the header says \(3, 6, 6\)",
        ),
    ],
)
def test_images_that_are_not_what_the_header_says_are_named(tmp_path: Path, image: bytes, message: str) -> None:
    path = tmp_path / "wrong.parquet"
    write_natural(path, HEADER.arrow_schema(), [table(0, "train", range(3), image)])
    data = NaturalDataset(path, 0.0, RandomStreams(0))
    with pytest.raises(DataError, match=message):
        _ = data.load(0)["train"].x


def test_grey_images_among_coloured_ones_have_three_channels(tmp_path: Path) -> None:
    path = tmp_path / "grey.parquet"
    grey = png(np.full((SIDE, SIDE), 51, dtype=np.uint8))
    write_natural(path, HEADER.arrow_schema(), [table(0, "train", range(2), grey), table(1, "train", range(2))])
    x = NaturalDataset(path, 0.0, RandomStreams(0)).load(0)["train"].x
    assert x.shape == (2, 3, SIDE, SIDE) and torch.allclose(x, torch.tensor(0.2))
