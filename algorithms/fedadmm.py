"""FedADMM: local models held to the server's by dual variables (alternating direction method of multipliers)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.mixture import parameters
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import TRAINED, inner_product, loss, squared_distance
from rayfl.params import Tree, add_scaled, subtract, zeros_like
from rayfl.tasks.base import Predictor, Task


class FedADMM(Algorithm):
    """FedADMM: clients minimise augmented Lagrangians, and send how their models and dual variables have changed.

    Client i of the cohort S goes down, by its local epochs of SGD over w, the augmented Lagrangian of its loss f_i

        L_i(w, y_i, theta) = f_i(w) + <y_i, w - theta> + rho/2 ||w - theta||^2

    from the received theta, or from its own w_i (``start``). With w_i^+ the model where it ends, client and server take

        y_i^+ = y_i + rho (w_i^+ - theta),    Delta_i = (w_i^+ + y_i^+ / rho) - (w_i + y_i / rho)
        theta <- theta + eta / |S| sum_{i in S} Delta_i

    At first w_i is the initial theta and y_i is 0, also for a client that is sampled for the first time in a later
    round. With eta = |S|/m, for m clients in all (the default), theta is the mean of w_i + y_i / rho over all clients,
    sampled or not. Clients count the same, whatever their samples. Dual variables exist for parameters;
    buffers (running statistics) are the received ones at the start, and are averaged over the cohort.

    Server: theta. Client: w_i and y_i. Down: theta. Up: Delta_i. Evaluated: theta.

    With every client in every round, eta = 1 and ``start=received`` this is FedDyn with alpha = rho. The official code
    does not send the paper's Delta_i: one version subtracts the received theta in place of the client's own w_i, the
    other lets all clients share one w_i. The paper is followed.

    References:
        Gong, Li, Freris: FedADMM: A Robust Federated Deep Learning Framework with Adaptivity to System Heterogeneity,
        ICDE 2022, Algorithm 1.
    """

    name: Literal["fedadmm"] = "fedadmm"
    citation: ClassVar[str] = "Gong et al., ICDE 2022"
    no_privacy: ClassVar[str] = (
        "a client's message goes on from its last one, which the server must have added as it was sent"
    )
    client_keeps: ClassVar[str] = "w_i, y_i"
    server_keeps: ClassVar[str] = "theta"
    newcomer: ClassVar[str] = "theta"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "a dual variable holds a parameter near the server's, which must have it; statistics is possible"
    }

    rho: float = setting(
        0.01, "rho", "weight of the quadratic term, and step of the dual variables; above 0", kept=True, ge=0
    )
    server_lr: float | None = setting(
        None,
        "eta",
        "step of the server along the mean of Delta_i; null: |S|/m, the share of clients in the round; 1 is the "
        "official code's",
        gt=0,
    )
    start: Literal["received", "own"] = setting(
        "received", "", "where local training starts: at the received theta, or at the client's own w_i"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        if self.rho == 0:
            raise ConfigError(
                "algorithm.rho is 0, for which FedADMM's message y_i/rho is undefined: set it above 0, or use "
                "algorithm=fedavg with algorithm.aggregation=uniform"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        share = context.cohort_size / context.num_clients
        if self.start == "own" or self.server_lr is None or self.server_lr <= share:
            return ()
        return (
            f"algorithm.server_lr is {self.server_lr}, more than |S|/m = {share:g}: with algorithm.start=received a "
            "client's message also has what theta has moved since its last one, so that theta can run away: "
            "algorithm.server_lr=null is |S|/m",
        )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        mean = clients.mean(self.local_update, cohort, broadcast={"model": server["model"]})
        rate = len(cohort) / clients.context.num_clients if self.server_lr is None else self.server_lr
        theta, delta = (parameters(tree, clients.task) for tree in (server["model"], mean))
        return {"model": {**mean, **add_scaled(theta, delta, rate)}}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Returns Delta_i, and buffers as they are after training, under the names of a model's tensors.

        Args:
            client: who trains.
            model: theta.
        """
        theta = parameters(model, client.task)
        primal = client.state.get("primal") or parameters(client.initial_model(), client.task)
        dual = client.state.get("dual") or zeros_like(theta)
        start = {**model, **primal} if self.start == "own" else model
        trained = await client.train(start, self.objective, frozen={"received": theta, "dual": dual})
        renewed = parameters(trained, client.task)
        apart = subtract(renewed, theta)
        client.state["primal"], client.state["dual"] = renewed, add_scaled(dual, apart, self.rho)
        client.publish(local=Predictor.of(trained))
        # (y_i^+ - y_i) / rho is w_i^+ - theta: not divided, which would only round
        return Weighted({**trained, **add_scaled(subtract(renewed, primal), apart, 1)})

    @property
    def objective(self) -> Any:
        """f_i(w) + <y_i, w> + rho/2 ||w - theta||^2: the constant <y_i, theta> has no gradient."""
        return loss() + inner_product(TRAINED, "dual") + self.rho / 2 * squared_distance(TRAINED, "received")
