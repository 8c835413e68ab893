"""The task anomaly_detection: an autoencoder of normal samples, which tells anomalies by its errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.metrics import Metric
from rayfl.metrics.anomaly import AnomalyMeasures
from rayfl.models.base import Network
from rayfl.models.networks.decoding import decoding
from rayfl.naming.lists import EACH_ONCE
from rayfl.tasks.base import Batch, NetworkTask
from rayfl.tasks.section import TaskSection

Learned = Literal["normal", "all"]


class AnomalyDetection(NetworkTask):
    """Anomaly detection: a network's outputs are its inputs again; the loss of a sample is its mean squared error.

    With ``trains=normal`` anomalies among the training samples have the loss 0, so that nothing is learned of them.
    What is scored are the samples' errors, shape (b, 1), by which anomalies are told. Several models have the error of
    the mean of their outputs.

    Args:
        network: from inputs to features and outputs (:class:`rayfl.models.networks.decoding.DecodingModel`).
        candidates: one task per architecture, if clients may differ in it.
        spec: of the data.
        normal: the classes of normal samples.
        trains: of which samples is learned.

    Attributes:
        normal: as above.
        trains: as above.

    Source: Sakurada, Yairi: Anomaly Detection Using Autoencoders with Nonlinear Dimensionality Reduction, MLSDA 2014.
    """

    name = "anomaly_detection"
    target = "class"
    traits = frozenset({"features"})

    def __init__(
        self,
        network: Network,
        candidates: Sequence[AnomalyDetection] = (),
        spec: InputSpec | None = None,
        normal: Sequence[int] = (0,),
        trains: Learned = "normal",
    ) -> None:
        super().__init__(network, candidates, spec)
        self.normal, self.trains = tuple(normal), trains

    @cached_property
    def measures(self) -> AnomalyMeasures:
        """Returns how predictions are scored."""
        return AnomalyMeasures(self.normal, self.trains == "all")

    def learned_of(self, y: np.ndarray) -> np.ndarray:
        """Returns which samples are normal, bool of shape (n,), by their classes."""
        return np.isin(y, self.normal)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the mean of the samples' errors, of which anomalies have none with ``trains=normal``."""
        errors = _errors(outputs, batch.x)
        if self.trains == "normal":
            errors = errors.where(self.measures.is_normal(batch.y), 0)
        return batch.mean(errors)

    def score_of(self, predicted: Tensor, x: Tensor) -> Tensor:
        """Returns the errors of outputs, shape (b, 1)."""
        return _errors(predicted, x)[..., None]


def _errors(outputs: Tensor, x: Tensor) -> Tensor:
    """The mean squared error of each sample, shape (b,)."""
    return (outputs - x.flatten(1)).square().mean(-1)


class AnomalySection(TaskSection):
    """Anomaly detection by the error of an autoencoder that learns normal samples: squared error, AUROC."""

    learns_from = "class"
    usual = False

    name: Literal["anomaly_detection"] = Field("anomaly_detection", description="What is learned.")
    normal: Annotated[tuple[Annotated[int, Field(ge=0)], ...], EACH_ONCE] = Field(
        (0,), min_length=1, description="The classes of normal samples; all others are anomalies."
    )
    trains: Learned = Field(
        "normal",
        description="Of which training samples is learned: normal ones, or all, as where nobody has looked at them.",
    )
    decoder: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="Units of the decoder's hidden layers, which read the features; empty: one linear layer."
    )

    def check(self, spec: InputSpec, dataset: str) -> None:
        """See the base class; inputs are numbers of one fixed shape."""
        super().check(spec, dataset)
        if spec.kind != "image":
            raise ConfigError(
                f"task: {self.name} makes inputs of numbers once more, but dataset {dataset!r} has {spec.words()}: "
                "choose images, or rows of a table (docs/data.md)"
            )
        if strange := [one for one in self.normal if one >= spec.num_classes]:
            raise ConfigError(
                f"task.normal names class {strange[0]}, but dataset {dataset!r} has the classes 0 to "
                f"{spec.num_classes - 1}"
            )
        if len(self.normal) == spec.num_classes:
            raise ConfigError(
                f"task.normal names all {spec.num_classes} classes of dataset {dataset!r}, so that there are no "
                "anomalies: name fewer"
            )

    def judged_by(self) -> tuple[Metric, ...]:
        """See the base class."""
        return AnomalyMeasures.metrics

    def network_of(self, network: Network, spec: InputSpec, name: str) -> Network:
        """See the base class; a decoder takes the place of the last layer."""
        return decoding(network, self.decoder, spec, name)

    def maker(self, spec: InputSpec) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        """See the base class."""
        return lambda network, candidates: AnomalyDetection(network, candidates, spec, self.normal, self.trains)
