"""What clients have contributed over a run, of rows by round."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from rayfl.results.contributions import CONTRIBUTIONS_SCHEMA, contributions_of, rows_of_round

FACTS = {"found": "exact", "before": 0.25, "after": 0.5, "evaluations": 4, "permutations": 0, "truncated": 1}


def rows(round: int, values: dict[int, float], kind: str = "shapley", **facts: Any) -> list[dict[str, object]]:
    shares = dict.fromkeys(values, 1 / len(values))
    metric = None if kind == "cosine" else facts.pop("metric", "top1")
    return rows_of_round(round, kind, metric, shares, list(values.values()), {**FACTS, **facts})


def table(*rounds: list[dict[str, object]]) -> pa.Table:
    return pa.Table.from_pylist([row for those in rounds for row in those], schema=CONTRIBUTIONS_SCHEMA)


def test_values_of_rounds_are_summed() -> None:
    found = contributions_of(
        table(
            rows(1, {3: 0.25, 1: 0.0}),
            rows(2, {3: 0.5, 7: -0.25}, after=0.75),
            rows(3, {1: 0.0, 7: 0.0}, found="skipped", evaluations=2, truncated=0),
        )
    )
    assert found is not None
    assert found.clients.tolist() == [1, 3, 7]
    assert found.values.tolist() == [0.0, 0.75, -0.25]
    assert found.rounds.tolist() == [2, 2, 2]
    assert (found.kind, found.metric) == ("shapley", "top1")
    assert (found.utility, found.evaluations, found.truncated) == (1.0, 10, 2)
    assert found.found == {"exact": 2, "skipped": 1}


def test_cosines_are_averaged_over_rounds() -> None:
    nothing = {"before": math.nan, "after": math.nan, "evaluations": 0, "truncated": 0}
    found = contributions_of(table(*(rows(n, {n: 1.0, 5: 0.25 * n}, "cosine", **nothing) for n in (1, 2))))
    assert found is not None
    assert (found.clients.tolist(), found.values.tolist()) == ([1, 2, 5], [1.0, 1.0, 0.375])
    assert math.isnan(found.utility) and found.metric == ""


def test_rounds_without_values_are_left_out() -> None:
    undefined = rows(2, {1: math.nan, 2: math.nan}, found="undefined", before=math.nan, after=math.nan)
    assert [row["value"] for row in undefined] == [None, None]
    found = contributions_of(table(rows(1, {1: 0.25}), undefined))
    assert found is not None
    assert found.values[0] == 0.25 and math.isnan(found.values[1])
    assert (found.rounds.tolist(), found.utility) == ([1, 0], 0.25)


@pytest.mark.parametrize("other", [{"kind": "leave_one_out"}, {"metric": "loss"}, {"kind": "cosine"}])
def test_of_a_fork_with_other_values_the_last_count(other: dict[str, Any]) -> None:
    found = contributions_of(table(rows(1, {1: 9.0}), rows(2, {1: 0.5, 2: 0.25}, **other)))
    assert found is not None and found.values.tolist() == [0.5, 0.25]
    assert contributions_of(table()) is None
    assert contributions_of(pa.table({})) is None
