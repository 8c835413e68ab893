"""Convolutional nets that are one layer after the other."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise

import torch
from torch import Tensor, nn

from rayfl.examples import InputSpec
from rayfl.models.architecture import Architecture
from rayfl.models.base import ClassificationModel


class StackedNet(ClassificationModel):
    """Layers on maps, hidden linear layers, and the head; the features are the flattened last map.

    Args:
        body: from images (b, channels, rows, columns) to maps, as :func:`map_shape` has checked.
        hidden: from flattened maps to what the head reads; may be empty. With the head it is the classifier block.
        head: the last linear layer.
        channels: channels of the last map.
    """

    def __init__(self, body: nn.Sequential, hidden: nn.Sequential, head: nn.Linear, channels: int) -> None:
        super().__init__()
        self.body = body
        self.hidden = hidden
        self.head = head
        self.feature_channels = channels
        if next(hidden.parameters(), None) is not None:
            self.classifier_modules = ("hidden", "head")

    def features(self, x: Tensor) -> Tensor:
        maps: Tensor = self.body(x)
        return maps.flatten(1)

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(features))
        return logits


def map_shape(architecture: Architecture, spec: InputSpec, body: nn.Module) -> tuple[int, int, int]:
    """Channels, rows and columns of what ``body`` makes of an image, found with one that is blank.

    The device ``meta`` computes nothing, but PyTorch imports its compiler for it, which takes longer.

    Raises:
        ModelError: the inputs are no images, or too small.
    """
    image = architecture.image(spec)
    try:
        with torch.inference_mode():
            maps = deepcopy(body).eval()(torch.zeros(1, *image))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise architecture.misfit(spec, f"larger images ({reason})") from None
    channels, rows, columns = maps.shape[1:]
    if 0 in (rows, columns):
        raise architecture.misfit(spec, "larger images (nothing is left of them after the last pooling)")
    return channels, rows, columns


def linear_stack(widths: Sequence[int], activation: type[nn.Module] = nn.ReLU, bias: bool = True) -> nn.Sequential:
    """Linear layers between consecutive widths, each followed by its activation."""
    layers = ((nn.Linear(a, b, bias), activation()) for a, b in pairwise(widths))
    return nn.Sequential(*(layer for pair in layers for layer in pair))
