"""The section ``augment``: random changes of training images."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayfl.data.images.augmentation import Augmentation
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec


class AugmentConfig(BaseModel):
    """Random changes of what clients train on; validation and test parts stay as they are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    crop: int = Field(
        default=0,
        ge=0,
        description="Pixels by which images are padded on all four sides before a window of the old size is cut out at "
        "random; 0: none.",
    )
    padding: Literal["black", "reflect"] = Field(
        default="black", description="What the padding of crop holds: black pixels, or the image mirrored at its edge."
    )
    flip: bool = Field(default=False, description="Mirror left and right with probability 1/2.")
    rotate: float = Field(
        default=0.0,
        ge=0,
        le=180,
        description="Largest angle of a random rotation, in degrees; nearest pixels, black corners.",
    )
    resized_crop: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Smallest share of an image's area that a window has, which is cut out at random, with sides of a "
        "ratio from 3:4 to 4:3, and stretched to the old size, by nearest pixels; 1: none.",
    )
    jitter: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Strength s of random colours, which 8 of 10 images have: brightness, contrast and saturation "
        "times 1 - 0.8 s to 1 + 0.8 s, and hue turned by up to 0.2 s of a circle.",
    )
    grayscale: float = Field(default=0.0, ge=0, le=1, description="Probability that an image loses its colours.")
    blur: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Probability that an image is blurred, by a Gaussian of 0.1 to 2 pixels that is cut off at a "
        "twentieth of the side.",
    )
    operations: int = Field(
        default=0,
        ge=0,
        description="RandAugment: how many operations each image has one after the other, drawn from fourteen "
        "(contrasts, colours, rotation, shear, translation), each with a magnitude that is drawn too.",
    )
    cutout: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Largest side of a grey square on the image, whose size and place are drawn, as a share of its "
        "width; 0: none.",
    )
    patch: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None,
        description="Sides of a window that is cut at random out of an image or a volume, and its mask; null: none is.",
    )
    foreground: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Probability that a patch is cut out around a pixel, drawn at random, whose class is not 0.",
    )

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> AugmentConfig:
        if self.padding != "black" and not self.crop:
            raise ValueError(f"padding={self.padding} is that of crop, which is 0; set crop, for instance to 4")
        if self.foreground and self.patch is None:
            raise ValueError(f"foreground={self.foreground} says where patches are, but there are none; set patch")
        return self

    @property
    def _whole(self) -> bool:
        """Returns whether whole images are changed, beyond patches that are cut out."""
        return self.model_copy(update={"patch": None, "foreground": 0.0}).active

    @property
    def active(self) -> bool:
        """Returns whether any image changes."""
        return self != AugmentConfig()

    def build(
        self, spec: InputSpec, black: np.ndarray, white: np.ndarray | None = None, views: int = 1
    ) -> Augmentation | None:
        """The augmentation of inputs as the model sees them; None if nothing changes.

        Args:
            spec: the inputs.
            black: value of a black pixel by channel, shape (channels,).
            white: value of a white pixel by channel; None: 1 more than that of a black one.
            views: how many changed images are made of each.

        Raises:
            ConfigError: the inputs are no images of channels, rows and columns (or volumes, for patches alone), or too
                small for crop or for the patches, or windows of series; or patches are asked for and the targets are no
                masks.
        """
        if not self.active:
            return None
        if spec.horizon:
            raise ConfigError(
                "augment: shifted or mirrored windows of series would have another order of time than what follows "
                "them; leave out the section augment"
            )
        if self.patch is not None:
            self._check_patch(self.patch, spec)
        if self._whole and spec.kind == "image" and len(spec.shape) == 4:
            raise ConfigError(
                "augment: volumes can be cut into patches, but not shifted, mirrored or rotated, nor coloured: leave "
                "out all but patch and foreground"
            )
        if self._whole and (spec.kind != "image" or len(spec.shape) != 3):
            what = (
                f"{spec.kind.removesuffix('s')}s"
                if spec.kind != "image"
                else f"vectors or arrays of the shape {spec.shape}"
            )
            raise ConfigError(
                f"augment: only images (channels, rows, columns) can be augmented, but the inputs are {what}; leave "
                "out the section augment"
            )
        if self.crop and self.crop >= min(spec.shape[1:]):
            at_most = min(spec.shape[1:]) - 1
            done = "can be mirrored" if self.padding == "reflect" else "keep something to see if they are moved"
            raise ConfigError(
                f"augment.crop is {self.crop}, but images of {spec.shape[1]} x {spec.shape[2]} pixels {done} by "
                f"{at_most} at most: make it smaller{', or leave it out' if not at_most else ''}"
            )
        if (self.jitter or self.grayscale or self.operations) and spec.shape[0] not in (1, 3):
            raise ConfigError(
                f"augment: colours are those of images of 1 or 3 channels, but these have {spec.shape[0]}: leave out "
                "jitter, grayscale and operations"
            )
        if (self.operations or self.cutout) and spec.target == "mask":
            raise ConfigError("augment: operations and cutout change images and not their masks: leave them out")
        if self.grayscale and spec.shape[0] == 1:
            raise ConfigError("augment.grayscale: images of one channel have no colours to lose: leave it out")
        bright = black + 1 if white is None else white
        sides = (spec.shape[1], spec.shape[2]) if len(spec.shape) == 3 else (0, 0)
        return Augmentation(self, torch.as_tensor(black), spec.target == "mask", torch.as_tensor(bright), sides, views)

    def trained_on(self, spec: InputSpec) -> InputSpec:
        """Returns what a model sees in training: the data's inputs, or patches of them."""
        return spec if self.patch is None else replace(spec, shape=(spec.shape[0], *self.patch))

    def _check_patch(self, patch: tuple[int, ...], spec: InputSpec) -> None:
        if spec.target != "mask":
            raise ConfigError(
                "augment.patch is for images with a class at each pixel, but the data set has "
                f"{spec.words()}: leave it out"
            )
        if len(patch) != len(spec.shape) - 1 or any(a > b for a, b in zip(patch, spec.shape[1:], strict=True)):
            own, wanted = (" x ".join(map(str, sides)) for sides in (spec.shape[1:], patch))
            raise ConfigError(
                f"augment.patch is {wanted}, but the inputs have the sides {own}: give as many sides, none larger"
            )
