"""FedZO: federated averaging whose local steps go along estimates of the gradient, made of losses alone."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from algorithms.base import Averaging, setting
from algorithms.parts.zeroth_order import ZerothOrder, descending
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.gradients.counted_normals import drawn_keys
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task


class FedZO(ZerothOrder, Averaging):
    """FedZO: federated averaging without backpropagation.

    A local step draws a mini-batch of b_1 samples and b_2 directions v_j from the unit sphere of the d parameters. f is
    the mean loss over the mini-batch:

        g = 1/b_2 sum_j d / mu ( f(w + mu v_j) - f(w) ) v_j
        w <- w - eta g

    Each step costs b_2 + 1 forward passes and no backward pass. With ``distribution=gaussian`` the entries of v_j are
    standard normal numbers, and d is left out; with ``difference=central`` a slope is

        ( f(w + mu v_j) - f(w - mu v_j) ) / (2 mu)

    for 2 b_2 forward passes. b_1 is ``train.batch_size``. Losses are those of models in evaluation mode: dropout is
    off, and running statistics are read and stay as they are. The estimate takes the place of the gradient in any
    optimizer of the training section.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k.

    References:
        Fang, Yu, Jiang, Shi, Jones, Zhou: Communication-Efficient Stochastic Zeroth-Order Optimization for Federated
        Learning, IEEE Transactions on Signal Processing 2022 (arXiv:2201.09531).
    """

    name: Literal["fedzo"] = "fedzo"
    citation: ClassVar[str] = "Fang et al., IEEE TSP 2022"

    directions: int = setting(5, "b_2", "directions of a local step", ge=1)
    distribution: Literal["sphere", "gaussian"] = setting(
        "sphere", "", "of the directions: uniform on the unit sphere (paper), or with standard normal entries"
    )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        trained = await client.train(model, self.objective, draw=self.draw)
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def draw(self, generator: np.random.Generator, steps: int) -> Tree:
        """The keys of the steps' directions."""
        return {"keys": drawn_keys(generator, steps, self.directions)}

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """<w, g>, whose gradient is the estimate g."""
        unit = self.distribution == "sphere"
        return descending(model, self.estimated(model, batch, task, draw["keys"], unit)[1], task)
