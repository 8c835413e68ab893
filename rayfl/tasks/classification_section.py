"""The section ``task`` of classification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from rayfl.data.images.variations import Variations
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.metrics import Metric
from rayfl.metrics.changed_inputs import ChangedMeasures
from rayfl.metrics.classification import ClassificationMeasures
from rayfl.metrics.frequency import BY_FREQUENCY, Rule, bounds_in_vain, frequency_groups
from rayfl.metrics.people import FAIRNESS
from rayfl.models.base import Network
from rayfl.naming.lists import EACH_ONCE
from rayfl.tasks.base import NetworkTask
from rayfl.tasks.classification import Classification
from rayfl.tasks.section import TaskSection

_Further = Literal[
    "f1_macro",
    "auroc",
    "top1_by_frequency",
    "statistical_parity",
    "equal_opportunity",
    "equalized_odds",
    "average_odds",
]


class ClassificationSection(TaskSection):
    """Classification, one of several classes: cross-entropy, accuracy and calibration."""

    learns_from = "class"

    name: Literal["classification"] = Field("classification", description="What is learned.")
    metrics: Annotated[tuple[_Further, ...], EACH_ONCE] = Field(
        (),
        description="Further metrics, each with columns of its own: f1_macro, auroc; top1_by_frequency has three, "
        "top1_many, top1_medium and top1_few, the accuracy on frequent, medium and rare classes; of data with groups "
        "of people and two classes statistical_parity, equal_opportunity, equalized_odds and average_odds.",
    )
    thresholds: int = Field(
        101, ge=2, le=10_001, description="Number of probabilities at which samples are counted for auroc."
    )
    frequency: Rule = Field(
        "share",
        description="What frequent classes are, of top1_by_frequency: share, those that have 75 % of all training "
        "samples, and medium ones those that have them up to 95 %; count, those with more than 100 samples, and medium "
        "ones with 20 or more.",
    )
    frequency_bounds: tuple[float, float] | None = Field(
        None, description="In place of these two numbers, for instance [0.75, 0.95] or [100, 20]; null: these."
    )

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> ClassificationSection:
        if "thresholds" in self.model_fields_set and self.thresholds != 101 and "auroc" not in self.metrics:
            raise ValueError("thresholds is for auroc: add it to metrics, or leave thresholds out")
        for option, usual in (("frequency", "share"), ("frequency_bounds", None)):
            if getattr(self, option) != usual and not self.counts_classes:
                raise ValueError(f"{option} is for {BY_FREQUENCY}: add it to metrics, or leave {option} out")
        if self.frequency_bounds is not None and (why := bounds_in_vain(self.frequency, self.frequency_bounds)):
            raise ValueError(f"frequency_bounds {why}")
        return self

    @property
    def counts_classes(self) -> bool:
        """See the base class."""
        return BY_FREQUENCY in self.metrics

    def check(self, spec: InputSpec, dataset: str) -> None:
        """See the base class; metrics of group fairness need groups of people, and two classes."""
        super().check(spec, dataset)
        if not (asked := [name for name in self.metrics if name in FAIRNESS]):
            return
        if not spec.groups:
            raise ConfigError(
                f"task.metrics: {asked[0]} compares groups of people, and dataset {dataset!r} does not say of which "
                "one each sample is: name the column that does (dataset.group), choose synthetic_groups or adult "
                "(docs/group-fairness.md), or leave it out"
            )
        if spec.num_classes != 2:
            raise ConfigError(
                f"task.metrics: {asked[0]} is of two classes, of which 1 is the good outcome, and dataset {dataset!r} "
                f"has {spec.num_classes}: choose data with two, or leave it out"
            )

    def judged_by(self) -> tuple[Metric, ...]:
        """See the base class."""
        return ClassificationMeasures(self.metrics).metrics

    def task(
        self,
        networks: Sequence[Network],
        spec: InputSpec,
        changes: Sequence[Metric] = (),
        views: Variations | None = None,
        counts: np.ndarray | None = None,
    ) -> NetworkTask:
        """See the base class; without ``counts`` metrics by frequency are undefined."""
        groups = None if counts is None else frequency_groups(counts, self.frequency, self.frequency_bounds)
        kind = partial(ChangedMeasures, changes=changes) if changes else ClassificationMeasures
        return self._made(self._maker(spec, kind, groups), networks)

    def maker(self, spec: InputSpec) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        """See the base class."""
        return self._maker(spec, ClassificationMeasures, None)

    def _maker(
        self, spec: InputSpec, kind: Callable[..., ClassificationMeasures], groups: np.ndarray | None
    ) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        classes = spec.num_classes if self.metrics else 0
        measures = kind(self.metrics, classes, self.thresholds, groups, len(spec.groups))
        return lambda network, candidates: Classification(network, candidates, spec, measures)
