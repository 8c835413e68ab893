"""Autoencoders: a network without its last layer, and a decoder that makes inputs of its features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from rayfl.examples import InputSpec
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.networks.encoders import EncoderModel, with_encoder


class DecodingModel(EncoderModel):
    """A classification network without its last layer, of whose features a decoder makes inputs once more.

    Features are what the last layer has read, shape (b, f). Outputs are inputs, flattened, shape (b, d). The head is
    the decoder's last layer, the classifier block the decoder.

    Args:
        model: the network, which is changed.
        hidden: units of the decoder's hidden layers, with ReLU.
        outputs: d, numbers of an input.

    Raises:
        ModelError: its last layer is no linear one.
    """

    def __init__(self, model: ClassificationModel, hidden: Sequence[int], outputs: int) -> None:
        super().__init__(model)
        widths = [self.num_features, *hidden]
        below = [layer for wide, narrow in pairwise(widths) for layer in (nn.Linear(wide, narrow), nn.ReLU())]
        self.decoder = nn.Sequential(*below, nn.Linear(widths[-1], outputs))
        self.head_module = f"decoder.{len(below)}"
        self.classifier_modules = ("decoder",)

    def classify(self, features: Tensor) -> Tensor:
        """Outputs of shape (b, d) of a batch of features."""
        outputs: Tensor = self.decoder(features)
        return outputs


def decoding(network: Network, hidden: Sequence[int], spec: InputSpec, name: str) -> Network:
    """Returns an autoencoder of a network; the network's own tensors have ``encoder.`` before their names.

    Args:
        network: a classification network.
        hidden: units of the decoder's hidden layers.
        spec: of the inputs.
        name: of the model, for messages.

    Raises:
        ModelError: it is no network whose last layer reads one vector of each sample.
    """
    model_of = partial(DecodingModel, hidden=tuple(hidden), outputs=math.prod(spec.shape))
    return with_encoder(network, model_of, spec, name, "anomaly_detection")
