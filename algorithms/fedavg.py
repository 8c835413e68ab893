"""Federated averaging, with or without fine-tuning of the final model."""

from __future__ import annotations

from typing import ClassVar, Literal

from algorithms.base import Averaging, setting
from rayfl.engine.client import Client, RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks import Predictor, Task


class FineTuned(Averaging):
    """Averaging whose final model each client may fine-tune once, after the last round (the ``-LU`` methods).

    Fine-tuning changes neither the training nor the global model; clients never sampled fine-tune too.
    """

    finetune_epochs: int | None = setting(
        None, "E_ft", "epochs of fine-tuning after the last round; null: no fine-tuning", ge=0
    )
    finetune_lr: float | None = setting(
        None, "eta_ft", "learning rate of fine-tuning; null: that of the last round", ge=0
    )
    finetune_scope: Literal["full", "head", "body"] = setting("full", "", "which parameters fine-tuning moves")

    def check(self, task: Task, context: RoundContext) -> None:
        if self.finetune_epochs is None and (self.finetune_lr is not None or self.finetune_scope != "full"):
            raise ConfigError(
                "algorithm.finetune_lr and algorithm.finetune_scope need algorithm.finetune_epochs: "
                "set it, or drop them"
            )

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        rows = {"global": Predictor.of(server["model"])}
        if self.finetune_epochs is not None and client.context.final:
            rows["finetuned"] = Predictor.of(await self.finetune(client, server["model"]))
        return rows

    async def finetune(self, client: Client, model: Tree) -> Tree:
        """Plain local training of the part that ``finetune_scope`` names; the other parameters stay as received."""
        network = client.task.network
        parameters = {"full": network.parameter_names, "head": network.head_names, "body": network.body_names}
        # A training pass writes running statistics into the tensors it is given: they must be the client's own
        # copy, never the received ones, which all clients of an actor share.
        scope = parameters[self.finetune_scope] + network.buffer_names
        moving = {name: model[name] for name in model if name in scope}
        fixed = {name: model[name] for name in model if name not in scope}
        tuned = await client.train(
            moving,
            _loss_of_parts,
            frozen=fixed,
            epochs=self.finetune_epochs,
            lr=self.finetune_lr,
            stream=".finetune",
        )
        return {name: tuned.get(name, model[name]) for name in model}


def _loss_of_parts(moving, batch, task, fixed, draw):  # type: ignore[no-untyped-def]
    """Cross-entropy of a model given in two parts, without any method's own terms."""
    return task.loss({**moving, **fixed}, batch)


class FedAvg(FineTuned):
    """Federated averaging (FedAvg): the mean of models trained locally.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. With ``finetune_epochs`` it is FedAvg-LU
    (FedAvg with fine-tuning): the final model is trained once more by each client for itself.

    References:
        McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from
        Decentralized Data, AISTATS 2017, Algorithm 1.
    """

    name: Literal["fedavg"] = "fedavg"
    citation: ClassVar[str] = "McMahan et al., AISTATS 2017"
