"""A graph neural network with a channel for structure alone, which clients with other kinds of nodes can share."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.anatomy import under
from rayfl.models.architecture import INITIALIZATION, NAME, Architecture, Initialization, initialized
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.networks.graphs import NORM, NodeNorm, node_norm

STRUCTURE = "structure"
"""The kind of parameters that read the structure of graphs."""


class StructuralGIN(Architecture):
    """Graph isomorphism network with a second channel for the structure of graphs (Tan et al., AAAI 2023: FedStar).

    The structure of a node v is described by the probabilities that random walks from v are back after 1, 2, ...,
    ``walks`` steps, and by its degree as one of ``degrees`` classes (the last for that many and more). With x_v what a
    linear layer makes of the node's own numbers, and s_v what another one makes of that description, a layer is

        x_v' = ReLU(MLP(z_v + sum of z_u over neighbours u)),  z = (x, s)
        s_v' = tanh of a graph convolution (:class:`rayfl.models.networks.graphs.GCNModel`)

    and a graph is the sum over its nodes of a linear layer of (x_v, s_v), then a linear layer with ReLU, which the head
    reads. The channel of s is the group ``structure``. Walks and degrees count edges by their weights.
    """

    name: Literal["structural_gin"] = Field(default="structural_gin", description=NAME)
    layers: int = Field(default=3, ge=1, le=64, description="How many times nodes hear from their neighbours.")
    hidden: int = Field(default=64, ge=1, description="Numbers of a node in each channel after each layer.")
    walks: int = Field(default=16, ge=0, le=256, description="Steps of the longest random walk that describes a node.")
    degrees: int = Field(default=16, ge=0, le=4096, description="Classes of degrees that describe a node.")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Share of hidden numbers of x that a step leaves out after each layer."
    )
    norm: NodeNorm = Field(default="none", description=NORM)
    init: Initialization = Field(default="torch", description=INITIALIZATION)

    def build(self, spec: InputSpec) -> ClassificationModel:
        if spec.kind != "graph":
            raise self.misfit(spec, "graphs")
        if spec.target == "nodes":
            raise ModelError(
                "model structural_gin: it makes one vector of a graph's nodes, and here each node has a target of its "
                "own: choose model=gcn or model=gin"
            )
        if not self.walks + self.degrees:
            raise ModelError("model structural_gin: walks=0 and degrees=0 describe no structure: give one of them")
        nodes, width = spec.shape
        return initialized(_StructuralGIN(nodes, width - nodes, spec.num_classes, self), self.init)

    def network(self, spec: InputSpec) -> Network:
        """See the base class; the network has the group ``structure``."""
        found = super().network(spec)
        found.groups = {**found.groups, STRUCTURE: under(found.parameter_names, (STRUCTURE,))}
        return found


class _StructuralGIN(ClassificationModel):
    """See :class:`StructuralGIN`.

    Args:
        nodes: n.
        inputs: numbers of a node.
        outputs: C.
        form: the options.
    """

    def __init__(self, nodes: int, inputs: int, outputs: int, form: StructuralGIN) -> None:
        super().__init__()
        self._nodes, self._walks, self._degrees = nodes, form.walks, form.degrees
        width = form.hidden
        self.first = nn.Linear(inputs, width)
        self.structure = _Structure(form.walks + form.degrees, width, form.layers)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(2 * width, width),
                node_norm(width, form.norm),
                nn.ReLU(),
                nn.Linear(width, width),
                node_norm(width, form.norm),
            )
            for _ in range(form.layers)
        )
        self.joined = nn.Linear(2 * width, width)
        self.last = nn.Sequential(nn.Linear(width, width), node_norm(width, form.norm))
        self.dropout = nn.Dropout(form.dropout)
        self.head = nn.Linear(width, outputs)

    def features(self, x: Tensor) -> Tensor:
        edges, numbers = x[..., : self._nodes], x[..., self._nodes :]
        exists = numbers[..., :1]
        own, described = self.first(numbers), self.structure.first(self._description(edges))
        root = (edges.sum(-1, keepdim=True) + 1).rsqrt()
        for layer, convolution in zip(self.layers, self.structure.layers, strict=True):
            both = torch.cat((own, described), -1)
            own = self.dropout(layer(both + edges @ both).relu())
            scaled = root * described
            described = convolution(root * (edges @ scaled + scaled)).tanh()
        graphs = (self.joined(torch.cat((own, described), -1)) * exists).sum(-2)
        found: Tensor = self.dropout(self.last(graphs).relu())
        return found

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits

    def _description(self, edges: Tensor) -> Tensor:
        """How walks from each node go back to it, and its degree; shape (b, n, walks + degrees).

        Args:
            edges: weights, shape (b, n, n).
        """
        degree = edges.sum(-1)
        step = edges / degree.clamp_min(torch.finfo(edges.dtype).tiny)[..., None]
        walked, back = step, list[Tensor]()
        for length in range(self._walks):
            walked = step @ walked if length else step
            back.append(walked.diagonal(dim1=-2, dim2=-1)[..., None])
        classes = degree.round().clamp(1, max(self._degrees, 1)) - 1
        numbers = torch.arange(self._degrees, device=edges.device, dtype=edges.dtype)
        of_degree = (classes[..., None] == numbers).to(edges.dtype)
        return torch.cat([*back, of_degree], -1)


class _Structure(nn.Module):
    """The channel of structure.

    Args:
        inputs: numbers of a description.
        width: numbers of a node.
        layers: how many convolutions.
    """

    def __init__(self, inputs: int, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
