"""Models of texts without recurrence: they can be stacked."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from rayfl.examples import InputSpec
from rayfl.models.architecture import INITIALIZATION, NAME, Initialization, initialized
from rayfl.models.base import ClassificationModel
from rayfl.models.factorization import Factorizable

_BEFORE = 0
"""The token that stands before the first one."""


class FastText(Factorizable):
    """Linear classifier on the mean embedding of a text's tokens (Joulin et al., 2017), without n-grams.

    Padding is no part of the mean. ``hidden`` as large as ``embedding`` and ``mean=positions`` are the model of PFLlib:
    embeddings of padding are 0, the mean is over all positions, and a linear layer without activation follows
    (16,648,708 parameters for 512 dimensions, 32,000 tokens and 4 classes).
    """

    name: Literal["fasttext"] = Field(default="fasttext", description=NAME)
    embedding: int = Field(default=32, ge=1, description="Dimensions of a token's embedding.")
    hidden: int | None = Field(
        default=None,
        ge=1,
        description="Units of a linear layer without activation before the head; null: there is none.",
    )
    mean: Literal["tokens", "positions"] = Field(
        default="tokens",
        description="tokens: the mean is over a text's tokens; positions: over all positions, where padding is 0.",
    )
    init: Initialization = Field(default="torch", description=INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        if spec.kind != "tokens" or len(spec.shape) != 1 or spec.target in ("tokens", "ranking"):
            raise self.misfit(spec, "texts (tokens) with one target each")
        return initialized(BagOfTokens(spec, self.embedding, self.hidden, self.mean == "positions"), self.init)


class BagOfTokens(ClassificationModel):
    """The mean embedding of the tokens that are no padding, or a linear function of it, is the features.

    Args:
        spec: the texts.
        embedding: dimensions of a token's embedding.
        hidden: units of the linear function; None: there is none.
        over_all: whether sums are divided by the positions of a text instead of its tokens.
    """

    def __init__(self, spec: InputSpec, embedding: int, hidden: int | None = None, over_all: bool = False) -> None:
        super().__init__()
        self.padding = spec.padding
        self._spec, self._over_all = spec, over_all
        self.embedding = nn.Embedding(spec.vocabulary, embedding)
        self.hidden = nn.Identity() if hidden is None else nn.Linear(embedding, hidden)
        self.head = nn.Linear(hidden or embedding, spec.num_classes)

    def features(self, x: Tensor) -> Tensor:
        counted = self._spec.mask(x).to(self.embedding.weight.dtype)
        total = (self.embedding(x) * counted[..., None]).sum(-2)
        count = self._spec.shape[0] if self._over_all else counted.sum(-1, keepdim=True).clamp(min=1)
        found: Tensor = self.hidden(total / count)
        return found

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits


class WindowModel(Factorizable):
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
        model.padding = spec.padding
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
        padded = functional.pad(x, (self._window - 1, 0), value=_BEFORE)
        read = torch.cat([padded[..., i : i + x.shape[-1], None] for i in range(self._window)], dim=-1)
        found: Tensor = self.hidden(self.embedding(read).flatten(-2)).tanh()
        return found

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits
