"""What a page says of single clients: curves, labels, and no more than a page can hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from algorithms.registry import METHODS
from rayfl.report.charts import Axis, Chart, Series
from rayfl.runs.finding import load_run
from tests.support.documents import rendered

Copied = Callable[..., Path]
LIMIT = 1_500_000


def details(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="client-details">(.*?)</script>', text, re.DOTALL)
    assert found
    content: dict[str, Any] = json.loads(found[1])
    return content


def test_a_clients_curves_are_those_of_the_tables(finished: Path) -> None:
    """Of a choice among a sweep each round has what was chosen then."""
    run = load_run(str(finished / "superfed-mm-0"), METHODS)
    found = details(rendered(finished / "superfed-mm-0"))
    chosen = {
        row["round"]: row["choice"]
        for row in run.rounds.to_pylist()
        if (row["model"], row["selected_on"], row["split"], row["cohort"]) == (*run.own.summary, "test", "all")
    }
    assert found["lines"] == ["global", "lambda, by validation"]
    values = {
        (row["round"], row["client"], row["model"]): row["top1"]
        for row in run.clients.to_pylist()
        if (row["split"], row["cohort"], row["phase"]) == ("test", "all", "received")
    }
    for client, about in found["clients"].items():
        shared, own = about["curves"]
        for place, round in enumerate(found["rounds"]):
            assert shared[place] == pytest.approx(100 * values[round, int(client), "global"], rel=1e-5)
            expected = values.get((round, int(client), chosen.get(round, "")))
            assert own[place] == (None if expected is None else pytest.approx(100 * expected, rel=1e-5))


def test_without_the_data_set_a_client_has_its_samples_by_split(copied: Copied) -> None:
    run = copied("fedavg-0")
    content = yaml.safe_load((run / "config.yaml").read_text())
    content["dataset"] = {"name": "custom", "function": "trap:open"}
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    found = details(rendered(run))
    assert found["kind"] == "split"
    partition = load_run(str(run), METHODS).partition
    assert partition is not None
    for client, about in found["clients"].items():
        assert [name for name, _ in about["labels"]] == ["train", "validation", "test"]
        assert sum(count for _, count in about["labels"]) == partition["client"].to_pylist().count(int(client))


@pytest.mark.slow
def test_a_page_of_many_clients_and_rounds_stays_small(copied: Copied) -> None:
    run, clients, last = copied("fedavg-0"), 1200, 90
    table = pq.read_table(run / "clients.parquet")
    row = next(r for r in table.to_pylist() if (r["cohort"], r["split"], r["model"]) == ("all", "test", "global"))
    draws = np.random.default_rng(0).random((last, clients))
    rows = [
        row | {"round": round, "client": client, "name": str(client), "top1": float(draws[round - 1, client])}
        for round in range(1, last + 1)
        for client in range(clients)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), run / "clients.parquet")
    table = pq.read_table(run / "rounds.parquet")
    row = next(r for r in table.to_pylist() if (r["cohort"], r["split"], r["model"]) == ("all", "test", "global"))
    rows = [row | {"round": round, "clients": clients} for round in range(1, last + 1)]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), run / "rounds.parquet")
    text = rendered(run)
    found = details(text)
    assert len(text.encode()) < LIMIT
    assert len(found["clients"]) == 1000
    assert found["rounds"][-1] == last
    steps = set(np.diff(found["rounds"]))
    assert len(steps) == 1 and len(found["rounds"]) <= 60
    worst = str(int(draws[-1].argmin()))
    assert found["clients"][worst]["curves"][0][-1] == pytest.approx(100 * draws[-1].min(), rel=1e-5)


def test_what_stands_in_a_page_can_end_no_element() -> None:
    values = np.array([1.0, np.nan, 1 / 3])
    chart = Chart([Axis("</script>")], "a & b", 2, [Series("<!--", [np.arange(3)], values, (values, values))])
    text = chart.as_json()
    assert not set("<>&") & set(text)
    content = json.loads(text)
    assert content["axes"][0]["label"] == "</script>" and content["series"][0]["label"] == "<!--"
    assert content["series"][0]["y"] == [1, None, 0.333333]
