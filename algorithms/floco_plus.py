"""FLOCO+: FLOCO, and personal simplices held near the federated one."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from algorithms.base import setting
from algorithms.floco import Floco, barycenter, model_at, simplex_of
from algorithms.parts.personal_copy import PersonalCopy
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.params import Tree, map_leaves
from rayfl.tasks.base import Predictor


class FlocoPlus(PersonalCopy, Floco):
    """FLOCO+: FLOCO, and next to it a personal simplex of each client held near the federated one.

    Server and messages are FLOCO's. After its FLOCO update a client trains its personal body^k and endpoints
    theta^k_m for E_D epochs, with an optimizer, batches and points of its own; every mini-batch draws alpha where
    FLOCO draws it, before round tau on the whole simplex and then in the client's subregion:

        CE(w_alpha of the personal simplex) + lambda/2 (sum_m ||theta^k_m - theta_m||^2 + ||body^k - body||^2)

    with the body and the theta_m received in this round. Buffers (running statistics) are no part of the norm. With
    one endpoint (M = 0) it is Ditto. With ``posthoc`` nothing personal is trained or kept during the rounds: after the
    last one every client, sampled or not, makes that pass once, from the final body and endpoints.

    Server: as FLOCO. Client: body^k and theta^k_m, at first the initial simplex; never sent. Down, up: as FLOCO.
    Evaluated: FLOCO's barycentre (``global``), and the personal simplex at alpha_k, before round tau at the
    barycentre (``personalized``); for a client never sampled the server's simplex at that point, with ``unseen``
    ``init`` the initial one.

    The official code has lambda theta^k - theta for the gradient of the proximal term, which is right for lambda = 1
    only, and draws the personal alpha from the whole simplex forever.

    References:
        Grinwald, Wiesner, Nakajima: Federated Learning over Connected Modes, NeurIPS 2024, the extension FLOCO+.
        Its second pass: Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization,
        ICML 2021, Algorithm 1.
    """

    name: Literal["floco_plus"] = "floco_plus"  # type: ignore[assignment]
    citation: ClassVar[str] = "Grinwald et al., NeurIPS 2024"
    client_keeps: ClassVar[str] = "body^k, theta^k_m"
    newcomer: ClassVar[str] = "the simplex at its barycentre, and a copy that it trains from it and near it"

    unseen: Literal["init", "global"] = setting(
        "global",
        "",
        "personalized model of a client never sampled: the initial simplex, or the server's, at alpha_k",
        unless={"posthoc": (True,)},
    )
    posthoc: bool = setting(
        False, "", "one personal pass from the final simplex after the last round, instead of one a round"
    )

    async def local_update(self, client: Client, model: Tree, point: Tensor | None = None) -> Weighted:
        update = await super().local_update(client, model, point)
        if self.posthoc:
            return update
        start = client.state["personal"] if "personal" in client.state else self._initial(client, model)
        personal = await self.personal_update(client, start, received=model, draw=self.draw_around(point))
        client.state["personal"] = personal
        own = barycenter(self.vertices) if point is None else point
        client.publish(personalized=Predictor.of(model_at(personal, own, client.task)))
        return update

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains a personal simplex around the barycentre, from the server's and near it."""
        if not self.posthoc:  # there each client does that after the last round
            simplex = simplex_of(server)
            draw = self.draw_around(None)
            client.state["personal"] = await self.personal_update(
                client, simplex, received=simplex, draw=draw, keep_optimizer=False
            )
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        rows = await super().predictors(client, server)
        personal = await self._personal(client, server)
        return rows | {"personalized": Predictor.of(model_at(personal, self.point_of(client, server), client.task))}

    async def _personal(self, client: Client, server: Tree) -> Tree:
        """The simplex that the client's personalized model is a point of."""
        simplex = simplex_of(server)
        if self.posthoc:
            if not client.context.final:
                return simplex
            draw = self.draw_around(self.point_of(client, server) if self.is_assigned(client, server) else None)
            return await self.personal_update(client, simplex, received=simplex, draw=draw, keep_optimizer=False)
        if "personal" in client.state:
            return dict(client.state["personal"])
        return self._initial(client, simplex) if self.unseen == "init" else simplex

    def _initial(self, client: Client, like: Tree) -> Tree:
        """The server's simplex before round 0, on the device of ``like``."""
        return map_leaves(lambda leaf, other: leaf.to(other.device), self.init(client.task, client.context), like)
