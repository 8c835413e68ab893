"""Rows of a file that lie together and belong to one client and split."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

Run = tuple[str, str, int, int]
"""Client, split, first row and the row behind the last."""


def runs_of(owners: pa.Table, start: int) -> list[Run]:
    """The runs of rows of one client and split.

    Args:
        owners: the columns ``client`` and ``split`` of some rows.
        start: the number of the first of them.
    """
    clients, splits = (owners.column(name).dictionary_encode().combine_chunks() for name in ("client", "split"))
    names, parts = clients.dictionary.to_pylist(), splits.dictionary.to_pylist()
    codes = np.stack([clients.indices.to_numpy(), splits.indices.to_numpy()])
    begins = np.flatnonzero(np.diff(codes, prepend=-1).any(axis=0)).tolist()
    ends = [*begins[1:], owners.num_rows]
    return [
        (names[codes[0, begin]], parts[codes[1, begin]], start + begin, start + end)
        for begin, end in zip(begins, ends, strict=True)
    ]


def joined(runs: list[Run]) -> list[Run]:
    """Neighbours of one client and split as one run."""
    found: list[Run] = []
    for run in runs:
        if found and found[-1][:2] == run[:2]:
            found[-1] = (*run[:2], found[-1][2], run[3])
        else:
            found.append(run)
    return found
