"""FedMe: clients exchange whole models, of any architecture, and keep the ones that suit them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from algorithms.base import Clients, check_everyone, setting
from algorithms.parts.exchange import aggregated, clustered, draw_sources
from algorithms.parts.own_models import OwnModels
from algorithms.parts.requirements import clipped_together
from algorithms.parts.transfer import distillation
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


@dataclass(frozen=True)
class PairLoss:
    """The sum of the losses of two models of given architectures, each a constant for the other (eqs. 3 and 4).

    Attributes:
        personal: architecture of the personalized model w_p.
        exchanged: architecture of the exchanged model w_ex.
        mutual: whether each model also learns what the other one predicts.
    """

    personal: int
    exchanged: int
    mutual: bool

    def __call__(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        return sum(self.losses(model, batch, task))  # type: ignore[return-value]

    def losses(self, model: Any, batch: Batch, task: Task) -> tuple[Tensor, Tensor]:
        """L_p and L_ex, from one forward pass of each model."""
        own = task.candidates[self.personal].logits(model["personal"], batch)
        other = task.candidates[self.exchanged].logits(model["exchanged"], batch)
        return self._loss(own, other, batch, task), self._loss(other, own, batch, task)

    def _loss(self, student: Tensor, teacher: Tensor, batch: Batch, task: Task) -> Tensor:
        loss = task.loss_of(student, batch)
        return loss + distillation(student, teacher.detach(), batch, temperature=1.0) if self.mutual else loss


class FedMe(OwnModels):
    """FedMe: in every round each client trains its own model and another client's, and keeps the better architecture.

    The server clusters the models w_p by their outputs on the public samples U (MC) and sends client i two models: its
    own, and w_ex of slot Idx(i), drawn from its cluster. The client trains both on its samples (DML):

        L_p = CE(w_p) + KL(p_ex || p_p),    L_ex = CE(w_ex) + KL(p_p || p_ex),

    and picks slot a_i = i, or Idx(i) if w_ex has the lower loss (MT). The server averages all trained copies of each
    slot's model, uniformly, and client i continues with the average of slot a_i. Clients may have different
    architectures (``model.candidates``); at first each has the one in which its own local training does best.

    Server: K models w_p with their architectures, U. Client: nothing. Down: w_p, w_ex. Up: w_p, w_ex, a_i. All
    clients take part in every round. Evaluated: w_p (``personalized``), fine-tuned with ``finetune_epochs``.

    There is no public code. Where the text of the paper's running example lists one more copy in slot 1's average
    than eq. 8 does, the equation is followed.

    References:
        Matsuda, Sasaki, Xiao, Onizuka: FedMe: Federated Learning via Model Exchange, SDM 2022, Algorithm 1 and
        eqs. 3-4 (training), 7 (tuning), 8-9 (aggregation).
    """

    name: Literal["fedme"] = "fedme"
    citation: ClassVar[str] = "Matsuda et al., SDM 2022"
    server_keeps: ClassVar[str] = "w_p of all clients, U"
    newcomer: ClassVar[str] = "-"
    no_newcomers: ClassVar[str] = "the server keeps and exchanges the models of a fixed set of clients"
    needs_everyone: ClassVar[str] = "every client trains its own model and another's in every round"

    model_tuning: bool = setting(True, "MT", "clients go over to the exchanged model if it has the lower loss")
    mutual_learning: bool = setting(True, "DML", "the two models of a client learn from each other's predictions")
    model_clustering: bool = setting(True, "MC", "models are exchanged within clusters; see cluster_rounds")
    cluster_rounds: tuple[Annotated[int, Field(ge=0)], ...] = setting(
        (),
        "K_t",
        "rounds (0-indexed) from which there is one more cluster than before, starting from one, e.g. [150, 225, 275]",
        only={"model_clustering": (True,)},
    )
    cluster_outputs: Literal["probabilities", "logits"] = setting(
        "probabilities",
        "",
        "the outputs on the public samples by which models are clustered",
        only={"model_clustering": (True,)},
    )
    exchange: Literal["random", "derangement"] = setting(
        "random",
        "",
        "random: every client draws another slot of its cluster, so one model may go to several clients; derangement: "
        "every model goes to exactly one other client of its cluster",
    )

    def needed(self) -> Mapping[Trait, str]:
        """Returns what mutual learning and clustering need."""
        if self.mutual_learning:
            return {"distribution": "with mutual_learning clients distill probabilities of classes"}
        if self.model_clustering and self.cluster_rounds and self.cluster_outputs == "probabilities":
            return {"distribution": "cluster_outputs=probabilities compares probabilities of classes"}
        return {}

    def remarks(self, context: RoundContext) -> Sequence[str]:
        together = clipped_together(context, "the personal and of the exchanged model")
        if not self.model_clustering or any(start < context.rounds for start in self.cluster_rounds):
            return together
        return (
            *together,
            "the clients stay one cluster: algorithm.cluster_rounds is "
            f"{list(self.cluster_rounds)}, of which none is before the last of the run's {context.rounds} rounds",
        )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_everyone("in fedme every client takes part in every round", context)
        if context.num_clients < 2:
            raise ConfigError("partition: fedme exchanges models, so it needs two clients at least; there is only one")
        if context.train.persist_optimizer:
            raise ConfigError(
                "train.persist_optimizer: models change hands in fedme, what their optimizers keep cannot; drop it"
            )

    def check_data(self, task: Task, sizes: np.ndarray, public: int) -> None:
        super().check_data(task, sizes, public)
        if self.model_clustering and self.cluster_rounds and not public:
            raise ConfigError(
                "holdout.public is 0, but fedme clusters models by their outputs on public samples: set "
                "holdout.public=1000, or algorithm.model_clustering=false"
            )

    def compares(self, task: Task) -> bool:
        return self.model_tuning or super().compares(task)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        server = self.begun(server, cohort, clients)
        models, architectures = [[server[key][str(i)] for i in cohort] for key in ("models", "architectures")]
        sources = self.sources(self._clusters(models, architectures, cohort, clients), clients.context)
        payloads: dict[int, Tree] = {
            i: {
                "personal": models[i],
                "exchanged": models[j],
                "architectures": {"personal": architectures[i], "exchanged": architectures[j]},
            }
            for i, j in zip(cohort, sources, strict=True)
        }
        replies = clients.map(self.local_update, cohort, {}, payloads, required=True)
        averages = aggregated(replies, sources)
        chosen = [sources[i] if replies[i]["replaces"] else i for i in cohort]  # a_i
        return self.tree([averages[a] for a in chosen], [architectures[a] for a in chosen])

    def clusters_in(self, round: int) -> int:
        """K_t, the number of clusters in round t (0-indexed)."""
        return 1 + sum(start <= round for start in self.cluster_rounds) if self.model_clustering else 1

    def sources(self, clusters: Sequence[int], context: RoundContext) -> list[int]:
        """Idx(i), the slot whose model client i receives: another one of its cluster, or any other if it is alone.

        Args:
            clusters: the cluster of every slot.
            context: has the round and the random streams.
        """
        return draw_sources(clusters, self.exchange, context.streams.generator("exchange", context.round))

    async def public_outputs(self, client: Client, model: Tree, architecture: int) -> Tree:
        """Returns what a model says of the public samples: shape (|U|, C)."""
        function = partial(_outputs, model, self.cluster_outputs == "probabilities")
        return {
            "outputs": await client.outputs(function, client.public(), task=client.task.candidates[architecture]),
        }

    async def local_update(
        self, client: Client, personal: Tree, exchanged: Tree, architectures: Mapping[str, int]
    ) -> Tree:
        """Trains both models; says whether the exchanged one shall replace the client's own."""
        loss = PairLoss(**architectures, mutual=self.mutual_learning)
        trained = await client.train({"personal": personal, "exchanged": exchanged}, loss)
        replaces = await self.replaces(client, trained, architectures)
        pair = {name: Predictor.of(trained[name], task=client.task.candidates[architectures[name]]) for name in trained}
        client.publish(personalized=pair["exchanged" if replaces else "personal"], local=pair["personal"])
        return {**trained, "replaces": int(replaces)}

    async def replaces(self, client: Client, trained: Tree, architectures: Mapping[str, int]) -> bool:
        """Returns whether a_i = Idx(i): the exchanged model, trained as well, has the lower loss (eq. 7)."""
        if not self.model_tuning:
            return False
        own, other = [
            await self.compare(client, trained[name], architectures[name]) for name in ("personal", "exchanged")
        ]
        return other.loss < own.loss

    def _clusters(
        self, models: Sequence[Tree], architectures: Sequence[int], cohort: Sequence[int], clients: Clients
    ) -> list[int]:
        """The cluster of every slot's model."""
        context = clients.context
        count = self.clusters_in(context.round)
        if count == 1:
            return [0] * len(models)
        payloads = {i: {"model": models[i], "architecture": architectures[i]} for i in cohort}
        # The server has the models and U: that actors compute the outputs is no communication.
        found = clients.map(self.public_outputs, cohort, {}, payloads, counted=False, required=True)
        outputs = np.stack([found[i]["outputs"].double().flatten().numpy() for i in cohort])
        return clustered(outputs, count, context.streams.generator("kmeans", context.round))


def _outputs(model: Model, probabilities: bool, x: Tensor, task: Any) -> Tensor:
    """Probabilities or logits of shape (b, C)."""
    logits: Tensor = task.network.logits(model, x, training=False)
    return logits.softmax(-1) if probabilities else logits
