"""FedDF: the server distils the ensemble of the clients' models into their mean, on public samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from torch import Tensor

from algorithms.base import Clients
from algorithms.fedavg import FineTuned
from algorithms.parts.architectures import architecture, task_of
from algorithms.parts.ensemble import EnsembleDistillation
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task


class FedDF(EnsembleDistillation, FineTuned):
    """FedDF (ensemble distillation): after averaging, the server teaches the mean what all clients' models say.

    The server averages the models x_k of the cohort into w, as federated averaging does, and goes N steps down

        mean over a mini-batch of U of KL(softmax(T / tau) || softmax(f(w) / tau)),    T = 1/|S| sum_k f(x_k)

    where U are public samples without labels and T the mean logits of the clients' models on them, in evaluation mode.
    Clients may have different architectures (``model.candidates``), each a draw of the client's own: the server then
    has one w for each, averages those of one architecture, and distils the ensemble of all into each. An architecture
    that nobody of the cohort has starts from its last w.

    Server: w, for each architecture, and U. Client: nothing. Down: w. Up: x_k and n_k. Evaluated: w (``global``), that
    of the client's architecture; fine-tuned with ``finetune_epochs``.

    References:
        Lin, Kong, Stich, Jaggi: Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020,
        Algorithms 1 and 3, eq. 1.
    """

    name: Literal["feddf"] = "feddf"
    citation: ClassVar[str] = "Lin et al., NeurIPS 2020"
    no_privacy: ClassVar[str] = "its server takes a mean for each architecture, and has clients teach it afterwards"
    server_keeps: ClassVar[str] = "w, U"
    mixes_architectures: ClassVar[bool] = True

    def init(self, task: Task, context: RoundContext) -> Tree:
        seed = context.streams.integer("init.global")
        initial = [candidate.network.initialize(seed) for candidate in task.candidates]
        return {"models": {str(number): model for number, model in enumerate(initial)}}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        models, count = server["models"], len(clients.task.candidates)
        common: Tree = {"model": models["0"]} if count == 1 else {}
        own = {k: {"model": models[str(architecture(k, count, clients.context))]} for k in cohort}
        means = clients.means(self.local_update, cohort, common, own if count > 1 else None)
        models = {**models, **means}
        if self.distill_steps:
            models = self.taught(models, cohort, clients)
        return {"models": models}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received model, and keeps it until it has taught."""
        task = task_of(client)
        trained = await client.train(model, self.objective, task=task)
        if self.distill_steps:
            client.state["teacher"] = trained
        client.publish(local=Predictor.of(trained, task=task))
        number = architecture(client.id, len(client.task.candidates), client.context)
        return replace(self.weighted(client, trained), group=str(number))

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
