"""What is left of earlier stages, from the rows of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from algorithms.registry import METHODS
from rayfl.data.partitions.arriving import ClassStages
from rayfl.metrics.classification import CLASSIFICATION
from rayfl.results.personalized import PersonalizedRows
from rayfl.results.schemas import schema_of
from rayfl.results.stages import ByStage, by_stage

TOP1, LOSS = (next(one for one in CLASSIFICATION.metrics if one.name == name) for name in ("top1", "loss"))
STAGES = ClassStages(count=3, rounds=2)
SCORES = {(2, 0): 0.8, (4, 0): 0.9, (4, 1): 0.7, (6, 0): 0.5, (6, 1): 0.6, (6, 2): 0.7}


def table(scores: Mapping[tuple[int, int], float | None], **values: Any) -> pa.Table:
    schema = schema_of("rounds", CLASSIFICATION.metrics)
    common = {"cohort": "all", "phase": "received", "model": "global", "selected_on": ""}
    rows = [
        {**common, "round": round, "split": f"stage_{of + 1}", "top1": value, "loss": value, **values}
        for (round, of), value in scores.items()
    ]
    return pa.Table.from_pylist([*rows, {**common, "round": 6, "split": "test", "top1": 0.6}], schema=schema)


def own() -> PersonalizedRows:
    return PersonalizedRows.of(METHODS["fedavg"])


def test_scores_are_by_the_stage_after_which_and_the_stage_of_the_samples() -> None:
    found = by_stage(table(SCORES), STAGES.stage_of, own())
    assert found is not None and found.metric.name == "top1"
    nan = math.nan
    assert np.array_equal(found.scores, [[0.8, nan, nan], [0.9, 0.7, nan], [0.5, 0.6, 0.7]], equal_nan=True)


def test_inv_stages_4_forgetting_and_backward_transfer_are_those_of_the_papers() -> None:
    found = by_stage(table(SCORES), STAGES.stage_of, own())
    assert found is not None
    assert found.average == pytest.approx((0.5 + 0.6 + 0.7) / 3)
    assert found.forgetting == pytest.approx(((0.9 - 0.5) + (0.7 - 0.6)) / 2)
    assert found.backward_transfer == pytest.approx(((0.5 - 0.8) + (0.6 - 0.7)) / 2)
    loss = by_stage(table(SCORES), STAGES.stage_of, own(), LOSS)
    assert loss is not None and loss.forgetting == pytest.approx(((0.5 - 0.8) + (0.6 - 0.7)) / 2)


def test_one_stage_has_nothing_to_forget_and_a_missing_score_makes_a_missing_mean() -> None:
    one = ByStage(TOP1, np.array([[0.4]]))
    assert one.average == 0.4 and math.isnan(one.forgetting) and math.isnan(one.backward_transfer)
    found = by_stage(table({**SCORES, (6, 1): None}), STAGES.stage_of, own())
    assert found is not None and math.isnan(found.average) and math.isnan(found.forgetting)


def test_a_later_evaluation_within_a_stage_counts_and_other_rows_do_not() -> None:
    found = by_stage(table({**SCORES, (8, 2): 0.75}), STAGES.stage_of, own())
    assert found is not None and found.scores[2, 2] == 0.75
    for others in ({"cohort": "unseen"}, {"model": "personalized"}, {"phase": "trained"}):
        assert by_stage(table(SCORES, **others), STAGES.stage_of, own()) is None
