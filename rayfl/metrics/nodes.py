"""Classes of nodes: how many are right, over nodes and over classes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rayfl.metrics.measures import Metric
from rayfl.metrics.segmentation import SegmentationMeasures, SoftMaskLoss

NODE_LOSS = SoftMaskLoss("cross_entropy")
"""The mean over a graph's nodes that count of -log p of their class; 0 for a graph without any."""


class NodeMeasures(SegmentationMeasures):
    """Accuracy over nodes, from counts that add up exactly.

    ``node_accuracy`` is the share of nodes that count whose class is the most probable one. ``node_f1_macro`` is the
    mean over classes of 2 I / (P + T), with I nodes of a class that are said to be of it, P that are said to be and T
    that are, without classes that are neither; nodes of all graphs together. ``loss`` is a mean over graphs.

    Args:
        classes: C.
    """

    metrics = (
        Metric("node_accuracy", "node accuracy", "higher", 100, 2, "%"),
        Metric("node_f1_macro", "node macro F1", "higher", 100, 2, "%"),
        Metric("loss", "loss", "lower"),
    )

    def __init__(self, classes: int) -> None:
        super().__init__(classes, NODE_LOSS)

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        found = super().values(vectors)
        return {
            "node_accuracy": found["pixel_accuracy"],
            "node_f1_macro": found["dice"],
            "loss": found["loss"],
        }

    def undefined(self, name: str) -> str:
        """See the base class."""
        return "no node counts"
