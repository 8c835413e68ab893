"""The sections ``task`` that a configuration may have: what is learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Field, model_validator

from rayfl.errors import ConfigError, RayflError, text_of
from rayfl.examples import InputSpec, Target
from rayfl.metrics import Metric
from rayfl.metrics.language import LanguageMeasures
from rayfl.metrics.multilabel import MultilabelMeasures
from rayfl.metrics.regression import RegressionMeasures
from rayfl.metrics.segmentation import MaskLoss, SegmentationMeasures, SoftMaskLoss
from rayfl.metrics.survival import SurvivalMeasures
from rayfl.models.base import Network
from rayfl.naming.objects import as_custom, import_object
from rayfl.naming.texts import ObjectPath
from rayfl.results.schemas import unfit_metrics
from rayfl.tasks.anomaly import AnomalySection
from rayfl.tasks.base import NetworkTask
from rayfl.tasks.classification_section import ClassificationSection
from rayfl.tasks.forecasting import ForecastingSection
from rayfl.tasks.further_tasks import Error, ErrorLoss, LanguageModel, Multilabel, Regression, Segmentation
from rayfl.tasks.nodes import NodeClassificationSection
from rayfl.tasks.own_measures import check_measures
from rayfl.tasks.preference import PreferenceSection
from rayfl.tasks.recommendation import RecommendationSection
from rayfl.tasks.section import TARGETS, TaskSection
from rayfl.tasks.self_supervised_section import SelfSupervisedSection
from rayfl.tasks.survival import Survival


class MultilabelSection(TaskSection):
    """Multilabel classification: binary cross-entropy, F1, mean average precision and exact match."""

    learns_from = "labels"

    name: Literal["multilabel"] = Field("multilabel", description="What is learned.")
    positive_weight: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(
        None, description="By label, the factor of the loss of samples that have it; null: 1 for all."
    )
    thresholds: int = Field(
        101,
        ge=2,
        le=10_001,
        description="Number of probabilities at which samples are counted for mean average precision.",
    )

    def judged_by(self) -> tuple[Metric, ...]:
        """See the base class."""
        return MultilabelMeasures.metrics

    def maker(self, spec: InputSpec) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        """See the base class."""
        weights = self.positive_weight
        if weights is not None and len(weights) != spec.num_classes:
            raise ConfigError(
                f"task.positive_weight has {len(weights)} entries, but the data have {spec.num_classes} labels: give "
                "one for each"
            )
        return lambda network, candidates: Multilabel(network, candidates, spec, weights, self.thresholds)


class RegressionSection(TaskSection):
    """Regression of one or several numbers: squared, absolute or Huber loss; MSE, MAE and R2."""

    learns_from = "values"

    name: Literal["regression"] = Field("regression", description="What is learned.")
    loss: Error = Field("squared", description="Of each number: squared, absolute or huber.")
    delta: float = Field(1.0, gt=0, description="Error at which Huber's loss turns from squared to absolute.")

    @model_validator(mode="after")
    def _delta_of_huber(self) -> RegressionSection:
        if self.delta != 1.0 and self.loss != "huber":
            raise ValueError("delta is for loss=huber: set that, or leave delta out")
        return self

    def judged_by(self) -> tuple[Metric, ...]:
        """See the base class."""
        return RegressionMeasures.metrics

    def maker(self, spec: InputSpec) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        """See the base class."""
        error = ErrorLoss(self.loss, self.delta)
        return lambda network, candidates: Regression(network, candidates, spec, error)


class LanguageModelSection(TaskSection):
    """Language modelling, the next token at every position: cross-entropy, perplexity and token accuracy."""

    learns_from = "tokens"

    name: Literal["language_model"] = Field("language_model", description="What is learned.")

    def judged_by(self) -> tuple[Metric, ...]:
        """See the base class."""
        return LanguageMeasures.metrics

    def maker(self, spec: InputSpec) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        """See the base class."""
        return lambda network, candidates: LanguageModel(network, candidates, spec)


class SegmentationSection(TaskSection):
    """Segmentation, a class for each pixel or voxel: cross-entropy, Dice loss or both; Dice, IoU and pixel accuracy."""

    learns_from = "mask"

    name: Literal["segmentation"] = Field("segmentation", description="What is learned.")
    loss: MaskLoss = Field(
        "cross_entropy_dice", description="Of each sample: cross_entropy, dice, or their sum cross_entropy_dice."
    )
    background: bool = Field(True, description="Whether class 0 counts in Dice and IoU, and in the Dice loss.")

    def judged_by(self) -> tuple[Metric, ...]:
        """See the base class."""
        return SegmentationMeasures.metrics

    def maker(self, spec: InputSpec) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        """See the base class."""
        if not self.background and spec.num_classes < 2:
            raise ConfigError("task.background=false leaves no class: the data have class 0 alone; leave it out")
        error = SoftMaskLoss(self.loss, self.background)
        return lambda network, candidates: Segmentation(network, candidates, spec, error, self.background)


class SurvivalSection(TaskSection):
    """Survival, the risk of an event whose time may be censored: Cox's partial likelihood, concordance index."""

    learns_from = "survival"

    name: Literal["survival"] = Field("survival", description="What is learned.")

    def judged_by(self) -> tuple[Metric, ...]:
        """See the base class."""
        return SurvivalMeasures.metrics

    def maker(self, spec: InputSpec) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        """See the base class."""
        return lambda network, candidates: Survival(network, candidates, spec)


