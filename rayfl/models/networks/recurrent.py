"""Recurrent models of characters."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rayfl.errors import ModelError
from rayfl.examples import InputSpec, lengths_of
from rayfl.models.architecture import INITIALIZATION, NAME, Initialization, initialized
from rayfl.models.base import ClassificationModel
from rayfl.models.factorization import Factorizable
from rayfl.models.layers.lstm import StackableLSTM


class CharLSTM(Factorizable):
    """Next-character model of McMahan et al. (2017) and LEAF: 819,920 parameters for 80 characters.

    PyTorch's LSTM has two bias vectors per layer where TensorFlow's has one (``biases=1``: 817,872 parameters).
    With ``layers`` from 1 to 4 and one bias it is the family of FedMe (Matsuda et al., 2021), after Reddi et al.
    (2021): 295,210, 820,522, 1,345,834 and 1,871,146 parameters for 90 characters. ``biases=0, vocabulary=100,
    init="xavier_normal"`` is the model of SuPerFed (KDD 2022), whose characters are Python's ``string.printable``:
    821,024. Without biases in the LSTM the head has none either. ``embedding=96, hidden=670, layers=1, biases=1,
    projection=96`` is the next-word model of Reddi et al. (2021): 4,050,748 parameters for 10,004 words. The classifier
    block is the head.
    """

    name: Literal["char_lstm"] = Field(default="char_lstm", description=NAME)
    embedding: int = Field(default=8, ge=1, description="Dimensions of a character's embedding.")
    hidden: int = Field(default=256, ge=1, description="Units of each LSTM layer.")
    layers: int = Field(default=2, ge=1, description="Number of stacked LSTM layers.")
    biases: Literal[0, 1, 2] = Field(
        default=2,
        description="Bias vectors of an LSTM layer: 2 as in PyTorch, 1 as in TensorFlow; 0: the whole model has none.",
    )
    projection: int | None = Field(
        default=None,
        ge=1,
        description="Units of a linear layer without activation between LSTM and head; null: there is none.",
    )
    vocabulary: int | None = Field(
        default=None,
        ge=1,
        description="Rows of the embedding, and outputs where the next token is predicted, if the data set's own "
        "number of tokens is not to decide.",
    )
    init: Initialization = Field(default="torch", description=INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        if spec.kind != "tokens" or len(spec.shape) != 1 or spec.vocabulary < 1 or spec.target == "ranking":
            raise self.misfit(spec, "sequences of tokens from a vocabulary")
        rows = self.vocabulary or spec.vocabulary
        if rows < spec.vocabulary:
            raise ModelError(
                f"model {self.name}: vocabulary is {rows}, but the data set has {spec.vocabulary} tokens (of its "
                "tokenizer, where it has one); leave model.vocabulary out or raise it, or take a tokenizer with fewer "
                "tokens (dataset.vocabulary)"
            )
        outputs = rows if spec.num_classes == spec.vocabulary else spec.num_classes
        every_step = spec.target == "tokens"
        model = CharacterLSTM(
            rows,
            self.embedding,
            self.hidden,
            self.layers,
            outputs,
            self.biases,
            every_step,
            spec.padding,
            self.projection,
        )
        return initialized(model, self.init)


class CharacterLSTM(ClassificationModel):
    """Embedding, stacked LSTM, and a linear layer on the hidden state of a text's last token, which is the features.

    With ``projection`` the features are a linear function of that state. Without ``padding`` it is the state of the
    last step. With ``every_step`` the features are those of all steps, shape (b, T, hidden or projection).
    """

    def __init__(
        self,
        vocabulary: int,
        embedding: int,
        hidden: int,
        layers: int,
        outputs: int,
        biases: Literal[0, 1, 2],
        every_step: bool = False,
        padding: int | None = None,
        projection: int | None = None,
    ) -> None:
        super().__init__()
        self.padding = padding
        self._every_step = every_step
        self.embedding = nn.Embedding(vocabulary, embedding)
        kind = SingleBiasLSTM if biases == 1 else nn.LSTM
        self.lstm = kind(embedding, hidden, layers, bias=biases > 0, batch_first=True)
        self.projection = nn.Identity() if projection is None else nn.Linear(hidden, projection, bias=biases > 0)
        self.head = nn.Linear(projection or hidden, outputs, bias=biases > 0)

    def features(self, x: Tensor) -> Tensor:
        steps: Tensor = self.lstm(self.embedding(x))[0]
        if not self._every_step and self.padding is None:
            steps = steps[:, -1]
        elif not self._every_step:
            last = (lengths_of(x, self.padding) - 1).clamp(min=0)
            steps = steps.gather(1, last[:, None, None].expand(-1, 1, steps.shape[2]))[:, 0]
        found: Tensor = self.projection(steps)
        return found

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits


class SingleBiasLSTM(StackableLSTM):
    """An LSTM whose recurrent biases are the constant 0, so that every layer has one vector of biases to learn."""

    def __init__(self, inputs: int, hidden: int, layers: int, *, bias: bool, batch_first: bool) -> None:
        super().__init__(inputs, hidden, layers, bias=bias, batch_first=batch_first)
        for layer in range(layers):
            name = f"bias_hh_l{layer}"
            delattr(self, name)
            self.register_buffer(name, torch.zeros(4 * hidden), persistent=False)
        self._init_flat_weights()
