"""A server that has a model for each architecture of its clients, which are scored with that of their own."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from algorithms.base import Averaging
from algorithms.parts.architectures import architecture, task_of
from algorithms.parts.finetuning import FineTuning
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task


class ArchitectureModels(FineTuning, Averaging):
    """A method whose server keeps ``models``, w by the number of its architecture, each of which clients fine-tune."""

    mixes_architectures: ClassVar[bool] = True
    newcomer: ClassVar[str] = FineTuning.newcomer

    def init(self, task: Task, context: RoundContext) -> Tree:
        seed = context.streams.integer("init.global")
        initial = [candidate.network.initialize(seed) for candidate in task.candidates]
        return {"models": {str(number): model for number, model in enumerate(initial)}}

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        """None for clients of several architectures, whose changes have no common variance."""
        return super().update(trained, received, task) if len(task.candidates) == 1 else None

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        if len(task.candidates) == 1:
            return {"global": Predictor.of(server["models"]["0"])}
        return {
            f"architecture-{number}": Predictor.of(server["models"][str(number)], task=candidate)
            for number, candidate in enumerate(task.candidates)
        }

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        task = task_of(client)
        model = server["models"][str(architecture(client.id, len(client.task.candidates), client.context))]
        rows = {"global": Predictor.of(model, task=task)}
        if self.finetune_epochs is not None and client.context.final:
            rows["finetuned"] = Predictor.of(await self.finetune(client, model, task), task=task)
        return rows
