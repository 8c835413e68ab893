"""A personal copy that each client trains next to the federated model, held near what the server sent."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import Averaging, setting
from algorithms.proximity import penalty
from rayfl.engine.client import Client, Draw
from rayfl.params import Tree, from_leaves, leaves
from rayfl.tasks import Batch, Task


class PersonalCopy(Averaging):
    """A method whose clients minimise the method's own loss a second time, over a copy that never leaves them."""

    personalized: ClassVar[str] = "personalized"

    proximal_weight: float = setting(
        1.0, "lambda", "weight of the proximal term that holds the personal copy near the received one", ge=0
    )
    personal_epochs: int | None = setting(
        None, "E_D", "epochs of the personal copy's training; null: train.local_epochs", ge=0
    )
    unseen: Literal["init", "global"] = setting(
        "init", "", "personalized model of a client never sampled: the initial copy, or the server's model"
    )

    async def personal_update(
        self, client: Client, start: Tree, received: Tree, draw: Draw | None = None, keep_optimizer: bool | None = None
    ) -> Tree:
        """Trains the copy from ``start`` near ``received``, on batches and draws of its own (suffix ``.1``)."""
        return await client.train(
            start,
            self.personal_objective,
            frozen={"received": received},
            draw=draw,
            epochs=self.personal_epochs,
            keep_optimizer=keep_optimizer,
            stream=".1",
        )

    def personal_objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The method's loss at the copy, and the proximal term of its parameters."""
        loss = self.objective(model, batch, task, None, draw)
        if not self.proximal_weight:
            return loss
        moved, anchor = _parameters(model, task), _parameters(frozen["received"], task)
        return loss + self.proximal_weight * self.distance(moved, anchor)

    def distance(self, model: Tree, anchor: Tree) -> Tensor:
        """What the proximal weight multiplies: 1/2 ||model - anchor||^2, a scalar."""
        return penalty("half_squared", model, anchor)


def _parameters(tree: Tree, task: Task) -> Tree:
    """A tree of models or parts of models without their buffers."""
    return from_leaves(
        {path: leaf for path, leaf in leaves(tree) if path.rpartition("/")[2] not in task.network.buffer_names}
    )
