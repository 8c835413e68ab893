"""The section ``task`` of learning without labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from rayfl.data.images.variations import Variations
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.metrics import Metric
from rayfl.metrics.representations import Further, RepresentationMeasures
from rayfl.models.base import Network
from rayfl.models.networks.siamese import Heads, siamese
from rayfl.naming.lists import EACH_ONCE
from rayfl.tasks.base import NetworkTask
from rayfl.tasks.section import TaskSection
from rayfl.tasks.self_supervised import ObjectiveName, SelfSupervised, ViewLoss


class SelfSupervisedSection(TaskSection):
    """Encoders of images, learned from two views of each without labels: SimSiam, SimCLR or BYOL; kNN accuracy."""

    learns_from = "class"
    usual = False
    views = 2

    name: Literal["self_supervised"] = Field("self_supervised", description="What is learned.")
    objective: ObjectiveName = Field(
        "simsiam", description="Loss of the two views of a sample: simsiam, simclr, or byol (in fedema and fedu)."
    )
    temperature: float = Field(0.5, gt=0, description="Of simclr: what cosines are divided by.")
    projection: int = Field(128, ge=1, description="Numbers of a projection, which the loss compares.")
    hidden: int = Field(512, ge=1, description="Units of the hidden layers of projector and predictor.")
    norm: Literal["batch", "none"] = Field(
        "batch", description="Normalization in projector and predictor, whose running statistics are part of the model."
    )
    neighbours: int = Field(200, ge=1, description="Training samples that vote for the class of a sample, at most.")
    knn_temperature: float = Field(0.1, gt=0, description="A vote of cosine s weighs exp(s / knn_temperature).")
    metrics: Annotated[tuple[Further, ...], EACH_ONCE] = Field(
        (), description="Further metrics, each with columns of its own: linear_top1."
    )

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> SelfSupervisedSection:
        if self.temperature != 0.5 and self.objective != "simclr":
            raise ValueError("temperature is for objective=simclr: set that, or leave temperature out")
        return self

    def check(self, spec: InputSpec, dataset: str) -> None:
        """See the base class; only images can have views."""
        super().check(spec, dataset)
        if spec.kind != "image" or len(spec.shape) != 3:
            raise ConfigError(
                f"task: {self.name} compares two views of each image, but dataset {dataset!r} has {spec.words()}: "
                "choose another task, or images (docs/data.md)"
            )

    def judged_by(self) -> tuple[Metric, ...]:
        """See the base class."""
        return RepresentationMeasures(self.metrics).metrics

    def network_of(self, network: Network, spec: InputSpec, name: str) -> Network:
        """See the base class; a projector and a predictor take the place of the last layer."""
        simsiam = self.objective == "simsiam"
        heads = Heads(self.projection, self.hidden, 3 if simsiam else 2, self.objective != "simclr", self.norm)
        return siamese(network, heads, spec, name)

    def task(
        self,
        networks: Sequence[Network],
        spec: InputSpec,
        changes: Sequence[Metric] = (),
        views: Variations | None = None,
        counts: np.ndarray | None = None,
    ) -> NetworkTask:
        """See the base class.

        Raises:
            ConfigError: images are not changed, so that their views are equal.
        """
        if views is None:
            raise ConfigError(
                "task: self_supervised compares two views of each image, which are equal without the section augment: "
                "set for instance augment.resized_crop=0.2 augment.flip=true augment.jitter=0.5 (docs/data.md)"
            )
        made = super().task(networks, spec, changes)
        for one in {id(task): task for task in (made, *made.candidates)}.values():
            one.views = views
        return made

    def maker(self, spec: InputSpec) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        """See the base class."""
        loss, measures = ViewLoss(self.objective, self.temperature), RepresentationMeasures(self.metrics)
        options = measures, self.neighbours, self.knn_temperature
        return lambda network, candidates: SelfSupervised(network, candidates, spec, loss, *options)
