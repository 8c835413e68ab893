"""Models of texts without recurrence: they can be stacked."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from rayfl.examples import InputSpec
from rayfl.models.architecture import INITIALIZATION, NAME, Architecture, Initialization, initialized
from rayfl.models.base import ClassificationModel

PADDING = 0
"""The token that fills a text up to its length."""


class FastText(Architecture):
    """Linear classifier on the mean embedding of a text's tokens (Joulin et al., 2017), without n-grams.

    Token 0 is padding, and no part of the mean.
    """

    name: Literal["fasttext"] = Field(default="fasttext", description=NAME)
    embedding: int = Field(default=32, ge=1, description="Dimensions of a token's embedding.")
    init: Initialization = Field(default="torch", description=INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        if spec.kind != "tokens" or len(spec.shape) != 1 or spec.target == "tokens":
            raise self.misfit(spec, "texts (tokens) with one target each")
        return initialized(BagOfTokens(spec.vocabulary, self.embedding, spec.num_classes), self.init)


class BagOfTokens(ClassificationModel):
    """The mean embedding of the tokens that are no padding is the features."""

    def __init__(self, vocabulary: int, embedding: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.head = nn.Linear(embedding, outputs)

    def features(self, x: Tensor) -> Tensor:
        counted = (x != PADDING).to(self.embedding.weight.dtype)
        total = (self.embedding(x) * counted[..., None]).sum(-2)
        mean: Tensor = total / counted.sum(-1, keepdim=True).clamp(min=1)
        return mean

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits


class WindowModel(Architecture):
    """Neural n-gram model (Bengio et al., 2003): the next token from the embeddings of the last ones, at each position.

    Before the first token the window holds token 0. There are no direct connections from embeddings to outputs.
    """

    name: Literal["window_lm"] = Field(default="window_lm", description=NAME)
    window: int = Field(default=3, ge=1, description="How many tokens are read, the position's own included.")
    embedding: int = Field(default=16, ge=1, description="Dimensions of a token's embedding.")
    hidden: int = Field(default=64, ge=1, description="Units of the hidden layer (tanh).")
    init: Initialization = Field(default="torch", description=INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        if spec.kind != "tokens" or spec.target != "tokens":
            raise self.misfit(spec, "texts (tokens) of which the next token is to be predicted")
        model = TokenWindow(spec.vocabulary, self.window, self.embedding, self.hidden, spec.num_classes)
        return initialized(model, self.init)


class TokenWindow(ClassificationModel):
    """Features of shape (b, T, hidden) and logits of shape (b, T, V)."""

    def __init__(self, vocabulary: int, window: int, embedding: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self._window = window
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.hidden = nn.Linear(window * embedding, hidden)
        self.head = nn.Linear(hidden, outputs)

    def features(self, x: Tensor) -> Tensor:
        padded = functional.pad(x, (self._window - 1, 0), value=PADDING)
        read = torch.cat([padded[..., i : i + x.shape[-1], None] for i in range(self._window)], dim=-1)
        found: Tensor = self.hidden(self.embedding(read).flatten(-2)).tanh()
        return found

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits
