"""Methods whose server keeps a model of every client's own, of an architecture of the client's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from algorithms.base import Clients, setting
from algorithms.parts.finetuning import FineTuning
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.local_settings import LocalOptions
from rayfl.errors import ConfigError
from rayfl.metrics import Statistics
from rayfl.params import Tree
from rayfl.tasks.base import Model, Predictor, Task

_SPLITS = {"validation": ("validation",), "train": ("train",), "both": ("train", "validation")}


class OwnModels(FineTuning):
    """A method whose server has ``models`` and ``architectures``, one of each per client, under the client's number.

    A client's first architecture is the candidate that is the most accurate one after the client's own local
    training. Evaluated: the client's model (``personalized``), and after fine-tuning (``finetuned``).
    """

    personalized: ClassVar[str] = "personalized"
    keeps_models: ClassVar[bool] = True
    mixes_architectures: ClassVar[bool] = True
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("statistics", "all"), "clients train models of others next to their own, whose layers would be the same ones"
    )

    tuning_data: Literal["validation", "train", "both"] = setting(
        "validation", "D_i", "the client's samples on which models are compared"
    )
    initial_architecture: Literal["local"] | Annotated[int, Field(ge=0)] = setting(
        "local",
        "",
        "a client's first architecture: local, the most accurate one after local training alone; or the number of a "
        "candidate, for all clients",
        kept=True,
    )
    initial_epochs: int | None = setting(
        None, "", "epochs of that local training; null: as many as in all rounds together", ge=0, kept=True
    )
    warm: bool = setting(False, "", "begin with the models of that local training instead of initial ones", kept=True)

    def course(self, round: int, rounds: int) -> Any:
        """The number of rounds, which is that of the epochs of the first local training where none is given."""
        return rounds if self.initial_epochs is None and (self.warm or self.initial_architecture == "local") else None

    def course_of(self, task: Task, round: int, rounds: int) -> Any:
        """See :class:`Algorithm`; without ``warm`` clients train first only to choose among architectures."""
        return self.course(round, rounds) if self.warm or len(self._considered(task)) > 1 else None

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        fixed, available = self.initial_architecture, len(task.candidates)
        if fixed != "local" and fixed >= available:
            raise ConfigError(
                f"algorithm.initial_architecture is {fixed}, but the highest number of model.candidates is "
                f"{available - 1}: choose that or less, or local"
            )

    def check_data(self, task: Task, sizes: np.ndarray, public: int) -> None:
        super().check_data(task, sizes, public)
        without = int((sizes[:, 1] == 0).sum())
        if self.tuning_data == "validation" and without and self.compares(task):
            raise ConfigError(
                f"holdout.validation leaves {without} of {len(sizes)} clients without validation samples, on which "
                f"{self.name} compares models: raise it, or set algorithm.tuning_data=train (or both)"
            )

    def compares(self, task: Task) -> bool:
        """Returns whether clients compare models on their ``tuning_data``."""
        return len(self._considered(task)) > 1

    def init(self, task: Task, context: RoundContext) -> Tree:
        """All clients' initial models; nothing yet if these depend on the clients' samples (see :meth:`begun`)."""
        number, *others = self._considered(task)
        if others or self.warm:
            return {}
        seed = context.streams.integer("init.global")
        models = [task.candidates[number].network.initialize(seed) for _ in range(context.num_clients)]
        return self.tree(models, [number] * context.num_clients)

    def begun(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        """The server's tree; before round 0 every client may have to find its architecture first."""
        if "models" in server:
            return server
        found = clients.map(self.choose_architecture, cohort, {}, required=True)
        return self.tree([found[i]["model"] for i in cohort], [found[i]["architecture"] for i in cohort])

    @staticmethod
    def tree(models: Sequence[Tree], architectures: Sequence[int]) -> Tree:
        """The server's tree from models and architectures in the order of the clients."""
        return {
            "models": {str(i): model for i, model in enumerate(models)},
            "architectures": {str(i): number for i, number in enumerate(architectures)},
        }

    async def choose_architecture(self, client: Client) -> Tree:
        """Local training of every candidate; the most accurate one (among equals that of the lowest loss) is it."""
        options: LocalOptions = {"epochs": self.initial_epochs, "stream": ".architecture"}
        if self.initial_epochs is None:
            options["steps"] = client.context.rounds * client.num_steps()
        ranked = []
        for number in self._considered(client.task):
            task = client.task.candidates[number]
            initial = client.initial_model(task)
            trained = await client.train(initial, self.objective, task=task, **options)
            found = await self.compare(client, trained, number)
            ranked.append((-found.merit, found.loss, number, trained if self.warm else initial))
        *_, number, model = min(ranked, key=lambda candidate: candidate[:3])
        return {"architecture": number, "model": model}

    async def compare(self, client: Client, model: Model, architecture: int) -> Statistics:
        """Returns how a model does on the client's ``tuning_data``."""
        predictor = Predictor.of(model, task=client.task.candidates[architecture])
        parts = [await client.score(predictor, split) for split in _SPLITS[self.tuning_data]]
        return sum(parts, Statistics.empty(predictor.task.measures))

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """Each client's own model and nothing else."""
        models, architectures = server["models"], server["architectures"]
        clients = range(context.num_clients)
        return {}, {i: {"model": models[str(i)], "architecture": architectures[str(i)]} for i in clients}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model, task = server["model"], client.task.candidates[server["architecture"]]
        rows = {"personalized": Predictor.of(model, task=task)}
        if self.finetune_epochs is not None and client.context.final:
            rows["finetuned"] = Predictor.of(await self.finetune(client, model, task), task=task)
        return rows

    def _considered(self, task: Task) -> Sequence[int]:
        """The architectures a client may begin with."""
        fixed = self.initial_architecture
        return range(len(task.candidates)) if fixed == "local" else (fixed,)
