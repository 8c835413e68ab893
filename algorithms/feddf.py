"""FedDF: the server distils the ensemble of the clients' models into their mean, on public samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from algorithms.base import Clients
from algorithms.parts.architecture_models import ArchitectureModels
from algorithms.parts.architectures import architecture, task_of
from algorithms.parts.ensemble import EnsembleDistillation
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.params import Tree
from rayfl.tasks.base import Predictor


class FedDF(EnsembleDistillation, ArchitectureModels):
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
