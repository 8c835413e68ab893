"""PFL-DA: encoders of the clients' own under a shared head, and a head of each client's own held near that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import check_head, setting
from algorithms.parts.heads import head_logits
from algorithms.parts.partial import PartialModel, part, shared_part
from algorithms.parts.proximity import proximity
from algorithms.parts.requirements import clipped_together
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class PFLDA(PartialModel):
    """PFL-DA (domain adaptation): every client has an encoder of its own under a shared head, and a head of its own.

    An encoder brings a client's samples to where one head serves all clients, against shifts of the inputs. A head of
    the client's own serves where the same inputs mean something else. With f(x) = B_k(x) the input of the last linear
    layer, client k goes down, from its encoder B_k, the received head W and its own head P_k,

        CE(W_k f) + CE(P_k [f]) + lambda/2 ||P_k - W||^2

    where brackets mark a constant: the first term moves B_k and W_k, which begins as W; the others move P_k alone. The
    server takes the mean of the W_k. B_k and W are those of LG-FedAvg with the same random numbers, whatever lambda is.

    Server: head W. Client: encoder B_k with its buffers, and head P_k, at first those of the common initial model;
    never sent. Down: W. Up: W_k and n_k. Evaluated: B_k with P_k (``personalized``), and with the latest W
    (``shared``). There is no global model.

    References:
        Shi, Kontar: Personalized Federated Learning via Domain Adaptation with an Application to Distributed 3D
        Printing, Technometrics, 2023.
    """

    name: Literal["pfl_da"] = "pfl_da"
    citation: ClassVar[str] = "Shi and Kontar, Technometrics 2023"
    needs: ClassVar[Mapping[Trait, str]] = {"features": "two heads read the same features"}
    client_keeps: ClassVar[str] = "B_k, P_k"
    server_keeps: ClassVar[str] = "W"
    newcomer: ClassVar[str] = "W, and an encoder and a head after a local update"
    shares: ClassVar[Literal["body", "head"]] = "head"

    head_group: Literal["last_layer"] = setting("last_layer", "", "the head: the last linear layer")
    proximal_weight: float = setting(1.0, "lambda", "weight of the distance of a client's head to the shared one", ge=0)

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("PFL-DA", task.network)
        super().check(task, context)

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return clipped_together(context, "the model and of the client's own head")

    async def local_update(self, client: Client, shared: Tree) -> Weighted:
        """Trains the received head with the client's encoder, and the client's own head; keeps the last two."""
        network = client.task.network
        found = await client.train(
            {"model": self.assembled(client, shared), "own": self.own_head(client)},
            self.objective,
            frozen={"received": part(shared, network.head_names)},
        )
        model, own = found["model"], found["own"]
        client.state.update(personal=part(model, self.personal(network)), head=own)
        client.publish(personalized=Predictor.of({**model, **own}), shared=Predictor.of(model))
        return self.weighted(client, part(model, self.shared(network)))

    @property
    def objective(self) -> Sum:
        """The losses of both heads, from one forward pass, and the proximal term."""
        return function(self._both) + self.proximal_weight * proximity("half_squared", "own", "received")

    def _both(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, logits = task.head_inputs_and_logits(trained["model"], batch)
        own = head_logits(task.network, trained["own"], features.detach())
        return task.loss_of(logits, batch) + task.loss_of(own, batch)

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.local_update(client, shared_part(server))
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = self.assembled(client, shared_part(server))
        return {"personalized": Predictor.of({**model, **self.own_head(client)}), "shared": Predictor.of(model)}

    def own_head(self, client: Client) -> Model:
        """P_k, that of the initial model until the client has trained."""
        stored: Tree | None = client.state.get("head")
        return part(client.initial_model(), client.task.network.head_names) if stored is None else stored
