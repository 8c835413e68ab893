"""FedDC: each client's drift from the server's model is kept apart, and corrected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from algorithms.base import Algorithm, Clients, check_sgd, setting
from algorithms.parts.mixture import parameters
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import TRAINED, inner_product, loss, squared_distance
from rayfl.params import Tree, add_scaled, map_leaves, subtract, zeros_like
from rayfl.tasks.base import Predictor, Task


class FedDC(Algorithm):
    """FedDC: every client keeps its drift from the server's model, corrects it in its loss, and adds it to its model.

    Client i trains theta from the received w by local steps on

        F_i(theta) + alpha/2 ||h_i + theta - w||^2 + 1/(eta K) <theta, g_i - g>

    with h_i its drift, g_i its last local update, g the mean of the last updates of all N clients (never sampled: 0),
    and K its number of local steps. Then h_i <- h_i + (theta_i - w) and g_i <- theta_i - w, and the server takes

        w <- sum_{i in S} p_i theta_i / sum_{i in S} p_i + sum_i p_i h_i / sum_i p_i

    with the weights p_i = n_i, or equal ones; g has the same. The drifts are those of all N clients, sampled or not,
    as in the official code. Where all take part, that is the mean of theta_i + h_i; ``drift_mean=cohort`` takes this
    mean over S always, so that w jumps from cohort to cohort. Each g_i is kept divided by the eta K of the round it is
    from, as u_i: that is minus a mean gradient, which clients of other numbers of steps, and rounds of another rate,
    can compare with their own. Where eta and K are the same for all and in all rounds, for which the paper defines the
    term, u_i - u is its (g_i - g) / (eta K).

    g_i contains the correction that its round applied, so that while gradients stay the same every second round has
    none. With ``correction=gradient`` that is taken out, u_i <- (theta_i - w) / (eta K) + u_i - u, which is minus
    SCAFFOLD's control variate (official code). ``correction=none`` leaves the term out (the paper's ablation); with
    equal weights it then is FedDyn. Drifts and updates exist for parameters; buffers (running statistics) are
    averaged. Weight decay counts as part of F_i's gradient.

    Server: model w, u, and the mean of all h_i. Client: h_i and u_i, zero at first. Down: w and u. Up: theta_i
    (``drift_mean=cohort``: theta_i + h_i), and the change of u_i; without correction no u. A client that takes no step
    of positive length keeps its h_i and u_i. Evaluated: w.

    The official code takes both means uniformly (``aggregation=uniform``), and divides a client's alpha and g by its
    samples over the average client's, which is not reproduced. It limits gradients to length 10
    (``train.max_grad_norm``), and divides all updates by one eta K: the first rate, the average client's steps.

    References:
        Gao, Fu, Li, Chen, Xu, Xu: FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and
        Correction, CVPR 2022.
    """

    name: Literal["feddc"] = "feddc"
    citation: ClassVar[str] = "Gao et al., CVPR 2022"
    no_privacy: ClassVar[str] = (
        "its clients send sums of a model and a drift, and changes of last updates, and its server weighs the cohort "
        "against all clients"
    )
    client_keeps: ClassVar[str] = "h_i, g_i"
    server_keeps: ClassVar[str] = "w, g"
    newcomer: ClassVar[str] = "w"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "the drift of a parameter needs a server that has it; statistics is possible"
    }

    alpha: float = setting(0.01, "alpha", "weight of the drift's penalty, above 0", ge=0)
    correction: Literal["update", "gradient", "none"] = setting(
        "update",
        "g_i",
        "what corrects gradients: the last local updates (paper), these without the correction that they contain "
        "(official code), or nothing",
        kept=True,
    )
    drift_mean: Literal["cohort", "all"] = setting(
        "all",
        "",
        "whose drifts the server adds: those of all clients (official code), or of the cohort alone",
        kept=True,
    )
    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "p_i", "weights of the means: samples n_i, or uniform (official code)", kept=True
    )

    def check(self, task: Task, context: RoundContext) -> None:
        if self.alpha == 0:
            raise ConfigError(
                "algorithm.alpha is 0, with which FedDC's server adds drifts that no client corrects: set it above 0, "
                "or use algorithm=fedavg or algorithm=scaffold"
            )
        if self.correction == "none":
            return
        reason = (
            "it divides the distance moved by eta K, which is a mean gradient after plain steps alone: set "
            "algorithm.correction=none for that"
        )
        check_sgd("FedDC", context.train, reason, heavy_ball=True)
        if context.train.momentum > 0:
            raise ConfigError(
                f"FedDC has no momentum, but train.momentum is {context.train.momentum}: {reason}, or set "
                "train.momentum=0"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        found = []
        if self.correction != "none" and context.train.max_grad_norm is not None:
            found.append(
                "g_i is the distance moved: where train.max_grad_norm shortens corrected gradients, it is no sum of "
                "the client's gradients"
            )
        if self.drift_mean == "cohort" and context.smallest_cohort < context.num_clients:
            found.append(
                "the server adds the drifts of the cohort alone, which do not cancel as those of all clients do, so "
                "that w jumps from cohort to cohort: algorithm.drift_mean=all adds the mean of all"
            )
        return found

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        zero = zeros_like(parameters(server["model"], task))
        kept = {"mean_update": self.correction != "none", "mean_drift": self.drift_mean == "all"}
        return {**server, **{name: zero for name, is_kept in kept.items() if is_kept}}

    def sent(self, server: Tree) -> Tree:
        return {name: tree for name, tree in server.items() if name != "mean_drift"}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        mean = clients.mean(self.local_update, cohort, broadcast=self.sent(server))
        model, share, changed = mean["model"], self.share(cohort, clients), {}
        if self.correction != "none":
            changed["mean_update"] = add_scaled(server["mean_update"], mean["change"], share)
        if self.drift_mean == "all":
            trained = {name: model[name] for name in server["mean_drift"]}
            moved = subtract(trained, {name: server["model"][name] for name in trained})
            changed["mean_drift"] = add_scaled(server["mean_drift"], moved, share)
            model = {**model, **add_scaled(trained, changed["mean_drift"], 1)}
        return {"model": model, **changed}

    def share(self, cohort: Sequence[int], clients: Clients) -> float:
        """The cohort's part of the weights p_i of all clients."""
        everyone = range(clients.context.num_clients)
        if self.aggregation == "uniform":
            return len(cohort) / len(everyone)
        return float(np.sum(clients.num_samples(cohort)) / np.sum(clients.num_samples(everyone)))

    async def local_update(self, client: Client, model: Tree, mean_update: Tree | None = None) -> Weighted:
        """Trains from the received model.

        Args:
            client: who trains.
            model: w.
            mean_update: u; None without correction.
        """
        received = parameters(model, client.task)
        drift = client.state.get("drift") or zeros_like(received)
        known, own = {"anchor": subtract(received, drift)}, zeros_like(received)
        if mean_update is not None:
            own = client.state.get("update") or own
            known["correction"] = subtract(own, mean_update)
        trained = await client.train(model, self.objective, frozen=known)
        client.publish(local=Predictor.of(trained))
        moved = subtract(parameters(trained, client.task), received)
        client.state["drift"] = drift = add_scaled(drift, moved, 1)
        reply = {"model": trained}
        if self.drift_mean == "cohort":
            reply["model"] = {**trained, **add_scaled(parameters(trained, client.task), drift, 1)}
        if mean_update is not None:
            client.state["update"] = renewed = self._renewed(client, moved, own, known["correction"])
            reply["change"] = subtract(renewed, own)
        return Weighted(reply, 1 if self.aggregation == "uniform" else client.num_samples)

    @property
    def objective(self) -> Any:
        """F_i + alpha/2 ||theta - (w - h_i)||^2 + <theta, u_i - u>."""
        pulled = loss() + self.alpha / 2 * squared_distance(TRAINED, "anchor")
        return pulled if self.correction == "none" else pulled + inner_product(TRAINED, "correction")

    def _renewed(self, client: Client, moved: Tree, own: Tree, correction: Tree) -> Tree:
        """u_i after a local update; u_i itself where nothing was learned about the gradient."""
        steps = client.num_steps()
        if steps == 0 or client.lr == 0:
            return own
        scale = 1 / (client.lr * steps)
        update = map_leaves(lambda leaf: leaf * scale, moved)
        return add_scaled(update, correction, 1) if self.correction == "gradient" else update
