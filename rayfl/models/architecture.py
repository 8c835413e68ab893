"""What all configurations of models share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from rayfl.diagnosis.host_memory import lacks_host_memory
from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.base import ClassificationModel, Network

Initialization: TypeAlias = Literal["torch", "xavier_normal"]
INITIALIZATION = (
    "Initial values: PyTorch's defaults, or Xavier normal weights with zero biases in convolutions and linear layers."
)
NAME = "Architecture of the model."


class Architecture(BaseModel):
    """What every model configuration can do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description=NAME)

    @abstractmethod
    def build(self, spec: InputSpec) -> ClassificationModel:
        """The model for inputs of the given kind, with values drawn from PyTorch's global generator.

        Raises:
            ModelError: the model does not fit the inputs.
        """

    def whole(self, spec: InputSpec) -> ClassificationModel:
        """The model as it is trained: that of :meth:`build`, unless weights of it are replaced; errors as there."""
        return self.build(spec)

    def network(self, spec: InputSpec) -> Network:
        """The stateless view of :meth:`whole`; raises ModelError if it fits neither the inputs nor into memory."""
        try:
            return Network(partial(self.whole, spec))
        except Exception as error:
            if not lacks_host_memory(error):
                raise
            raise ModelError(
                f"model {self.name} for {spec.words()} does not fit into this machine's memory: choose smaller sizes "
                "in the section model, or smaller inputs"
            ) from error

    def networks(self, spec: InputSpec) -> list[Network]:
        """The architectures a client may have: this one."""
        return [self.network(spec)]

    def settled(self) -> Self:
        """The configuration with what is found out once, and recorded: this one, unless it names files."""
        return self

    def told(self, class_names: Callable[[], Sequence[str]]) -> Self:
        """The configuration with the names of the data's classes, where it needs them and has none; else this one.

        Args:
            class_names: returns the names by number; none where the data have none.
        """
        return self

    def saving_memory(self) -> Self:
        """The configuration whose steps take less memory and more time, where it leaves that open; else this one."""
        return self

    def image(self, spec: InputSpec) -> tuple[int, int, int]:
        """Channels, height and width of the inputs; raises ModelError if they are no images."""
        if spec.kind != "image" or len(spec.shape) != 3:
            raise self.misfit(spec, "images of shape (channels, height, width)")
        if spec.target == "mask":
            raise self.misfit(spec, "one target each (unet has one at each pixel)")
        channels, rows, columns = spec.shape
        return channels, rows, columns

    def misfit(self, spec: InputSpec, needs: str) -> ModelError:
        """The error of a model that needs other inputs."""
        fix = "; choose another model or other data (docs/models.md)"
        if spec.categories and "token" in needs:
            fix = ": a column of text becomes tokens with dataset.tokenizer"
        return ModelError(f"model {self.name} needs {needs}, but the data set has {spec.words()}{fix}")


def initialized(model: ClassificationModel, init: Initialization) -> ClassificationModel:
    """The model itself, with its convolutions and linear layers drawn again if ``init`` says so."""
    if init == "xavier_normal":
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
    return model
