"""Networks that learn from two views of each image: an encoder, with a projector and a predictor for its head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from rayfl.examples import InputSpec
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.layers.normalization import BatchNormalization1d
from rayfl.models.networks.encoders import EncoderModel, with_encoder

PREDICTOR = "predictor"
"""The group of a network's tensors that has its predictor; also a part of their names."""


@dataclass(frozen=True)
class Heads:
    """What takes the place of a network's last layer.

    Attributes:
        projection: d, numbers of a projection, and of what is predicted of one.
        hidden: units of the hidden layers.
        layers: of the projector: 2, or 3 with a normalization after the last.
        predictor: whether there is a predictor, of two layers.
        norm: whether hidden layers have batch normalization.
    """

    projection: int = 128
    hidden: int = 512
    layers: Literal[2, 3] = 2
    predictor: bool = True
    norm: Literal["batch", "none"] = "batch"

    def project(self, features: int) -> nn.Sequential:
        """Returns the projector of features of this length."""
        found = nn.Sequential(*self._hidden(features))
        if self.layers == 3:
            found.extend(self._hidden(self.hidden))
        found.append(nn.Linear(self.hidden, self.projection))
        if self.layers == 3 and self.norm == "batch":
            # Without scale and shift, as the authors of SimSiam have it.
            found.append(BatchNormalization1d(self.projection, affine=False))
        return found

    def predict(self) -> nn.Sequential:
        """Returns the predictor of projections."""
        return nn.Sequential(*self._hidden(self.projection), nn.Linear(self.hidden, self.projection))

    def _hidden(self, inputs: int) -> list[nn.Module]:
        norm = [BatchNormalization1d(self.hidden)] if self.norm == "batch" else []
        return [nn.Linear(inputs, self.hidden), *norm, nn.ReLU()]


class SiameseModel(EncoderModel):
    """A classification network without its last layer, whose features a projector and a predictor read.

    Features are what the last layer has read, shape (b, f). Outputs are projections, shape (b, d), or these followed by
    what is predicted of them, shape (b, 2 d). The head is the last linear layer, the classifier block projector and
    predictor.

    Args:
        model: the network, which is changed.
        heads: what takes the place of its last layer.

    Raises:
        ModelError: its last layer is no linear one.
    """

    def __init__(self, model: ClassificationModel, heads: Heads) -> None:
        super().__init__(model)
        self.projector = heads.project(self.num_features)
        self.predictor = heads.predict() if heads.predictor else None
        kind = "projector" if self.predictor is None else "predictor"
        last = [place for place, one in enumerate(getattr(self, kind)) if isinstance(one, nn.Linear)][-1]
        self.head_module = f"{kind}.{last}"
        self.classifier_modules = ("projector",) if self.predictor is None else ("projector", "predictor")

    def classify(self, features: Tensor) -> Tensor:
        """Outputs of shape (b, d) or (b, 2 d) of a batch of features."""
        projected: Tensor = self.projector(features)
        return projected if self.predictor is None else torch.cat([projected, self.predictor(projected)], -1)


def siamese(network: Network, heads: Heads, spec: InputSpec, name: str) -> Network:
    """Returns a network whose last layer is replaced; its own tensors have ``encoder.`` before their names.

    Args:
        network: a classification network.
        heads: what takes the place of the last layer.
        spec: of the inputs.
        name: of the model, for messages.

    Raises:
        ModelError: it is no network whose last layer reads one vector of each image.
    """
    made = with_encoder(network, partial(SiameseModel, heads=heads), spec, name, "self_supervised")
    every = made.parameter_names + made.buffer_names
    made.groups = {PREDICTOR: tuple(one for one in every if one.startswith(f"{PREDICTOR}.")), **made.groups}
    return made
