"""Steps along directions that server and clients share: clients send the slopes, which alone determine the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import check_sgd, setting
from algorithms.parts.accumulators import ACCUMULATOR, adding, check_unclipped
from algorithms.parts.zeroth_order import ZerothOrder, descending
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task
from rayfl.tasks.texts import next_power

_DIGITS = 3
"""Of a row, to the base 256: draws have the type of the model's tensors, which all have the numbers below 256."""


class SharedDirections(ZerothOrder):
    """A method whose model is the sum of its steps along directions that everybody can make.

    A local pass trains ``model`` and ``slopes``, a table in which each step writes a row.
    """

    newcomer: ClassVar[str] = "w"
    no_privacy: ClassVar[str] = "its clients send slopes of their losses, not changes of a model"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "statistics": "its losses are those of models in evaluation mode, which record no statistics",
        "all": "the model is made of slopes that belong to all of its parameters",
    }

    aggregation: Literal["samples", "uniform"] = setting(
        "uniform", "q_k", "weights of the mean of slopes: uniform 1/|S|; samples n_k / sum over the cohort"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        name, train = type(self).__name__, context.train
        check_sgd(name, train, "a step is to be told by its slope alone", heavy_ball=True)
        for option in ("momentum", "weight_decay"):
            if value := getattr(train, option):
                raise ConfigError(
                    f"a step of {name} is to be told by its slope alone, but train.{option} is {value}: set "
                    f"train.{option}=0, or choose algorithm=fedzo, whose clients send models"
                )
        check_unclipped(name, "", context)

    def objective(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """A term whose gradient is the estimate, and one whose step writes the slopes into a row of the table."""
        slopes, gradient = self.estimated(trained["model"], batch, task, draw["keys"])
        table = trained["slopes"]
        digits = torch.arange(_DIGITS, device=table.device)
        row = (draw["row"].to(torch.int64) << 8 * digits).sum(-1)
        there = (torch.arange(len(table), device=table.device) == row).to(table.dtype)
        found = there[:, None] * slopes.to(table.dtype)
        return descending(trained["model"], gradient, task) + adding(table, found)

    async def descended(self, client: Client, model: Tree, keys: np.ndarray) -> Tensor:
        """Takes local steps from the received model, and publishes where they lead.

        Args:
            client: who takes them.
            model: w.
            keys: of the directions, shape (steps, M, 7).

        Returns:
            The slopes, shape (steps, M).
        """
        steps, directions, _ = keys.shape
        first = next(iter(model.values()))
        # Clients are stacked if their tables are alike, and few tables are needed so.
        table = torch.zeros(next_power(steps), directions, dtype=first.dtype, device=first.device)
        trained = await client.train(
            {"model": model, "slopes": table},
            self.objective,
            draw=lambda generator, steps: {"keys": keys, "row": digits_of(np.arange(steps))},
            groups={"slopes": ACCUMULATOR},
            keep_optimizer=False,
            steps=steps,
        )
        client.publish(local=Predictor.of(trained["model"]))
        slopes: Tensor = trained["slopes"][:steps].cpu()
        return slopes

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}


def digits_of(rows: np.ndarray) -> np.ndarray:
    """Numbers of rows as entries of what ``draw`` returns, float64 of shape (*rows.shape, 3)."""
    found: np.ndarray = (rows[..., None] >> 8 * np.arange(_DIGITS) & 255).astype(np.float64)
    return found
