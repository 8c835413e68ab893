"""Graph neural networks on dense adjacencies: a graph is one array, and a mini-batch one tensor."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.architecture import INITIALIZATION, NAME, Initialization, initialized
from rayfl.models.base import ClassificationModel
from rayfl.models.factorization import Factorizable

Pooling: TypeAlias = Literal["sum", "mean", "max"]
_POOLING = "What a graph is of its nodes: sum, mean or max; of nodes that have targets of their own nothing is pooled."
NORM = "Normalization of each node's hidden numbers by themselves, before the activation: none or layer."
_DROPOUT = "Share of hidden numbers that a training step leaves out after each layer."
_HIDDEN = "Numbers of a node after each layer."
NodeNorm: TypeAlias = Literal["none", "layer"]


class _GraphModel(Factorizable):
    """What the models of graphs have in common."""

    layers: int = Field(default=2, ge=1, le=64, description="How many times nodes hear from their neighbours.")
    hidden: int = Field(default=64, ge=1, description=_HIDDEN)
    pooling: Pooling
    norm: NodeNorm = Field(default="none", description=NORM)
    dropout: float = Field(default=0.0, ge=0, lt=1, description=_DROPOUT)
    init: Initialization = Field(default="torch", description=INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        if spec.kind != "graph":
            raise self.misfit(spec, "graphs")
        of_nodes = spec.target == "nodes"
        if of_nodes and self.pooling != (usual := type(self).model_fields["pooling"].default):
            raise ModelError(
                f"model {self.name}: model.pooling={self.pooling} makes one vector of a graph's nodes, and here each "
                f"node has a target of its own: leave it out (or set model.pooling={usual})"
            )
        nodes, width = spec.shape
        return initialized(
            self._made(nodes, width - nodes, spec.num_classes, None if of_nodes else self.pooling), self.init
        )

    @abstractmethod
    def _made(self, nodes: int, inputs: int, outputs: int, pooling: Pooling | None) -> ClassificationModel:
        """Returns the model; ``inputs`` counts the indicator of nodes that exist, ``pooling`` None: none is done."""


class GCNModel(_GraphModel):
    """Graph convolutional network (Kipf and Welling, ICLR 2017, equation 2) and a linear head.

    A layer is H' = ReLU(D^-1/2 (A + I) D^-1/2 H W + b), with the degrees D of A + I. The head reads the pooled nodes;
    of data with a class of each node it reads each of them. With two layers and dropout this is the network of FED-PUB
    (Baek et al., ICML 2023) without its masks.
    """

    name: Literal["gcn"] = Field(default="gcn", description=NAME)
    pooling: Pooling = Field(default="mean", description=_POOLING)

    def _made(self, nodes: int, inputs: int, outputs: int, pooling: Pooling | None) -> ClassificationModel:
        return GCN(nodes, inputs, outputs, self.layers, self.hidden, pooling, self.norm, self.dropout)


class GINModel(_GraphModel):
    """Graph isomorphism network (Xu et al., ICLR 2019, equation 4.1) and a linear head.

    A layer is h_v' = MLP((1 + eps) h_v + sum of a_uv h_u over neighbours u), with two linear layers, a ReLU after each,
    and eps that is learnt from 0 on. With ``jumping`` the head reads the pooled nodes of all layers and of the inputs,
    one after the other (equation 4.2), else those of the last layer. The authors' batch normalization of nodes is not
    part of it, since it mixes graphs; ``norm=layer`` keeps large sums in bounds.
    """

    name: Literal["gin"] = Field(default="gin", description=NAME)
    layers: int = Field(default=3, ge=1, le=64, description="How many times nodes hear from their neighbours.")
    pooling: Pooling = Field(default="sum", description=_POOLING)
    jumping: bool = Field(default=True, description="Whether the head reads all layers and the inputs, or the last.")
    learn_eps: bool = Field(default=True, description="Whether eps is learnt; false: it is 0.")

    def _made(self, nodes: int, inputs: int, outputs: int, pooling: Pooling | None) -> ClassificationModel:
        layers = [
            _Isomorphic(self.hidden if layer else inputs, self.hidden, self.norm, self.learn_eps)
            for layer in range(self.layers)
        ]
        return GIN(nodes, inputs, outputs, layers, self.hidden, pooling, self.dropout, self.jumping)


class _GraphNetwork(ClassificationModel):
    """Layers, pooling and head; features are of shape (b, f), or (b, n, f) without pooling.

    Args:
        nodes: n.
        pooling: None: none is done.
        width: f.
        outputs: C.
        dropout: share of numbers that are left out after a layer.
    """

    def __init__(self, nodes: int, pooling: Pooling | None, width: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self._nodes, self._pooling = nodes, pooling
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, outputs)

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits

    def _pooled(self, numbers: Tensor, exists: Tensor) -> Tensor:
        """Nodes of shape (b, n, f) as graphs, shape (b, f); those that do not exist, where ``exists`` is 0, are out."""
        if self._pooling is None:
            return numbers
        if self._pooling == "max":
            least = torch.finfo(numbers.dtype).min
            most = numbers.masked_fill(exists == 0, least).amax(-2)
            return most * (exists.sum(-2) > 0)  # what pads a mini-batch may have no node
        total = (numbers * exists).sum(-2)
        return total if self._pooling == "sum" else total / exists.sum(-2).clamp(min=1)


class GCN(_GraphNetwork):
    """See :class:`GCNModel`.

    Args:
        nodes: n.
        inputs: numbers of a node.
        outputs: C.
        layers: how many.
        hidden: numbers of a node after each layer.
        pooling: None: none is done.
        norm: before the activation.
        dropout: after it.
    """

    def __init__(
        self,
        nodes: int,
        inputs: int,
        outputs: int,
        layers: int,
        hidden: int,
        pooling: Pooling | None,
        norm: NodeNorm,
        dropout: float,
    ) -> None:
        super().__init__(nodes, pooling, hidden, outputs, dropout)
        self.layers = nn.ModuleList(_Convolution(hidden if layer else inputs, hidden, norm) for layer in range(layers))

    def features(self, x: Tensor) -> Tensor:
        edges, numbers = x[..., : self._nodes], x[..., self._nodes :]
        exists = numbers[..., :1]
        root = (edges.sum(-1, keepdim=True) + 1).rsqrt()
        for layer in self.layers:
            numbers = self.dropout(layer(numbers, edges, root))
        return self._pooled(numbers, exists)


class GIN(_GraphNetwork):
    """See :class:`GINModel`.

    Args:
        nodes: n.
        inputs: numbers of a node.
        outputs: C.
        layers: from the first to the last.
        hidden: numbers of a node after each of them.
        pooling: None: none is done.
        dropout: after a layer.
        jumping: whether the head reads all layers and the inputs.
    """

    def __init__(
        self,
        nodes: int,
        inputs: int,
        outputs: int,
        layers: list[_Isomorphic],
        hidden: int,
        pooling: Pooling | None,
        dropout: float,
        jumping: bool,
    ) -> None:
        super().__init__(nodes, pooling, inputs + hidden * len(layers) if jumping else hidden, outputs, dropout)
        self.layers = nn.ModuleList(layers)
        self._jumping = jumping

    def features(self, x: Tensor) -> Tensor:
        edges, numbers = x[..., : self._nodes], x[..., self._nodes :]
        exists = numbers[..., :1]
        found = [self._pooled(numbers, exists)]
        for layer in self.layers:
            numbers = self.dropout(layer(numbers, edges))
            found.append(self._pooled(numbers, exists))
        return torch.cat(found, -1) if self._jumping else found[-1]


class _Convolution(nn.Module):
    """A layer of GCN, from nodes (b, n, inputs) to (b, n, hidden).

    Args:
        inputs: numbers of a node.
        hidden: numbers after the layer.
        norm: before the activation.
    """

    def __init__(self, inputs: int, hidden: int, norm: NodeNorm) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, hidden, bias=False)
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.norm = node_norm(hidden, norm)

    def forward(self, numbers: Tensor, edges: Tensor, root: Tensor) -> Tensor:
        """Returns the nodes' next numbers; ``root`` is D^-1/2, shape (b, n, 1)."""
        # By rows and columns, since a normalized adjacency would be one more array of n^2 numbers a graph.
        scaled = root * self.linear(numbers)
        found: Tensor = self.norm(root * (edges @ scaled + scaled) + self.bias).relu()
        return found


class _Isomorphic(nn.Module):
    """A layer of GIN, from nodes (b, n, inputs) to (b, n, hidden).

    Args:
        inputs: numbers of a node.
        hidden: numbers after the layer.
        norm: before each activation.
        learn_eps: whether there is an eps.
    """

    def __init__(self, inputs: int, hidden: int, norm: NodeNorm, learn_eps: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.first_norm, self.second_norm = node_norm(hidden, norm), node_norm(hidden, norm)
        self.eps = nn.Parameter(torch.zeros(1)) if learn_eps else None

    def forward(self, numbers: Tensor, edges: Tensor) -> Tensor:
        """Returns the nodes' next numbers."""
        own = numbers if self.eps is None else (1 + self.eps) * numbers
        heard = self.first_norm(self.first(own + edges @ numbers)).relu()
        found: Tensor = self.second_norm(self.second(heard)).relu()
        return found


def node_norm(width: int, norm: NodeNorm) -> nn.Module:
    """Returns the normalization of nodes with ``width`` numbers."""
    return nn.LayerNorm(width) if norm == "layer" else nn.Identity()
