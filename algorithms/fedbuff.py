"""FedBuff: the server steps whenever a buffer of clients' updates is full, whatever model they began from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.finetuning import FineTuning
from algorithms.parts.mixture import parameters
from algorithms.parts.partial import part
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree, add_scaled, interpolate, subtract, weighted_sum, zeros_like
from rayfl.tasks.base import Task


class Buffered(Averaging):
    """An averaging method in rounds without a barrier: a round is the buffer of the updates that arrived in it.

    With w the server's model, w_k what client k began from, x_k what it trained and s_k how many steps the server has
    taken in between, it takes the step

        w + sum_k q_k c(s_k) (x_k - w_k)

    with q_k as ``aggregation`` says, over all updates of the buffer whatever their c. A class that also derives from an
    averaging method has that one's local update, and a class that derives from FedOpt before it that server's step.
    """

    asynchronous: ClassVar[bool] = True
    no_privacy: ClassVar[str] = "its server counts and weighs updates as they arrive"

    aggregation: Literal["samples", "uniform", "population"] = setting(
        "uniform",
        "q_k",
        "weights of the updates: uniform 1 / the number of updates in the buffer; samples n_k / sum over them; "
        "population n_k / sum over all clients",
    )
    staleness: Literal["polynomial", "constant", "threshold"] = setting(
        "polynomial",
        "c(s)",
        "factor on an update that is s steps of the server old: polynomial 1 / (1 + s)^a; constant 1; threshold 1 up "
        "to an age, then another number",
    )
    staleness_exponent: float = setting(0.5, "a", "of the polynomial", ge=0)
    staleness_threshold: int = setting(1, "", "the largest age whose factor is 1 (threshold)", ge=0)
    stale_factor: float = setting(0.001, "", "the factor of older updates (threshold)", gt=0, le=1)
    unit_staleness: float = setting(
        0.0,
        "",
        "the age whose factor is 1, as all factors are divided by its own; the authors' code has 1",
        ge=0,
        unless={"staleness_exponent": (0,)},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        of = {"polynomial": ("staleness_exponent",), "threshold": ("staleness_threshold", "stale_factor")}
        idle = {name for kind, names in of.items() if kind != self.staleness for name in names}
        idle |= {"unit_staleness"} if self.staleness == "constant" else set()
        fields = type(self).model_fields
        given = [name for name in fields if name in idle and getattr(self, name) != fields[name].default]
        if given:
            raise ConfigError(
                f"algorithm.staleness is {self.staleness}, which has no {', '.join(given)}: drop "
                f"{'it' if len(given) == 1 else 'them'}, or choose another staleness"
            )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, staleness = server["model"], clients.context.staleness
        began = {client: clients.received(client, server)["model"] for client in cohort}
        payloads = {client: {"model": tree} for client, tree in began.items()}
        mean = clients.mean(self.buffered_update, cohort, broadcast={}, payloads=payloads)
        samples = clients.num_samples(cohort).tolist()
        shares = [1] * len(cohort) if self.aggregation == "uniform" else samples
        everyone = clients.num_samples(range(clients.context.num_clients))
        whole = int(everyone.sum()) if self.aggregation == "population" else sum(shares)
        # q_k c(s_k), up to the factor 1 / whole
        weights = [share * self.scale(staleness(client)) for client, share in zip(cohort, shares, strict=True)]
        total = sum(weights)
        length = total / whole  # sum_k q_k c(s_k): the step is this multiple of the weighted mean of x_k - w_k
        if not any(staleness(client) for client in cohort):
            # the mean itself, to the bit, where it is the answer
            return {"model": interpolate(model, mean, length)}
        start = weighted_sum([began[client] for client in cohort], [weight / total for weight in weights])
        return {"model": add_scaled(model, subtract(mean, start), length)}

    async def buffered_update(self, client: Client, model: Tree) -> Weighted:
        """The local update, whose weight is the less the older it is."""
        found = await self.local_update(client, model)
        return replace(found, weight=found.weight * self.scale(client.staleness))

    def scale(self, staleness: int) -> float:
        """c(s), the factor on an update that is ``staleness`` steps of the server old; 1 exactly for the unit."""
        return self._factor(staleness) / self._factor(self.unit_staleness)

    def _factor(self, staleness: float) -> float:
        if self.staleness == "constant":
            return 1.0
        if self.staleness == "threshold":
            return 1.0 if staleness <= self.staleness_threshold else self.stale_factor
        return float((1 + staleness) ** -self.staleness_exponent)


class FedBuff(FineTuning, Buffered):
    """FedBuff: clients train at their own speed, and the server steps whenever K updates have arrived.

    Rounds have no barrier (``system.mode=buffered``): a client begins from the server's newest model and takes as long
    as its device needs; meanwhile the server goes on. Of the K = ``train.clients_per_round`` updates that arrive next,
    with x_k what client k trained, w_k what it began from and s_k the steps of the server in between,

        w <- w + eta_g 1/K sum_k c(s_k) (x_k - w_k),    c(s) = 1 / sqrt(1 + s)

    With ``server_momentum`` the server steps along u <- beta u + 1/K sum_k c(s_k) (x_k - w_k) instead. Running
    statistics step as parameters do, without momentum. With ``finetune_epochs`` each client fine-tunes the final model.

    Server: model w, with ``server_momentum`` also u; and the models that clients under way began from. Client: nothing.
    Down: w. Up: x_k (which says as much as x_k - w_k).

    References:
        Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous Aggregation,
        AISTATS 2022, Algorithm 1.
    """

    name: Literal["fedbuff"] = "fedbuff"
    citation: ClassVar[str] = "Nguyen et al., AISTATS 2022"
    server_keeps: ClassVar[str] = "w, u, past w"

    server_lr: float = setting(1.0, "eta_g", "step of the server along the mean of the buffer", gt=0)
    server_momentum: float = setting(0.0, "beta", "momentum of the server", ge=0, lt=1)

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        if not self.server_momentum:
            return server
        return {**server, "momentum": zeros_like(parameters(server["model"], task))}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, moved = server["model"], super().round(server, cohort, clients)["model"]
        stepped = interpolate(model, moved, self.server_lr)
        if not self.server_momentum:
            return {"model": stepped}
        start, end = (part(tree, server["momentum"]) for tree in (model, moved))
        momentum = add_scaled(subtract(end, start), server["momentum"], self.server_momentum)
        return {"model": {**stepped, **add_scaled(start, momentum, self.server_lr)}, "momentum": momentum}

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return self.sent(server), {}
