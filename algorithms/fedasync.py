"""FedAsync: the server mixes each client's model into its own as it arrives, the less the older it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from algorithms.base import Clients, setting
from algorithms.parts.finetuning import FineTuning
from algorithms.parts.proximity import proximity
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import TRAINED, Sum, loss
from rayfl.params import Tree, interpolate
from rayfl.tasks.base import Predictor


class FedAsync(FineTuning):
    """FedAsync (asynchronous federated optimization): every model is mixed into the server's as it arrives.

    Rounds have no barrier (``system.mode=buffered``): client k begins from the server's newest model w_k and takes as
    long as its device needs. It goes down

        CE(x) + rho/2 ||x - w_k||^2

    and sends the trained model x_k. With s_k the steps that the server has taken since, it then steps to

        w <- (1 - alpha_k) w + alpha_k x_k,    alpha_k = alpha s(s_k)

    where s is one of

        constant: s = 1
        polynomial: s = (1 + s_k)^-a
        hinge: s = 1 if s_k <= b, else 1 / (a (s_k - b) + 1)

    In the paper the server takes a step for each model: ``train.clients_per_round=1``, while ``system.concurrency``
    clients train at the same time. Of K models in a buffer it goes to the mean of the K models that it would step to.
    Buffers (running statistics) are mixed as parameters are, and are no part of the norm. With ``finetune_epochs`` each
    client fine-tunes the final model, on the cross-entropy alone.

    Server: model w, and the models that clients under way began from. Client: nothing. Down: w. Up: x_k.

    References:
        Xie, Koyejo, Gupta: Asynchronous Federated Optimization, OPT 2020 (arXiv 1903.03934), Algorithm 1.
    """

    name: Literal["fedasync"] = "fedasync"
    citation: ClassVar[str] = "Xie et al., OPT 2020"
    asynchronous: ClassVar[bool] = True
    no_privacy: ClassVar[str] = "its server counts and weighs models as they arrive"
    server_keeps: ClassVar[str] = "w, past w"

    mixing: float = setting(0.6, "alpha", "share of a fresh model in the server's", gt=0, le=1)
    staleness: Literal["constant", "polynomial", "hinge"] = setting(
        "polynomial", "s", "how the share falls with the steps that the server has taken in between"
    )
    exponent: float = setting(0.5, "a", "of the polynomial", ge=0, only={"staleness": ("polynomial",)})
    slope: float = setting(10.0, "a", "of the hinge", ge=0, only={"staleness": ("hinge",)})
    hinge: int = setting(
        4, "b", "the largest age whose share is that of a fresh model", ge=0, only={"staleness": ("hinge",)}
    )
    proximal_weight: float = setting(0.005, "rho", "weight of the proximal term; 0: none", ge=0)

    def remarks(self, context: RoundContext) -> Sequence[str]:
        wanted = context.cohort_size
        if wanted == 1:
            return ()
        return (
            f"train.clients_per_round is {wanted}: the server waits for {wanted} models, and mixes in their mean. In "
            "the paper it takes a step for each: set train.clients_per_round=1, and system.concurrency to how many "
            "clients train at a time",
        )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        payloads = {client: {"model": clients.received(client, server)["model"]} for client in cohort}
        mean = clients.mean(self.local_update, cohort, broadcast={}, payloads=payloads)
        shares = [self.share(clients.context.staleness(client)) for client in cohort]
        return {"model": interpolate(server["model"], mean, sum(shares) / len(shares))}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received model near itself; it weighs the less the older it is."""
        trained = await client.train(model, self.near, frozen={"received": model})
        client.publish(local=Predictor.of(trained))
        return Weighted(trained, self.share(client.staleness))

    @property
    def near(self) -> Sum:
        """CE + rho/2 ||x - w_k||^2."""
        return loss() + self.proximal_weight * proximity("half_squared", TRAINED, "received")

    def share(self, staleness: int) -> float:
        """alpha_k, the share of a model that is ``staleness`` steps of the server old."""
        if self.staleness == "polynomial":
            return float(self.mixing * (1 + staleness) ** -self.exponent)
        late = staleness - self.hinge
        return self.mixing / (self.slope * late + 1) if self.staleness == "hinge" and late > 0 else self.mixing

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}
