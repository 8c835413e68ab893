"""The built-in models: one configuration class for each, which builds the model for a data set."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import partial
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional

from rayfl.data.federated import InputSpec
from rayfl.errors import ModelError
from rayfl.models.base import ClassificationModel, Network

Initialization: TypeAlias = Literal["torch", "xavier_normal"]
_INITIALIZATION = "Initial values: PyTorch's defaults, or Xavier normal weights with zero biases."
_NAME = "Architecture of the model."


class Architecture(BaseModel):
    """What every model configuration can do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description=_NAME)

    @abstractmethod
    def build(self, spec: InputSpec) -> ClassificationModel:
        """The model for inputs of the given kind, with values drawn from PyTorch's global generator.

        Raises:
            ModelError: the model does not fit the inputs.
        """

    def network(self, spec: InputSpec) -> Network:
        """The stateless view of :meth:`build`; raises ModelError if the model does not fit the inputs."""
        return Network(partial(self.build, spec))

    def networks(self, spec: InputSpec) -> list[Network]:
        """The architectures a client may have: this one."""
        return [self.network(spec)]

    def _misfit(self, spec: InputSpec, needs: str) -> ModelError:
        return ModelError(f"model {self.name} needs {needs}, but the data set has {spec}")


class TwoNN(Architecture):
    """Multilayer perceptron on flattened images.

    The default is the 2NN of McMahan et al. (2017, section 3): 199,210 parameters for 784 inputs and 10 classes.
    ``hidden=(200, 200, 200), bias=False, init="xavier_normal"`` is the TwoNN of SuPerFed (KDD 2022): 238,800.
    The classifier block is the last two layers, or the head alone behind a single hidden layer.
    """

    name: Literal["two_nn"] = Field(default="two_nn", description=_NAME)
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(200, 200), min_length=1, description="Units of each hidden layer."
    )
    bias: bool = Field(default=True, description="Whether the layers have biases.")
    init: Initialization = Field(default="torch", description=_INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        if spec.kind != "image":
            raise self._misfit(spec, "images")
        model = MultilayerPerceptron(math.prod(spec.shape), self.hidden, spec.num_classes, self.bias)
        return _initialized(model, self.init)


class TwoCNN(Architecture):
    """The convolutional net of McMahan et al. (2017, section 3): 1,663,370 parameters for (1, 28, 28), 10 classes."""

    name: Literal["two_cnn"] = Field(default="two_cnn", description=_NAME)
    init: Initialization = Field(default="torch", description=_INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        return _initialized(_convolutional(self, spec, width=512), self.init)


class LeafCNN(Architecture):
    """The FEMNIST net of LEAF (Caldas et al., 2018): 6,603,710 parameters for (1, 28, 28) and 62 classes."""

    name: Literal["leaf_cnn"] = Field(default="leaf_cnn", description=_NAME)

    def build(self, spec: InputSpec) -> ClassificationModel:
        return _convolutional(self, spec, width=2048)


class CharLSTM(Architecture):
    """Next-character model of McMahan et al. (2017) and LEAF: 819,920 parameters for 80 characters.

    PyTorch's LSTM has two bias vectors per layer where TensorFlow's has one (817,872 parameters).
    """

    name: Literal["char_lstm"] = Field(default="char_lstm", description=_NAME)
    embedding: int = Field(default=8, ge=1, description="Dimensions of a character's embedding.")
    hidden: int = Field(default=256, ge=1, description="Units of each LSTM layer.")
    layers: int = Field(default=2, ge=1, description="Number of stacked LSTM layers.")

    def build(self, spec: InputSpec) -> ClassificationModel:
        if spec.kind != "tokens" or len(spec.shape) != 1 or spec.vocabulary < 1:
            raise self._misfit(spec, "sequences of tokens from a vocabulary")
        return CharacterLSTM(spec.vocabulary, self.embedding, self.hidden, self.layers, spec.num_classes)


_Single = Annotated[TwoNN | TwoCNN | LeafCNN | CharLSTM, Field(discriminator="name")]


class Candidates(BaseModel):
    """Several architectures among which every client has one of its own, for methods that can mix them (FedMe)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["candidates"] = Field(default="candidates", description=_NAME)
    candidates: tuple[_Single, ...] = Field(min_length=2, description="The architectures, numbered from 0.")

    def networks(self, spec: InputSpec) -> list[Network]:
        """One network per candidate; raises ModelError if a model does not fit the inputs."""
        return [candidate.network(spec) for candidate in self.candidates]


ModelConfig = Annotated[TwoNN | TwoCNN | LeafCNN | CharLSTM | Candidates, Field(discriminator="name")]


class MultilayerPerceptron(ClassificationModel):
    """Fully connected ReLU layers on flattened inputs; the features are the last hidden activation."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], outputs: int, bias: bool) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(a, b, bias) for a, b in pairwise((inputs, *hidden)))
        self.head = nn.Linear(hidden[-1], outputs, bias)
        if len(hidden) > 1:
            self.classifier_modules = (f"hidden.{len(hidden) - 1}", "head")

    def features(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = functional.relu(layer(x))
        return x

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits


class ConvolutionalNet(ClassificationModel):
    """Two blocks of 5x5 convolution (same padding), ReLU and 2x2 max-pooling, then two linear layers.

    The features are the flattened output of the second block, of width ``64 * (height // 4) * (width // 4)``.
    """

    classifier_modules = ("fc", "head")
    feature_channels = 64

    def __init__(self, image: tuple[int, int, int], width: int, outputs: int) -> None:
        super().__init__()
        channels, rows, columns = image
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc = nn.Linear(64 * (rows // 4) * (columns // 4), width)
        self.head = nn.Linear(width, outputs)

    def features(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return x.flatten(1)

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(functional.relu(self.fc(features)))
        return logits


class CharacterLSTM(ClassificationModel):
    """Embedding, stacked LSTM, and a linear layer on the last step's hidden state, which is the features."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, outputs)

    def features(self, x: Tensor) -> Tensor:
        steps: Tensor = self.lstm(self.embedding(x))[0]
        return steps[:, -1]

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits


def _convolutional(config: Architecture, spec: InputSpec, width: int) -> ConvolutionalNet:
    if spec.kind != "image" or len(spec.shape) != 3:
        raise config._misfit(spec, "images of shape (channels, height, width)")
    channels, rows, columns = spec.shape
    if min(rows, columns) < 4:
        raise config._misfit(spec, "images of at least 4 x 4 pixels")
    return ConvolutionalNet((channels, rows, columns), width, spec.num_classes)


def _initialized(model: ClassificationModel, init: Initialization) -> ClassificationModel:
    if init == "xavier_normal":
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
    return model
