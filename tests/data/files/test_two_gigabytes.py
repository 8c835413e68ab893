"""Ten thousand clients in one file of 2 GB: opened without a row, each read alone, in bounded memory."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rayfl.data.sources.natural import NaturalDataset
from rayfl.randomness import RandomStreams

ROOT = Path(__file__).parents[3]
CLIENTS, SIZE, LIMIT = 10_000, 2 * 10**9, 32 << 20
SLACK = 200 << 20
"""Bytes beyond the limit: what one client takes while it is read, the read-ahead, and holes in the heap."""


def script() -> Any:
    spec = spec_from_file_location("many_clients", ROOT / "scripts" / "bench" / "many_clients.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_clients_in_a_file_of_2_gb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = script()
    path = tmp_path / "many.parquet"
    made.write(path, CLIENTS, SIZE)
    assert path.stat().st_size > 0.9 * SIZE
    groups: list[tuple[int, ...]] = []
    for name in ("read", "read_row_group", "read_row_groups"):
        whole = getattr(pq.ParquetFile, name)

        def noting(self: Any, *places: Any, whole: Any = whole, **options: Any) -> Any:
            groups.append(tuple(places[0]) if places and isinstance(places[0], list) else places)
            return whole(self, *places, **options)

        monkeypatch.setattr(pq.ParquetFile, name, noting)
    data = NaturalDataset(path, 0.0, RandomStreams(0))
    assert data.num_clients == CLIENTS and not groups  # not a row
    assert len(data.load(7_777)["train"]) == data.sizes()[7_777, 0]
    assert groups == [(15_554, 15_555)]  # its own two groups of rows
    groups.clear()
    before = made.own_memory()
    most, taken = made.within(data, LIMIT, range(0, CLIENTS, 5))
    assert most <= LIMIT and taken == 2_000
    assert sorted(groups) == [(2 * client, 2 * client + 1) for client in range(0, CLIENTS, 5)]  # each once
    assert (made.own_memory() - before) << 20 <= LIMIT + SLACK
