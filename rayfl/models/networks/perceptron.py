"""Multilayer perceptrons."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from rayfl.examples import InputSpec
from rayfl.models.architecture import INITIALIZATION, NAME, Initialization, initialized
from rayfl.models.base import ClassificationModel
from rayfl.models.factorization import Factorizable


class TwoNN(Factorizable):
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
        if spec.target == "mask":
            raise self.misfit(spec, "one target each (unet has one at each pixel)")
        model = MultilayerPerceptron(math.prod(spec.shape), self.hidden, spec.num_classes, self.bias)
        return initialized(model, self.init)


class TabularMLP(Factorizable):
    """Multilayer perceptron on vectors, such as the columns of a table, with dropout between its layers.

    The classifier block is the head. Without hidden layers it is a linear model.
    """

    name: Literal["tabular_mlp"] = Field(default="tabular_mlp", description=NAME)
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(64, 32), description="Units of each hidden layer; none: a linear model."
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Share of hidden units that a training step leaves out."
    )
    embedding: int | None = Field(
        default=None,
        ge=1,
        description="Dimensions of the embeddings of each categorical column's values; null: the values are columns of "
        "0 and 1.",
    )
    init: Initialization = Field(default="torch", description=INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        if spec.kind != "image" or len(spec.shape) != 1:
            raise self.misfit(spec, "vectors")
        if self.embedding is not None and not spec.categories:
            raise self.misfit(spec, "a table with categorical columns (text, true and false) for its option embedding")
        return initialized(TablePerceptron(spec, self.hidden, self.dropout, self.embedding), self.init)


class CategoryEmbeddings(nn.Module):
    """Embeddings in place of the columns of 0 and 1 of a table's categories; the numbers follow.

    Each value of a categorical column has a vector, drawn from N(0, 1) as those of ``torch.nn.Embedding``. A value that
    is not known, which is 0 in all columns, has the vector 0.

    Args:
        width: columns of the table.
        categories: where the columns of each category begin, and how many there are.
        dimension: of the vectors.
    """

    numbers: Tensor

    def __init__(self, width: int, categories: tuple[tuple[int, int], ...], dimension: int) -> None:
        super().__init__()
        self._ranges = [slice(begin, begin + size) for begin, size in categories]
        taken = {place for one in self._ranges for place in range(one.start, one.stop)}
        numbers = [place for place in range(width) if place not in taken]
        self.register_buffer("numbers", torch.tensor(numbers, dtype=torch.int64), persistent=False)
        self.tables = nn.ParameterList(torch.randn(size, dimension) for _, size in categories)
        self.width = dimension * len(categories) + len(numbers)

    def forward(self, x: Tensor) -> Tensor:
        """Returns rows of shape (b, :attr:`width`) of those of a table, shape (b, columns)."""
        found = [x[..., own] @ table for own, table in zip(self._ranges, self.tables, strict=True)]
        return torch.cat([*found, x.index_select(-1, self.numbers)], dim=-1)


class TablePerceptron(ClassificationModel):
    """Fully connected ReLU layers with dropout; the features are the last hidden activation, or the inputs."""

    def __init__(self, spec: InputSpec, hidden: tuple[int, ...], dropout: float, embedding: int | None) -> None:
        super().__init__()
        self.embeddings: nn.Module = nn.Identity()
        inputs, outputs = spec.shape[0], spec.num_classes
        if embedding is not None:
            self.embeddings = CategoryEmbeddings(inputs, spec.categories, embedding)
            inputs = self.embeddings.width
        layers = [(nn.Linear(a, b), nn.ReLU(), nn.Dropout(dropout)) for a, b in pairwise((inputs, *hidden))]
        self.hidden = nn.Sequential(*(part for layer in layers for part in layer))
        self.head = nn.Linear((inputs, *hidden)[-1], outputs)

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.hidden(self.embeddings(x))
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
        if any(type(layer) is not nn.Linear for layer in self.hidden):  # factors have taken the place of weights
            return ()
        return (*(f"hidden.{i}" for i in range(len(self.hidden))), "head")

    def features(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = functional.relu(layer(x))
        return x

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits
