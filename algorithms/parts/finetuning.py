"""Fine-tuning of a final model by each client for itself."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from algorithms.base import Algorithm, setting
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.objectives import TRAINED, loss
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task


class FineTuning(Algorithm):
    """A method whose final ``model`` each client may fine-tune once, after the last round (the ``-LU`` methods).

    Fine-tuning changes neither the training nor the global model; clients never sampled fine-tune too. Momentum
    starts empty.
    """

    newcomer: ClassVar[str] = "w; fine-tuned after the last round, if finetune_epochs is set"

    finetune_epochs: int | None = setting(
        None, "E_ft", "epochs of fine-tuning after the last round; null: no fine-tuning", ge=0
    )
    finetune_lr: float | None = setting(
        None,
        "eta_ft",
        "learning rate of fine-tuning; null: that of the last round",
        ge=0,
        unless={"finetune_epochs": (0,)},
    )
    finetune_scope: Literal["full", "head", "body"] = setting(
        "full", "", "which parameters fine-tuning moves", unless={"finetune_epochs": (0,)}
    )
    finetune_select: Literal["last", "best_val"] = setting(
        "last",
        "",
        "the model after the last epoch, or after the epoch with the lowest validation loss (never the model before "
        "fine-tuning; the last where a client has no validation samples)",
        unless={"finetune_epochs": (0,)},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.finetune_epochs is not None:
            if not self.finetuned_names(task.network):
                raise ConfigError(
                    f"algorithm.finetune_scope is {self.finetune_scope}, which has no parameter in this model: "
                    "set algorithm.finetune_scope=full"
                )
            return
        options = {name: field for name, field in type(self).model_fields.items() if name.startswith("finetune_")}
        changed = [f"algorithm.{name}" for name, field in options.items() if getattr(self, name) != field.default]
        if changed:
            raise ConfigError(f"{', '.join(changed)} without algorithm.finetune_epochs: set it, or drop them")

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        rows = {"global": Predictor.of(server["model"])}
        if self.finetune_epochs is not None and client.context.final:
            rows["finetuned"] = Predictor.of(await self.finetune(client, server["model"]))
        return rows

    async def finetune(self, client: Client, model: Tree, task: Task | None = None) -> Tree:
        """Local training of the part that ``finetune_scope`` names; the other parameters stay as received.

        Args:
            client: the client.
            model: the final model.
            task: its architecture, one of ``client.task.candidates``; default the client's task.
        """
        network = (task or client.task).network
        # A training pass writes running statistics into the tensors it is given: they must be the client's own
        # copy, never the received ones, which all clients of an actor share.
        scope = self.finetuned_names(network) + network.buffer_names
        lowest, best = math.inf, {}

        async def compare(tuned: Tree) -> None:
            nonlocal lowest, best
            loss = (await client.score(Predictor.of({**model, **tuned}, task=task), "validation")).loss
            if loss < lowest:
                lowest, best = loss, tuned

        last = await client.train(
            {name: model[name] for name in model if name in scope},
            self.finetune_objective,
            frozen={"received": model},
            epochs=self.finetune_epochs,
            lr=self.finetune_lr,
            keep_optimizer=False,
            each_epoch=compare if self.finetune_select == "best_val" else None,
            task=task,
            stream=".finetune",
        )
        return {**model, **(best or last)}

    def head(self, network: Network) -> tuple[str, ...]:
        """Names of the parameters that ``finetune_scope`` calls the head."""
        return network.head_names

    def finetuned_names(self, network: Network) -> tuple[str, ...]:
        """Names of the parameters that fine-tuning moves."""
        head = set(self.head(network))
        moves = {"full": (True, True), "head": (True, False), "body": (False, True)}
        in_head, in_body = moves[self.finetune_scope]
        return tuple(name for name in network.parameter_names if (in_head if name in head else in_body))

    @property
    def finetune_objective(self) -> Any:
        """Cross-entropy of the received model with its moving part, without any method's own terms."""
        return loss(TRAINED, completed_by="received")
