"""The task node_classification: a class of each node of a client's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from rayfl.examples import InputSpec
from rayfl.metrics import Measures, Metric
from rayfl.metrics.nodes import NODE_LOSS, NodeMeasures
from rayfl.models.base import Network
from rayfl.tasks.base import Batch, NetworkTask
from rayfl.tasks.section import TaskSection


class NodeClassification(NetworkTask):
    """Node classification: a class for each node; the loss of a graph is a mean over its nodes that count.

    The network's outputs are of shape (b, n, C); predictions are log-probabilities. Several models predict the
    logarithm of their mean probability. All nodes and edges are read in training (Kipf and Welling, 2017): of those of
    other splits, the labels alone are not.
    """

    name = "node_classification"
    target = "nodes"

    @cached_property
    def measures(self) -> Measures:
        """Returns how predictions are scored."""
        return NodeMeasures(self.network.head_shape[0] if self.spec is None else self.spec.num_classes)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the mean of the graphs' losses."""
        return batch.mean(NODE_LOSS(outputs.log_softmax(-1), batch.y))

    def predicted(self, outputs: Tensor) -> Tensor:
        """Returns log-probabilities."""
        return outputs.log_softmax(-1)

    def mixed(self, predictions: Sequence[Tensor]) -> Tensor:
        """Returns the logarithm of the mean probability."""
        return torch.stack(list(predictions)).logsumexp(0) - torch.tensor(float(len(predictions))).log()


class NodeClassificationSection(TaskSection):
    """Node classification, one of several classes for each node of a graph: cross-entropy, accuracy and macro F1."""

    learns_from = "nodes"

    name: Literal["node_classification"] = Field("node_classification", description="What is learned.")

    def judged_by(self) -> tuple[Metric, ...]:
        """See the base class."""
        return NodeMeasures.metrics

    def maker(self, spec: InputSpec) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        """See the base class."""
        return lambda network, candidates: NodeClassification(network, candidates, spec)
