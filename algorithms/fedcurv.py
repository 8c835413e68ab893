"""FedCurv: clients are held where the parameters that matter to others have been."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.fisher import FisherInformation
from algorithms.parts.mixture import parameters
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import Sum, function, loss
from rayfl.params import Tree, copy, map_leaves, subtract
from rayfl.tasks.base import Batch, Predictor, Task

_SUMS = "sums"
"""Group of what is no model: of adapters the error of a mean of products is that of models alone."""


class FedCurv(FisherInformation, FineTuned):
    """FedCurv (federated curvature): clients stay near what the others trained, in parameters that matter to those.

    With theta_j the model of client j after its local update in the last round, and F_j the diagonal of Fisher
    information at theta_j on its samples, each client s of the cohort minimises

        CE + lambda sum_{j in S'} (theta - theta_j)^T diag(F_j) (theta - theta_j)

    where S' are the clients of the last round other than s. Up to a constant that is

        CE + lambda (theta^T diag(u) theta - 2 theta^T v),    u = sum_j F_j,    v = sum_j F_j theta_j

    so that two sums are all that it needs to know of the others. The server sends the sums over all clients of the last
    round, and s takes its own part out of them if it was one. In the first round there is no such term. F_j is the mean
    over samples of squared gradients (``fisher_form``). A step of SGD overshoots where 2 lambda u times the learning
    rate is more than 1, and diverges where it is more than 2. With ``finetune_epochs`` each client fine-tunes the final
    model on CE.

    Server: model w, u and v of the last round. Client: F_s and F_s theta_s of its last round. Down: w, u and v. Up:
    w_k and n_k, then F_k and F_k theta_k. Evaluated: w (``global``).

    References:
        Shoham, Avidor, Keren, Israel, Benditkis, Mor-Yosef, Zeitak: Overcoming Forgetting in Federated Learning on
        Non-IID Data, arXiv 1910.07796, 2019.
    """

    name: Literal["fedcurv"] = "fedcurv"
    citation: ClassVar[str] = "Shoham et al., arXiv 2019"
    client_keeps: ClassVar[str] = "F_s, F_s theta_s"
    server_keeps: ClassVar[str] = "w, u, v"
    no_privacy: ClassVar[str] = "its clients send Fisher information, too"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "there are no sums of a parameter that is never sent; statistics is possible"
    }

    curvature_weight: float = setting(
        1.0, "lambda", "weight of the others' quadratic terms; 0 is federated averaging", ge=0, kept=True
    )

    def init(self, task: Task, context: RoundContext) -> Tree:
        return {**super().init(task, context), "round": -1}

    def sent(self, server: Tree) -> Tree:
        return server if "curvature" in server else {"model": server["model"]}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        rest = self.remainder(server["model"], cohort, clients)
        model = clients.mean(self.curved_update, cohort, broadcast=self.sent(server), also=rest)
        if self.curvature_weight == 0:
            return {"model": model}
        mean = clients.means(self.report, cohort, broadcast={})[_SUMS]
        sums = map_leaves(lambda leaf: len(cohort) * leaf, mean)
        return {"model": model, "curvature": sums, "round": clients.context.round}

    async def curved_update(
        self, client: Client, model: Tree, curvature: Tree | None = None, round: int = -1
    ) -> Weighted:
        """Trains the received model; keeps F_s and F_s theta_s.

        Args:
            client: s.
            model: w.
            curvature: u (``fisher``) and v (``products``) over all clients of a round; None if there was none.
            round: which round; 0-indexed.
        """
        if curvature is None:
            trained = await client.train(model, self.objective)
        else:
            own = client.state.get("curvature", {})
            others = subtract(curvature, own["sums"]) if own.get("round") == round else curvature
            trained = await client.train(model, self.curved, frozen=others)
        if self.curvature_weight:
            fisher = await self.fisher(client, trained)
            products = map_leaves(lambda f, leaf: f * leaf, fisher, parameters(trained, client.task))
            sums = {"fisher": fisher, "products": products}
            client.state["curvature"] = {"sums": sums, "round": client.context.round}
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    async def report(self, client: Client) -> Weighted:
        """Sends F_s and F_s theta_s; all clients count the same in the sums."""
        return Weighted(copy(client.state["curvature"]["sums"]), 1, group=_SUMS)

    @property
    def curved(self) -> Sum:
        """CE + lambda (theta^T diag(u) theta - 2 theta^T v)."""
        return loss() + self.curvature_weight * function(self._curvature)

    def _curvature(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        apart = map_leaves(
            lambda leaf, u, v: ((u * leaf - 2 * v) * leaf).sum(),
            parameters(model, task),
            frozen["fisher"],
            frozen["products"],
        )
        found: Tensor = sum(apart.values())  # type: ignore[assignment]
        return found

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}
