"""A U-Net: classes of pixels and voxels."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rayfl.examples import InputSpec
from rayfl.models.architecture import NAME
from rayfl.models.base import ClassificationModel
from rayfl.models.factorization import Factorizable

_GROUPS = 8
_CONVOLUTIONS: dict[int, tuple[type[nn.Module], type[nn.Module]]] = {
    2: (nn.Conv2d, nn.ConvTranspose2d),
    3: (nn.Conv3d, nn.ConvTranspose3d),
}
"""By dimensions of the images: a convolution, and one that makes maps larger."""


class UNetModel(Factorizable):
    """A U-Net (Ronneberger et al., 2015) for images of two or three dimensions, with a class at each pixel.

    Each level has two 3x3 convolutions (3x3x3 for volumes), each followed by group normalization and ReLU; maps of the
    next level are half as large and have twice as many channels. Steps down are strided convolutions, as in nnU-Net
    (Isensee et al., 2021), steps up transposed ones of 2x2. Sides need not be divisible: maps that come up are cut to
    the size of those they join. Group normalization has no statistics of the batch, so clients can be stacked.
    """

    name: Literal["unet"] = Field(default="unet", description=NAME)
    width: int = Field(default=16, ge=1, description="Channels of the first level.")
    depth: int = Field(default=3, ge=1, le=6, description="Steps down: levels but the first.")

    def build(self, spec: InputSpec) -> ClassificationModel:
        if spec.kind != "image" or len(spec.shape) not in (3, 4) or spec.target != "mask":
            raise self.misfit(spec, "images of shape (channels, height, width[, depth]) with a class at each pixel")
        if min(spec.shape[1:]) < 2**self.depth:
            raise self.misfit(spec, f"sides of at least {2**self.depth} pixels for depth={self.depth}")
        return UNet(spec.shape[0], len(spec.shape) - 1, self.width, self.depth, spec.num_classes)


class UNet(ClassificationModel):
    """See :class:`UNetModel`; features are of shape (b, H, W[, D], width), and logits (b, H, W[, D], C).

    Args:
        channels: of the images.
        dimensions: 2 or 3.
        width: channels of the first level.
        depth: steps down.
        outputs: C.
    """

    def __init__(self, channels: int, dimensions: int, width: int, depth: int, outputs: int) -> None:
        super().__init__()
        flat, wider = _CONVOLUTIONS[dimensions]
        widths = [width * 2**level for level in range(depth + 1)]
        self.begin = nn.Sequential(*_convolution(flat, channels, width), *_convolution(flat, width, width))
        self.down = nn.ModuleList(
            nn.Sequential(*_convolution(flat, above, below, stride=2), *_convolution(flat, below, below))
            for above, below in pairwise(widths)
        )
        self.up = nn.ModuleList(wider(2 * own, own, 2, stride=2) for own in widths[:-1])
        self.join = nn.ModuleList(
            nn.Sequential(*_convolution(flat, 2 * own, own), *_convolution(flat, own, own)) for own in widths[:-1]
        )
        self.head = nn.Linear(width, outputs)

    def features(self, x: Tensor) -> Tensor:
        maps = [self.begin(x)]
        for down in self.down:
            maps.append(down(maps[-1]))
        found: Tensor = maps.pop()
        for level in reversed(range(len(maps))):
            grown = self.up[level](found)
            for axis, size in enumerate(maps[level].shape[2:], 2):
                grown = grown.narrow(axis, 0, size)
            found = self.join[level](torch.cat([maps[level], grown], 1))
        return found.movedim(1, -1)

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits


def _convolution(kind: type[nn.Module], inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    """A 3x3 convolution, normalization and ReLU; the normalization's shift takes the place of a bias."""
    return [
        kind(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(math.gcd(_GROUPS, outputs), outputs),
        nn.ReLU(),
    ]
