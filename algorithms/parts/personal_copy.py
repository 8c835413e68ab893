"""A personal copy that each client trains next to the federated model, held near what the server sent."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from algorithms.base import Averaging, setting
from algorithms.parts.proximity import proximity
from rayfl.engine.client import Client, Draw
from rayfl.objectives import TRAINED, Sum
from rayfl.params import Tree


class PersonalCopy(Averaging):
    """A method whose clients minimise the method's own loss a second time, over a copy that never leaves them."""

    personalized: ClassVar[str] = "personalized"
    newcomer: ClassVar[str] = "w, and a copy that it trains from w and near it"

    proximal_weight: float = setting(
        1.0,
        "lambda",
        "weight of the proximal term that holds the personal copy near the received one",
        ge=0,
        unless={"personal_epochs": (0,)},
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

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains a personal copy from the server's model, near it."""
        model = server["model"]
        client.state["personal"] = await self.personal_update(client, model, received=model, keep_optimizer=False)
        return {}

    @property
    def joins_for(self) -> str:
        return "train.local_epochs" if self.personal_epochs is None else "algorithm.personal_epochs"

    @property
    def personal_objective(self) -> Any:
        """The method's loss at the copy, and the proximal term of its parameters."""
        return self.proximal_weight * self.proximal_term + self.objective

    @property
    def proximal_term(self) -> Sum:
        """Returns what the proximal weight multiplies."""
        return proximity("half_squared", TRAINED, "received")
