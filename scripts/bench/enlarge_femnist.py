"""A FEMNIST with as many writers as you like: the real ones, and synthetic ones made from them.

    python scripts/bench/enlarge_femnist.py SOURCE.parquet DESTINATION.parquet --writers 3550 [--seed 0]

SOURCE is what ``rayfl data import-leaf femnist`` wrote. A synthetic writer takes the samples of a real one, with its
labels, through an affine distortion of its own (rotation, shear, scale, shift) and a stroke width of its own: the
classes stay what they are, the handwriting is another. For measurements of scale, not of accuracy.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from scipy import ndimage

from rayfl.data.sources.natural import NaturalDataset, NaturalHeader, write_natural
from rayfl.errors import RayflError
from rayfl.randomness import RandomStreams

_SIDE = 28
_ROTATION, _SHEAR, _SCALE, _SHIFT = np.radians(15), 0.25, 0.15, 2.0
_WRITERS_A_GROUP = 8


def main() -> None:
    """Writes the destination."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--writers", type=int, default=3550)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    streams = RandomStreams(chosen.seed)
    real = NaturalDataset(chosen.source, 0.0, streams)
    if chosen.writers < real.num_clients:
        raise RayflError(f"--writers is {chosen.writers}, but {chosen.source} already has {real.num_clients}")
    header = NaturalHeader(kind="femnist", input="image", shape=(1, _SIDE, _SIDE), num_classes=62)
    schema = header.arrow_schema()
    write_natural(chosen.destination, schema, _groups(real, chosen.writers, streams, schema))
    print(f"{real.num_clients} real and {chosen.writers - real.num_clients} synthetic writers -> {chosen.destination}")


def _groups(real: NaturalDataset, writers: int, streams: RandomStreams, schema: pa.Schema) -> Iterator[pa.Table]:
    tables: list[pa.Table] = []
    for writer in range(writers):
        if writer < real.num_clients:
            name, model = f"real_{real.names[writer]}", None
        else:
            name, model = f"synthetic_{writer:06d}", streams.generator("writer", client=writer)
        source = writer % real.num_clients
        for split, examples in real.load(source).items():
            if len(examples):
                tables.append(_rows(name, split, _written(examples.x.numpy(), model), examples.y.numpy(), schema))
        if (writer + 1) % _WRITERS_A_GROUP == 0 or writer + 1 == writers:
            yield pa.concat_tables(tables)
            tables = []


def _written(x: np.ndarray, generator: np.random.Generator | None) -> np.ndarray:
    """Images of shape (n, 1, 28, 28) in [0, 1] as another hand would write them, uint8 of shape (n, 784)."""
    ink = 1 - x[:, 0]
    if generator is not None:
        angle = generator.uniform(-_ROTATION, _ROTATION)
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        shear = np.array([[1.0, generator.uniform(-_SHEAR, _SHEAR)], [0.0, 1.0]])
        matrix = turn @ shear / generator.uniform(1 - _SCALE, 1 + _SCALE)
        center = np.full(2, (_SIDE - 1) / 2)
        offset = center - matrix @ (center + generator.uniform(-_SHIFT, _SHIFT, size=2))
        width = generator.uniform(0.7, 1.4)
        distorted = [ndimage.affine_transform(image, matrix, offset, order=1) for image in ink]
        ink = np.clip(np.stack(distorted), 0, 1) ** width
    pixels: np.ndarray = np.rint((1 - ink) * 255).astype(np.uint8).reshape(len(x), -1)
    return pixels


def _rows(name: str, split: str, x: np.ndarray, y: np.ndarray, schema: pa.Schema) -> pa.Table:
    columns = [
        pa.array([name] * len(y), pa.string()),
        pa.array([split] * len(y), pa.string()),
        pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), type=schema.field("x").type),
        pa.array(y.astype(np.int16)),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


if __name__ == "__main__":
    main()
