"""Centralized training: what could be learned if all samples were in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from algorithms.base import Clients, setting
from algorithms.parts.finetuning import FineTuning
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.batches import num_steps
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Task


class Centralized(FineTuning):
    """Centralized training: one model on the pooled samples of all clients.

    The baseline that knows everybody's samples. In a round one more client, which owns the samples of all, trains
    w with the training section's batch size; its momentum goes on from round to round. Who is sampled does not
    matter. With ``finetune_epochs`` each client finally fine-tunes w for itself.

    Server: model w. Client: nothing; the owner of all samples keeps its momentum buffers. Down: w. Up: w; these two
    messages of a round are between the server and that owner, the collection of the samples is not counted.
    Evaluated: w on each client's own samples.

    References:
        The baseline "Centralized" of Matsuda, Sasaki, Xiao, Onizuka: FedMe: Federated Learning via Model Exchange,
        SDM 2022.
    """

    name: Literal["centralized"] = "centralized"
    citation: ClassVar[str] = "baseline"
    no_privacy: ClassVar[str] = "it has the samples of all clients in one place"
    no_example_privacy: ClassVar[str] = "it has the samples of all clients in one place"
    newcomer: ClassVar[str] = "w; fine-tuned after the last round, if finetune_epochs is set"
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("statistics", "all"), "one client trains on everybody's samples, and the others have no layers of their own"
    )

    budget: Literal["epochs", "steps"] = setting(
        "epochs",
        "",
        "work of a round: epochs, train.local_epochs passes over all samples; steps, as many steps as a federated "
        "client with the mean number of samples takes",
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if context.train.stragglers:
            raise ConfigError("Centralized trains on everybody's samples, so no client can lag: set train.stragglers=0")

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        owner = clients.pooled
        return {"model": clients.map(self.pooled_update, [owner], broadcast={"model": server["model"]})[owner]}

    async def pooled_update(self, client: Client, model: Tree) -> Tree:
        """Goes on training the model on everybody's samples."""
        train, samples = client.context.train, client.num_samples
        if self.budget == "steps":
            steps = client.num_steps(samples=-(-samples // client.context.num_clients))
        else:  # limits of a client's steps are none of a pass over everybody's samples
            steps = num_steps(samples, train.batch_size, train.local_epochs, train.drop_last)
        return await client.train(model, self.objective, steps=steps, keep_optimizer=True)
