"""Own measures whose sums by sample count what pads a client are not taken for many clients at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.hosting import scoring
from rayfl.engine.scoring.evaluation import evaluate
from rayfl.engine.scoring.evaluation_together import ScoringRequest, evaluate_together
from rayfl.errors import MethodError
from rayfl.metrics.regression import RegressionMeasures
from rayfl.models.base import Network
from rayfl.models.zoo import TwoNN
from rayfl.tasks.base import Predictor
from rayfl.tasks.further_tasks import ErrorLoss, Regression
from tests.engine.scoring.test_evaluation_together import VALUES, of_a_task


class Unmasked(RegressionMeasures):
    """Adds up whatever it is given, what pads a client, too."""

    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        return super().added(found)


class Masked(RegressionMeasures):
    """Has the same sums in a function of its own."""

    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        return super().added(found, mask)


def judged(measures: type[RegressionMeasures]) -> tuple[Regression, list[ScoringRequest]]:
    """A task that measures judge, and clients of several sizes."""

    class Judged(Regression):
        @property
        def measures(self) -> RegressionMeasures:
            return measures(4, ErrorLoss())

    _, samples = of_a_task("regression")
    task = Judged(Network(lambda: TwoNN(hidden=(20, 20)).build(VALUES)), (), VALUES)
    models = [{"global": Predictor.of(task.network.initialize(k))} for k in range(3)]
    return task, [ScoringRequest(one, samples(n, n)) for one, n in zip(models, (3, 9, 5), strict=True)]


def test_own_sums_that_count_what_pads_a_client_are_not_taken_together(caplog: pytest.LogCaptureFixture) -> None:
    task, asked = judged(Unmasked)
    with pytest.raises(MethodError, match=r"^Unmasked.added counts samples that its mask leaves out"):
        evaluate_together(asked, task, 4)
    scorer = scoring.Scorer(task, torch.device("cpu"), VALUES, 4)
    found = scorer.score_together(
        {k: one.predictors for k, one in enumerate(asked)}, ["test"], lambda k: {"test": asked[k].examples}
    )
    assert found == {k: {"test": {}} for k in range(3)}
    assert "3 clients are scored one by one: Unmasked.added counts samples" in caplog.text
    alike = [ScoringRequest(one.predictors, asked[0].examples) for one in asked]
    assert [list(one) for one in evaluate_together(alike, task, 4)] == [["global"]] * 3


def test_own_sums_that_leave_out_what_pads_a_client_are_taken_together() -> None:
    task, asked = judged(Masked)
    for one, found in zip(asked, evaluate_together(asked, task, 4), strict=True):
        (alone,) = evaluate(one.predictors, one.examples, task, 4).values()
        np.testing.assert_allclose(found["global"].vector, alone.vector, rtol=1e-5, atol=1e-5)