class CustomTask(TaskSection):
    """Your own task: a subclass of :class:`rayfl.tasks.base.NetworkTask`, or of one of rayfl's tasks."""

    name: Literal["custom"] = Field("custom", description="Your own class.")
    factory: ObjectPath = Field(
        description="The class, as my_package.my_module:MyTask; it may also stand in the place of the name."
    )

    @property
    def target(self) -> Target:
        """Returns the kind of targets that the user's class declares."""
        return self._class().target

    def judged_by(self) -> tuple[Metric, ...]:
        """Returns the metrics that the user's class declares.

        Raises:
            ConfigError: when it declares none.
        """
        if not (metrics := self._class().metrics):
            raise ConfigError(
                f"task: {self.factory!r} has no attribute metrics: give it those of its measures, so that a sweep "
                "knows what it may compare by"
            )
        return metrics

    def maker(self, spec: InputSpec) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        """See the base class."""
        found = self._class()

        def make(network: Network, candidates: Sequence[Any]) -> NetworkTask:
            try:
                made = found(network, candidates, spec)
                metrics = made.measures.metrics
            except RayflError:
                raise
            except Exception as error:  # user code may raise anything
                raise ConfigError(f"task {self.factory} fails: {type(error).__name__}: {text_of(error)}") from error
            if why := unfit_metrics(metrics):
                names = ", ".join(metric.name for metric in metrics)
                raise ConfigError(f"task {self.factory}: the metrics of its measures ({names}) do not fit: {why}")
            check_measures(made.measures, f"task {self.factory}")
            return made

        return make

    def _class(self) -> type[NetworkTask]:
        found = import_object(self.factory, "task")
        if not (isinstance(found, type) and issubclass(found, NetworkTask)):
            raise ConfigError(f"task: {self.factory!r} is no subclass of rayfl.NetworkTask")
        if getattr(found, "__abstractmethods__", None) or getattr(found, "target", None) not in TARGETS:
            missing = ", ".join(sorted(found.__abstractmethods__)) or f"target, one of {', '.join(TARGETS)}"
            raise ConfigError(f"task: {self.factory!r} does not define {missing}")
        return found


def task_named_by_object(content: Any) -> Any:
    """``{name: my_module:MyTask}`` as ``{name: custom, factory: my_module:MyTask}``; without a name classification."""
    if isinstance(content, dict) and "name" not in content:
        return {"name": "classification", **content}
    return as_custom(content, "factory")


TaskConfig = Annotated[
    Union[  # noqa: UP007
        ClassificationSection,
        MultilabelSection,
        RegressionSection,
        LanguageModelSection,
        SegmentationSection,
        SurvivalSection,
        RecommendationSection,
        PreferenceSection,
        ForecastingSection,
        NodeClassificationSection,
        SelfSupervisedSection,
        AnomalySection,
        CustomTask,
    ],
    Field(discriminator="name"),
    BeforeValidator(task_named_by_object),
]
