"""Networks without their last layer, whose features other layers read."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.base import ClassificationModel, Network

ENCODER = "encoder"
"""What the names of a network's own tensors begin with, once it is an encoder."""


class EncoderModel(ClassificationModel):
    """A classification network without its last layer. Features are what that layer has read, shape (b, f).

    Args:
        model: the network, which is changed.

    Attributes:
        num_features: f.

    Raises:
        ModelError: its last layer is no linear one.
    """

    def __init__(self, model: ClassificationModel) -> None:
        super().__init__()
        parent, _, name = model.head_module.rpartition(".")
        layer = model.get_submodule(model.head_module)
        if not isinstance(layer, nn.Linear):
            raise ModelError(f"the last layer of {type(model).__name__} is a {type(layer).__name__}, no linear layer")
        setattr(model.get_submodule(parent), name, nn.Identity())
        self.encoder = model
        self.num_features = layer.in_features
        self.channels_last = model.channels_last

    def features(self, x: Tensor) -> Tensor:
        """Features of shape (b, f) of a batch of inputs."""
        features: Tensor = self.encoder(x)
        return features


def with_encoder(
    network: Network,
    model_of: Callable[[ClassificationModel], EncoderModel],
    spec: InputSpec,
    name: str,
    task: str,
) -> Network:
    """Returns a network whose last layer is replaced; its own tensors have ``encoder.`` before their names.

    Args:
        network: a classification network.
        model_of: what is made of it.
        spec: of the inputs.
        name: of the model, for messages.
        task: what asks for it, for messages.

    Raises:
        ModelError: it is no network whose last layer reads one vector of each sample.
    """
    why = "" if type(network) is Network else "only adapters or other parts of it are trained"
    made = None
    if not why:
        try:
            made = Network(partial(_made, network, model_of))
            with torch.no_grad():
                read = made.features(made.initialize(0), torch.zeros(2, *spec.shape))
            why = "" if read.dim() == 2 else f"its last layer reads features of shape {tuple(read.shape[1:])}"
        except ModelError as error:
            why = str(error)
    if why or made is None:
        raise ModelError(
            f"model {name}: task={task} replaces the last layer, a linear one that reads one vector of each "
            f"sample, and cannot here: {why}. Choose another model (docs/models.md)"
        )
    if not network.vectorizable and made.vectorizable:
        made.refuse_vectorization(network.why_not_vectorizable)
    own = set(made.parameter_names + made.buffer_names)
    made.groups = {group: _inside(names, own) for group, names in network.groups.items()}
    return made


def _inside(names: Iterable[str], own: Container[str]) -> tuple[str, ...]:
    """Returns the names of a network's tensors as they are inside an encoder, without those of the last layer."""
    return tuple(found for one in names if (found := f"{ENCODER}.{one}") in own)


def _made(network: Network, model_of: Callable[[ClassificationModel], EncoderModel]) -> EncoderModel:
    return model_of(network.factory())
