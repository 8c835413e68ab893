"""Scores of nodes against counts by hand."""

from __future__ import annotations

import numpy as np
import torch

from rayfl.metrics.language import IGNORED
from rayfl.metrics.nodes import NodeMeasures


def test_nodes_are_counted_over_graphs() -> None:
    truth = torch.tensor([[0, 1, 2, IGNORED], [2, IGNORED, IGNORED, IGNORED]])
    said = torch.tensor([[0, 2, 2, 1], [0, 1, 1, 1]])
    predictions = torch.full((2, 4, 4), 0.1).scatter(2, said[..., None], 0.7).log()
    measures = NodeMeasures(4)
    found = {
        name: float(value) for name, value in measures.values(measures.statistics(predictions, truth).numpy()).items()
    }
    assert found["node_accuracy"] == 2 / 4
    # class 0: 1 of 2 said, 1 true; class 1: never said, 1 true; class 2: 1 right of 2 said and 2 true; class 3 is out
    np.testing.assert_allclose(found["node_f1_macro"], np.mean([2 / 3, 0, 2 / 4]))
    loss = [np.mean([-np.log(0.7), -np.log(0.1), -np.log(0.7)]), -np.log(0.1)]
    np.testing.assert_allclose(found["loss"], np.mean(loss), rtol=1e-6)
    assert set(found) == {metric.name for metric in measures.metrics}
    assert measures.undefined("node_accuracy") == "no node counts"
