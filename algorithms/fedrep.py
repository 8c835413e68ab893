"""FedRep: a shared representation, and personal heads that are fitted to it first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from algorithms.base import setting
from algorithms.parts.finetuning import FineTuning
from algorithms.parts.partial import PartialModel, shared_part
from algorithms.parts.settings import epochs_without_effect
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree
from rayfl.tasks.base import Predictor


class FedRep(PartialModel, FineTuning):
    """FedRep: the clients share the body (representation), and train head and body one after the other.

    A client joins the received body G with its head P_k and minimises CE(G, P_k) in two passes, each with an
    optimizer of its own and with the other part frozen:

        P_k <- tau_h epochs from P_k on the head, at the received G
        G_k <- tau_b epochs from G on the body, at the new P_k

    The server takes the mean of the G_k. The second pass has batches of its own. Buffers (running statistics) are
    part of the body: what the first pass records in them is dropped.

    Server: body G. Client: head P_k, at first that of the common initial model; never sent. Down: G. Up: G_k and n_k.
    Evaluated: the latest G with the client's P_k (``personalized``); a client never sampled has the initial head.
    There is no global model. In the original all clients train their heads once more at the end and are evaluated
    then: ``finetune_epochs`` adds this model as the row ``finetuned``.

    Public codes differ in the epochs of the two passes: (E, 5) in the official SuPerFed code, (E - 1, 1) in FL-bench.

    References:
        Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning,
        ICML 2021, Algorithm 1.
    """

    name: Literal["fedrep"] = "fedrep"
    citation: ClassVar[str] = "Collins et al., ICML 2021"
    no_example_privacy: ClassVar[str] = ""
    client_keeps: ClassVar[str] = "P_k"
    server_keeps: ClassVar[str] = "G"

    head_epochs: int | None = setting(
        10, "tau_h", "epochs of the head's pass; null: train.local_epochs", ge=0, unless={"head_group": ("none",)}
    )
    body_epochs: int | None = setting(
        1, "tau_b", "epochs of the body's pass; null: train.local_epochs", ge=0, unless={"head_group": ("all",)}
    )
    finetune_scope: Literal["full", "head", "body"] = setting(
        "head",
        "",
        "which parameters fine-tuning after the last round moves (original: the head)",
        unless={"finetune_epochs": (0,)},
    )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return epochs_without_effect(self, ("head_epochs", "body_epochs"), context.train)

    async def train_model(self, client: Client, model: Tree) -> Tree:
        network = client.task.network
        fitted = {**model, **await self.train_part(client, model, self.head(network), self.head_epochs)}
        # without a first pass the second one is the round's first
        stream = "" if self.head_epochs == 0 or not self.head(network) else ".1"
        return {**fitted, **await self.train_part(client, fitted, self.body(network), self.body_epochs, stream)}

    def noised_batches(self, train: TrainConfig, samples: int) -> Mapping[int, int]:
        return {1: train.steps_of(samples, self.head_epochs) + train.steps_of(samples, self.body_epochs)}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        rows = await FineTuning.predictors(self, client, {"model": self.assembled(client, shared_part(server))})
        return {"personalized": rows.pop("global"), **rows}
