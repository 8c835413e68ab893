"""Models for bags of instances, such as a slide's tiles."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rayfl.examples import InputSpec
from rayfl.models.architecture import NAME
from rayfl.models.base import ClassificationModel
from rayfl.models.factorization import Factorizable


class AttentionPooling(Factorizable):
    """Gated attention over the instances of a bag (Ilse et al., 2018, equation 9), each a vector.

    A linear layer embeds each instance. The bag is the mean of its instances' embeddings, weighted by attention: the
    softmax over instances of w . (tanh(V h) * sigmoid(U h)). Fully connected ReLU layers and the head follow. An
    instance whose numbers are all 0 fills a bag up, and has no weight. The defaults are those of FLamby for Camelyon16
    (Ogier du Terrail et al., 2022). The classifier block is everything behind the bag.
    """

    name: Literal["attention_pooling"] = Field(default="attention_pooling", description=NAME)
    embedding: int = Field(default=128, ge=1, description="Numbers that an instance becomes.")
    attention: int = Field(default=128, ge=1, description="Units of the layers that weigh instances.")
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(128, 64), description="Units of each hidden layer behind the bag; none: the head alone."
    )

    def build(self, spec: InputSpec) -> ClassificationModel:
        if spec.kind != "image" or len(spec.shape) != 2 or spec.target == "mask":
            raise self.misfit(spec, "bags of shape (instances, numbers) with one target each")
        return AttentionPoolingNet(spec.shape[1], self.embedding, self.attention, self.hidden, spec.num_classes)


class AttentionPoolingNet(ClassificationModel):
    """See :class:`AttentionPooling`; the features of a bag are its weighted mean.

    Args:
        inputs: numbers of an instance.
        embedding: numbers that it becomes.
        attention: units of the layers that weigh instances.
        hidden: units of the hidden layers behind the bag.
        outputs: C.
    """

    def __init__(self, inputs: int, embedding: int, attention: int, hidden: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, embedding)
        self.values, self.gates = nn.Linear(embedding, attention), nn.Linear(embedding, attention)
        self.weigh = nn.Linear(attention, 1)
        layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise((embedding, *hidden))]
        self.hidden = nn.Sequential(*(part for layer in layers for part in layer))
        self.head = nn.Linear((embedding, *hidden)[-1], outputs)
        self.classifier_modules = ("hidden", "head") if hidden else ("head",)

    def features(self, x: Tensor) -> Tensor:
        instances = self.embed(x)
        scores = self.weigh(self.values(instances).tanh() * self.gates(instances).sigmoid())
        # Not infinity: a bag without any instance would have no softmax.
        scores = scores.masked_fill((x == 0).all(-1, keepdim=True), torch.finfo(scores.dtype).min)
        found: Tensor = (scores.softmax(-2) * instances).sum(-2)
        return found

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(features))
        return logits
