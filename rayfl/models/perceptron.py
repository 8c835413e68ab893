"""Multilayer perceptrons."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from rayfl.examples import InputSpec
from rayfl.models.architecture import INITIALIZATION, NAME, Architecture, Initialization, initialized
from rayfl.models.base import ClassificationModel


class TwoNN(Architecture):
    """Multilayer perceptron on flattened images.

    The default is the 2NN of McMahan et al. (2017, section 3): 199,210 parameters for 784 inputs and 10 classes.
    ``hidden=(200, 200, 200), bias=False, init="xavier_normal"`` is the TwoNN of SuPerFed (KDD 2022): 238,800.
    The classifier block is the last two layers, or the head alone behind a single hidden layer.
    """

    name: Literal["two_nn"] = Field(default="two_nn", description=NAME)
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(200, 200), min_length=1, description="Units of each hidden layer."
    )
    bias: bool = Field(default=True, description="Whether the layers have biases.")
    init: Initialization = Field(default="torch", description=INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        if spec.kind != "image":
            raise self.misfit(spec, "images")
        model = MultilayerPerceptron(math.prod(spec.shape), self.hidden, spec.num_classes, self.bias)
        return initialized(model, self.init)


class TabularMLP(Architecture):
    """Multilayer perceptron on vectors, such as the columns of a table, with dropout between its layers.

    The classifier block is the head.
    """

    name: Literal["tabular_mlp"] = Field(default="tabular_mlp", description=NAME)
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(64, 32), min_length=1, description="Units of each hidden layer."
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Share of hidden units that a training step leaves out."
    )
    init: Initialization = Field(default="torch", description=INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        if spec.kind != "image" or len(spec.shape) != 1:
            raise self.misfit(spec, "vectors")
        return initialized(TablePerceptron(spec.shape[0], self.hidden, spec.num_classes, self.dropout), self.init)


class TablePerceptron(ClassificationModel):
    """Fully connected ReLU layers with dropout; the features are the last hidden activation."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], outputs: int, dropout: float) -> None:
        super().__init__()
        layers = [(nn.Linear(a, b), nn.ReLU(), nn.Dropout(dropout)) for a, b in pairwise((inputs, *hidden))]
        self.hidden = nn.Sequential(*(part for layer in layers for part in layer))
        self.head = nn.Linear(hidden[-1], outputs)

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.hidden(x)
        return found

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits


class MultilayerPerceptron(ClassificationModel):
    """Fully connected ReLU layers on flattened inputs; the features are the last hidden activation."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], outputs: int, bias: bool) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(a, b, bias) for a, b in pairwise((inputs, *hidden)))
        self.head = nn.Linear(hidden[-1], outputs, bias)
        if len(hidden) > 1:
            self.classifier_modules = (f"hidden.{len(hidden) - 1}", "head")

    def chain(self) -> tuple[str, ...]:
        return (*(f"hidden.{i}" for i in range(len(self.hidden))), "head")

    def features(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = functional.relu(layer(x))
        return x

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits
