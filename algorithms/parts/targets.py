"""Clients that keep a target network beside their model: a moving average of it, with which BYOL compares."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Averaging, setting
from algorithms.parts.accumulators import ACCUMULATOR, averaging, check_unclipped
from algorithms.parts.partial import part
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.models.base import Network
from rayfl.models.networks.siamese import PREDICTOR
from rayfl.params import Tree, interpolate
from rayfl.tasks.base import Batch, Task
from rayfl.tasks.self_supervised import SelfSupervised


class KeepsTarget(Averaging):
    """Federated averaging of online networks, whose clients keep a target network where the task is BYOL's.

    A client's target network xi is at first the model that it receives. Each local step trains the online network
    theta on BYOL's loss, with projections of xi in training mode, and then sets xi to m xi + (1 - m) theta, for
    parameters. Running statistics of xi are those of its own passes.
    """

    keeps_target: ClassVar[bool] = True

    target_momentum: float = setting(
        0.99, "m", "share of the target network that each local step keeps; of task.objective=byol", ge=0, le=1
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if is_byol(task):
            check_unclipped(self.name, "task.objective=byol", context)

    async def train_online(self, client: Client, start: Tree, received: Tree) -> Tree:
        """Trains the online network, and with BYOL keeps the target network that follows it.

        Args:
            client: the client.
            start: its online network.
            received: what a client that has no target network yet takes for one.

        Returns:
            The online network.
        """
        if not is_byol(client.task):
            return await client.train(start, self.objective)
        kept: Tree = client.state.get("target", received)
        trained = await client.train(
            {"online": start, "target": kept},
            self.byol_objective,
            groups={"target": ACCUMULATOR},
            draw=self.shares,
        )
        online: Tree = trained["online"]
        names = client.task.network.parameter_names
        moved = interpolate(part(trained["target"], names), part(online, names), 1 - self.target_momentum)
        client.state["target"] = {**trained["target"], **moved}
        return online

    def shares(self, generator: np.random.Generator, steps: int) -> Tree:
        """By step, the share of the online network that the target network takes before it; none before the first."""
        return {"share": np.array([0.0] * (steps > 0) + [1 - self.target_momentum] * (steps - 1))}

    def byol_objective(self, model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> Tensor:
        """BYOL's loss with the target network as the step before has left it, which the step then keeps."""
        online, kept = model["online"], model["target"]
        names = task.network.parameter_names
        # What a step does after it, this does before the next one: the target network then needs no step of its own.
        share = draw["share"].to(online[names[0]])
        moved = {name: torch.lerp(kept[name], online[name], share).detach() for name in names}
        outputs = task.logits(online, batch)
        aimed = task.logits({**kept, **moved}, batch)
        followed = torch.stack([averaging(kept[name], moved[name], 1.0) for name in names]).sum()
        loss: Tensor = task.loss_towards(outputs, aimed, batch)
        return loss + followed


def is_byol(task: Task) -> bool:
    """Returns whether a task's loss compares with a target network."""
    return isinstance(task, SelfSupervised) and task.objective.name == "byol"


def predictor_names(network: Network) -> tuple[str, ...]:
    """Returns the names of the predictor's tensors; of a network without one, of the head's."""
    return network.groups.get(PREDICTOR) or network.head_names
