"""The section evaluation.adversarial: samples that are changed by little so that each model gets them wrong."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayfl.data.federated import FederatedDataset
from rayfl.engine.scoring.input_attack import InputAttack
from rayfl.errors import ConfigError

_TOLERANCE = 0.01
"""Of the distance from black to white: by how much resized images may be beyond either."""


class AdversarialConfig(BaseModel):
    """Projected gradient ascent (PGD) of each model's loss on each sample; one step as long as the radius is FGSM."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    radius: float = Field(
        8 / 255,
        gt=0,
        allow_inf_nan=False,
        description="largest distance of a changed input from what it was, by norm, in the unit",
    )
    step: float = Field(2 / 255, gt=0, allow_inf_nan=False, description="length of a step, in the same unit")
    steps: int = Field(10, ge=1, description="steps uphill, from the sample on")
    norm: Literal["linf", "l2"] = Field(
        "linf", description="distance: the largest change of any number, or the square root of the sum of squares"
    )
    loss: Literal["cross_entropy", "margin"] = Field(
        "cross_entropy",
        description="what goes up; the margin is the largest log-probability of another class minus the label's, which "
        "also has a slope where a model is as good as certain",
    )
    unit: Literal["pixels", "input"] | None = Field(
        None,
        description="what a distance of 1 is; pixels: from black to white, between which images stay, however they are "
        "normalized; input: 1 in what models see (a standard deviation of what is standardized), without bounds; null: "
        "pixels for images whose values say that they are, else input",
    )

    @model_validator(mode="after")
    def _reaches(self) -> AdversarialConfig:
        if self.step > self.radius:
            raise ValueError("step is longer than radius, so that every step would end at the edge: lower it")
        return self

    def build(self, dataset: FederatedDataset) -> InputAttack:
        """Returns the attack on inputs of a data set.

        Args:
            dataset: the clients.

        Raises:
            ConfigError: inputs cannot be changed a little, or are no images and the unit is that of pixels.
        """
        spec, options = dataset.spec, (self.radius, self.step, self.steps, self.norm, self.loss)
        if spec.kind != "image":
            why = "the number of a token" if spec.kind == "tokens" else "an edge, which is there or not,"
            raise ConfigError(
                f"evaluation.adversarial: the data set has {spec.words()}, and {why} cannot be changed a little: leave "
                "it out"
            )
        if self.unit != "input" and (found := _pixels(dataset)) is not None:
            black, white = found
            return InputAttack(*options, white - black, np.minimum(black, white), np.maximum(black, white))
        if self.unit == "pixels":
            raise ConfigError(
                "evaluation.adversarial.unit is pixels, and samples are no images with values from 0 to 1 before "
                "normalization: set unit=input, and radius and step in what models see"
            )
        unit = np.ones(spec.shape, np.float32)
        for first, size in spec.categories:  # a row has one value of a category
            unit[first : first + size] = 0
        return InputAttack(*options, unit)


def _pixels(dataset: FederatedDataset) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns what models see of black and of white, in a shape that fits an image; None if samples are no images.

    The first client with samples speaks for all.
    """
    spec = dataset.spec
    if len(spec.shape) < 3 or spec.shape[1] == 1:
        return None
    shape = (-1, *[1] * (len(spec.shape) - 1))
    black, white = np.zeros(spec.shape[0], np.float32), np.ones(spec.shape[0], np.float32)
    if dataset.preprocess is not None:
        black, white = dataset.preprocess.pixel(0), dataset.preprocess.pixel(1)
    black, white = black.reshape(shape), white.reshape(shape)
    sizes = dataset.sizes()
    for client in np.flatnonzero(sizes.sum(1))[:1].tolist():
        split = ("train", "validation", "test")[int(np.flatnonzero(sizes[client])[0])]
        x = dataset.load(client)[split].x.numpy()
        share = (x - black) / (white - black)
        if share.min() < -_TOLERANCE or share.max() > 1 + _TOLERANCE:
            return None
    return black, white
