"""A personal copy that each client trains next to the federated model, held near what the server sent."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import Averaging, setting
from algorithms.proximity import declared_form, penalty
from rayfl.engine.client import Client, Draw
from rayfl.objectives import Declared, declared_by, is_loss_of_the_task
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

    def _personal_form(self) -> Declared | None:
        """What the personal objective is, where it is the task's loss and a pull towards the received model."""
        plain = is_loss_of_the_task(self.objective) and type(self).distance is PersonalCopy.distance
        return declared_form(self.form, self.proximal_weight) if plain else None

    @declared_by(_personal_form)
    def personal_objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The method's loss at the copy, and the proximal term of its parameters."""
        loss = self.objective(model, batch, task, None, draw)
        if not self.proximal_weight:
            return loss
        moved, anchor = _parameters(model, task), _parameters(frozen["received"], task)
        return loss + self.proximal_weight * self.distance(moved, anchor)

    def distance(self, model: Tree, anchor: Tree) -> Tensor:
        """What the proximal weight multiplies; a scalar."""
        return penalty(self.form, model, anchor)

    @property
    def form(self) -> str:
        """Which distance that is; see :func:`algorithms.proximity.penalty`."""
        return "half_squared"


def _parameters(tree: Tree, task: Task) -> Tree:
    """A tree of models or parts of models without their buffers."""
    return from_leaves(
        {path: leaf for path, leaf in leaves(tree) if path.rpartition("/")[2] not in task.network.buffer_names}
    )
