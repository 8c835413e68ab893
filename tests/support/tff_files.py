"""Small files in the form of TensorFlow Federated: HDF5 and SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rayfl.data.sources.tff.examples import example_message

Clients = Mapping[str, Mapping[str, Any]]
"""By client and column, a value for each sample: lists of bytes, or arrays."""


def write_hdf5(path: Path, clients: Clients) -> Path:
    """A file with the groups ``examples/<client>/<column>``; needs h5py."""
    import h5py

    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        group = file.create_group("examples")
        for client, columns in clients.items():
            own = group.create_group(client)
            for column, values in columns.items():
                if isinstance(values, list):
                    own.create_dataset(column, data=values, dtype=h5py.string_dtype())
                else:
                    own.create_dataset(column, data=values)
    return path


def write_sqlite(path: Path, splits: Mapping[str, Clients]) -> Path:
    """A file as ``save_to_sql_client_data`` makes it, with the splits of TFF's own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        connection.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
        for split, clients in splits.items():
            for client, columns in clients.items():
                count = len(next(iter(columns.values())))
                rows = [{column: values[row] for column, values in columns.items()} for row in range(count)]
                connection.executemany(
                    "INSERT INTO examples VALUES (?, ?, ?)", [(split, client, serialized(row)) for row in rows]
                )
                connection.execute("INSERT INTO client_metadata VALUES (?, ?, ?)", (client, split, count))
    connection.close()
    return path


def serialized(values: Mapping[str, Any]) -> bytes:
    """A ``tf.train.Example`` of bytes, floats and integers, as bytes."""
    example = example_message()()
    for name, value in values.items():
        feature = example.features.feature[name]
        if isinstance(value, bytes):
            feature.bytes_list.value.append(value)
        else:
            flat = np.asarray(value).reshape(-1)
            getattr(feature, "float_list" if flat.dtype.kind == "f" else "int64_list").value.extend(flat.tolist())
    return bytes(example.SerializeToString())


def sentences(count: int, seed: int = 0) -> list[bytes]:
    """Sentences of made-up words, of which low numbers are frequent."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, 12, size=count)
    return [" ".join(f"w{word}" for word in generator.geometric(0.2, size=length)).encode() for length in lengths]


def stack_overflow(clients: int = 4, samples: int = 12) -> dict[str, Clients]:
    """By the names of the parts (``train``, ``test``, ``held_out``), clients with the columns of Stack Overflow."""

    def columns(count: int, seed: int) -> dict[str, Any]:
        texts = sentences(count, seed)
        return {
            "creation_date": [b"2017-01-01 00:00:00 UTC"] * count,
            "score": np.zeros(count, dtype=np.int64),
            "tags": [b"python"] * count,
            "title": [b"a title"] * count,
            "tokens": texts,
            "type": [b"question"] * count,
        }

    names = [f"{number:08d}" for number in range(1, clients + 1)]
    return {
        "train": {name: columns(samples + at, at) for at, name in enumerate(names)},
        "test": {name: columns(3, 100 + at) for at, name in enumerate(names[:-1])} | {"99999999": columns(2, 200)},
        "held_out": {f"{number:08d}": columns(5, 300 + number) for number in (10, 20)},
    }
