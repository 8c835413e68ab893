"""A small network of each client on CLIP's features of images: FedCLIP's attention, and CLIP-Adapter.

With f the features of an image before they are divided by their norm, classes are told by those of

    attention:  f * softmax(W_2 tanh(W_1 f + c_1) + c_2)
    residual:   a relu(W_2 relu(W_1 f)) + (1 - a) f

in their place. No gradient passes through the base, where nothing else is trained.

Sources: Lu, Hu, Wang, Xie: FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning, IEEE Data
Engineering Bulletin 2023 (arXiv:2302.13485): its abstract was read, and how the code of FAA-CLIP (AIPMLab/FAA-CLIP)
builds FedCLIP's adapter as a baseline. Gao, Geng, Zhang, Ma, Fang, Zhang, Li, Qiao: CLIP-Adapter: Better
Vision-Language Models with Feature Adapters, IJCV 2023: from memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayfl.errors import ModelError
from rayfl.models.pretrained.adapter_section import FeatureAdapterConfig
from rayfl.models.pretrained.sites import TrainedLinear

FEATURE_ADAPTER = "feature_adapter"
"""Dotted name of the adapter in the base."""

OF_FEATURES = f"model.{FEATURE_ADAPTER}."
"""What the names of its tensors begin with, in trees."""


class FeatureAdapter(nn.Module):
    """A network of two layers on features.

    Args:
        config: the section.
        width: D, how many features there are.

    Attributes:
        first: D to D, or to D / reduction.
        second: back to D.

    Raises:
        ModelError: the reduction leaves nothing.
    """

    def __init__(self, config: FeatureAdapterConfig, width: int) -> None:
        super().__init__()
        inner = width // config.hidden_share
        if not inner:
            raise ModelError(
                f"model.adapter.reduction is {config.reduction}, and the base has {width} features: set it to at most "
                f"{width}"
            )
        attention = config.form == "attention"
        self._share = None if attention else config.new_share
        with torch.device("meta"):
            self.first = TrainedLinear(nn.Linear(width, inner, bias=attention), True)
            self.second = TrainedLinear(nn.Linear(inner, width, bias=attention), True)

    def forward(self, features: Tensor) -> Tensor:
        """Features (N b, ..., D) of which the first b are the first client's, in float32 at least."""
        wide = features.to(torch.promote_types(features.dtype, torch.float32))
        if self._share is None:
            weights: Tensor = self.second(self.first(wide).tanh()).softmax(-1)
            return wide * weights
        new: Tensor = self.second(self.first(wide).relu()).relu()
        return torch.lerp(wide, new, self._share)
