"""CA2FL: rounds without a barrier, in which the last changes of all clients correct the mean of those that arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from algorithms.base import Clients, setting
from algorithms.parts.finetuning import FineTuning
from algorithms.parts.mixture import parameters
from algorithms.parts.partial import part
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import loss
from rayfl.params import Tree, add_scaled, interpolate, num_bytes, subtract, weighted_sum, zeros_like
from rayfl.tasks.base import Predictor, Task


class CA2FL(FineTuning):
    """CA2FL (cached update calibration): the last change of every client stands in for those that are not in a buffer.

    Rounds have no barrier (``system.mode=buffered``): client i begins from the server's newest model w_i and takes as
    long as its device needs. Of the updates S that arrive next, K = ``train.clients_per_round`` of them, with x_i what
    client i trained, Delta_i = x_i - w_i, y_i its change before this one (zero before the first) and h the mean of the
    y_i of all N clients,

        v = h + 1/K sum_{i in S} (Delta_i - y_i)
        w <- w + eta_g v,    y_i <- Delta_i  for i in S,    h <- h + 1/N sum_{i in S} (Delta_i - y_i)

    A buffer holds more updates of fast clients than of slow ones; v weighs all clients alike, at the price of using old
    changes. Updates have no factor for their age. With all clients in every buffer it is FedBuff without such factors,
    and where nobody is late it is FedVARP. Running statistics step by the mean change of the buffer. With
    ``finetune_epochs`` each client fine-tunes the final model.

    Server: model w, h, and the models that clients under way began from. Client: y_i. Down: w. Up: x_i (which says as
    much as Delta_i). Evaluated: w (``global``).

    References:
        Wang, Cao, Wu, Chen, Chen: Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update
        Calibration, ICLR 2024, Algorithm 2.
    """

    name: Literal["ca2fl"] = "ca2fl"
    citation: ClassVar[str] = "Wang et al., ICLR 2024"
    asynchronous: ClassVar[bool] = True
    no_privacy: ClassVar[str] = "its server uses the changes that clients sent in earlier rounds once more"
    client_keeps: ClassVar[str] = "y_k"
    server_keeps: ClassVar[str] = "w, h, past w"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "there is no mean change of a parameter that is never sent; statistics is possible"
    }

    server_lr: float = setting(1.0, "eta_g", "step of the server along v", gt=0)

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        return {**server, "mean": zeros_like(parameters(server["model"], task))}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, kept = server["model"], server["mean"]
        began = [clients.received(client, server)["model"] for client in cohort]
        payloads = {client: {"model": tree} for client, tree in zip(cohort, began, strict=True)}
        mean = clients.mean(self.local_update, cohort, broadcast={}, payloads=payloads)
        late = any(clients.context.staleness(client) for client in cohort)
        start = weighted_sum(began, [1 / len(cohort)] * len(cohort)) if late else model
        news = subtract(subtract(part(mean["model"], kept), part(start, kept)), mean["last"])
        if late:
            moved = add_scaled(model, subtract(mean["model"], start), self.server_lr)
        else:  # the mean itself, to the bit, where it is the answer
            moved = interpolate(model, mean["model"], self.server_lr)
        corrected = add_scaled(part(moved, kept), subtract(kept, mean["last"]), self.server_lr)
        share = len(cohort) / clients.context.num_clients
        return {"model": {**moved, **corrected}, "mean": add_scaled(kept, news, share)}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received model; sends it, and what the server has had of this client before."""
        trained = await client.train(model, loss())
        client.publish(local=Predictor.of(trained))
        start = parameters(model, client.task)
        last = client.state.get("change") or zeros_like(start)
        client.state["change"] = subtract(parameters(trained, client.task), start)
        # the server of the paper keeps the last change itself, so that it is not sent once more
        return Weighted({"model": trained, "last": last}, size=num_bytes(trained))

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return self.sent(server), {}
