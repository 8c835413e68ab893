"""FedRAP: what the clients share is a sparse view of all, to which each client adds a view of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import setting
from algorithms.parts.partial import PartialModel, part
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.objectives import Sum, frozen, function, squared_distance
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task


class FedRAP(PartialModel):
    """FedRAP (additive personalization): the body is the sum of a shared C and the client's own D_k.

    In a model that recommends (one client is one user) the body holds the vectors of items, and the head P_k is the
    user's: the score of item j is that of P_k for the vector C_j + D_kj. A client minimises over all three

        CE(C + D_k, P_k) - lambda_t ||D_k - C||^2 + mu_t ||C||_1,    (lambda_t, mu_t) = (lambda, mu) tanh(t / ramp)

    from the received C and its latest D_k and P_k, and sends C_k, of which the server takes the mean. The second term
    drives the two views apart, the third makes the shared one sparse; both weights grow from 0 in the first round, t=0.
    Sums and norms are over parameters; buffers (running statistics) are shared, and nothing is added to them.

    Nothing of this needs items: with another model the body is whatever ``head_group`` leaves. ``head_group``
    ``all_but_items`` adds views to the vectors of items alone.

    Server: C. Client: D_k and P_k, never sent. Down: C. Up: C_k and n_k. Evaluated: the latest C with the client's D_k
    and P_k (``personalized``); a client never sampled has the initial ones. There is no global model.

    References:
        Li, Long, Zhou: Federated Recommendation with Additive Personalization, ICLR 2024 (arXiv 2301.09109).
    """

    name: Literal["fedrap"] = "fedrap"
    citation: ClassVar[str] = "Li et al., ICLR 2024"
    client_keeps: ClassVar[str] = "D_k, P_k"
    server_keeps: ClassVar[str] = "C"
    newcomer: ClassVar[str] = "C, with a D_k and a P_k that it fits to it"

    difference_weight: float = setting(0.1, "lambda", "weight of what drives D_k and C apart", ge=0)
    sparsity_weight: float = setting(0.1, "mu", "weight of the absolute values of C", ge=0)
    reduction: Literal["mean", "sum"] = setting(
        "mean",
        "",
        "whether both terms are means over the numbers of C, or sums",
        unless={"difference_weight and sparsity_weight": ((0, 0),)},
    )
    ramp: float = setting(
        10.0,
        "",
        "rounds in which both weights grow to 76 % (tanh 1); 0: they are there from the first round on",
        ge=0,
        unless={"difference_weight and sparsity_weight": ((0, 0),)},
    )
    own_start: Literal["drawn", "zero"] = setting(
        "drawn", "", "D_k at first: drawn as the model's initial values are, the same for all clients, or 0"
    )
    own_lr: float | None = setting(
        None, "", "learning rate of D_k; null: that of the round; 0: D_k stays as it was", ge=0
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.head_group == "all":
            raise ConfigError(
                "algorithm.head_group=all leaves nothing that clients share, to which they could add views of their "
                "own: set head_group=last_layer, or algorithm=local"
            )

    def viewed(self, network: Network) -> tuple[str, ...]:
        """Names of the parameters that are sums of two views."""
        body = set(self.body(network))
        return tuple(name for name in network.parameter_names if name in body)

    def weights(self, round: int, count: int) -> Mapping[str, float]:
        """The factors of both terms' sums, ``apart`` and ``sparse``.

        Args:
            round: t, 0-indexed.
            count: how many numbers C has.
        """
        grown = math.tanh(round / self.ramp) if self.ramp else 1.0
        share = grown / (count if self.reduction == "mean" else 1)
        return {"apart": self.difference_weight * share, "sparse": self.sparsity_weight * share}

    async def local_update(self, client: Client, shared: Tree) -> Weighted:
        """Trains C, D_k and P_k together, and keeps the latter two."""
        trained = await self._trained(client, shared)
        client.publish(local=Predictor.of(whole(trained, client.task.network)))
        return self.weighted(client, trained["common"])

    async def _trained(self, client: Client, shared: Tree, lr: float | None = None, stream: str = "") -> Tree:
        """Returns C_k under ``common`` after training, and puts D_k and P_k into the client's state.

        Args:
            client: the client.
            shared: the received C.
            lr: learning rate of C; default the round's.
            stream: suffix of the streams.
        """
        head = self.head(client.task.network)
        start = {"common": shared, "own": self.own_view(client)}
        if head:
            start["head"] = part(self.own_head(client), head)
        count = sum(leaf.numel() for leaf in start["own"].values())
        trained = await client.train(
            start,
            self.objective,
            frozen=self.weights(client.round, count),
            groups={"own": ParameterGroup(lr=self.own_lr), "common": ParameterGroup(lr=lr)},
            stream=stream,
        )
        client.state["own"] = trained["own"]
        if head:
            client.state["personal"] = trained["head"]
        return trained

    @property
    def objective(self) -> Sum:
        """CE(C + D, P) - lambda_t ||D - C||^2 + mu_t ||C||_1."""
        found = function(_loss_of_sum)
        if self.difference_weight:
            found -= frozen("apart") * squared_distance("own", "common")
        if self.sparsity_weight:
            found += frozen("sparse") * function(_absolute)
        return found

    def own_view(self, client: Client) -> Tree:
        """D_k as last trained."""
        own: Tree | None = client.state.get("own")
        if own is not None:
            return own
        names = self.viewed(client.task.network)
        if self.own_start == "drawn":
            return part(client.fresh_model(shared=True), names)
        return {name: leaf.new_zeros(leaf.shape) for name, leaf in part(client.initial_model(), names).items()}

    def own_head(self, client: Client) -> Tree:
        """P_k as last trained."""
        own: Tree | None = client.state.get("personal")
        return client.initial_model() if own is None else own

    def assembled(self, client: Client, shared: Model) -> Tree:
        """The whole model of C, D_k and P_k."""
        views = {"common": shared, "own": self.own_view(client)}
        head = self.head(client.task.network)
        return whole({**views, "head": part(self.own_head(client), head)}, client.task.network)

    async def join(self, client: Client, server: Tree) -> Tree:
        """Fits D_k and P_k to C, which stays as it is."""
        await self._trained(client, server["shared"], lr=0.0, stream=".join")
        return {}


def whole(views: Mapping[str, Model], network: Network) -> Tree:
    """The model of ``common`` plus ``own`` and, if there is one, ``head``, in the network's order."""
    common = views["common"]
    added = {name: common[name] + leaf for name, leaf in views["own"].items()}
    return part({**common, **added, **views.get("head", {})}, network.parameter_names + network.buffer_names)


def _loss_of_sum(trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    return task.loss(whole(trained, task.network), batch)


def _absolute(trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    """The sum of the absolute values of C."""
    found: Tensor = sum(trained["common"][name].abs().sum() for name in trained["own"])
    return found
