"""FedInit: local training starts beyond the received model, away from where the client last ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from algorithms.parts.mixture import parameters
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.params import Tree, add_scaled, copy, map_leaves, subtract
from rayfl.tasks.base import Predictor

_STILL = {"beta": (0,)}


class FedInit(FineTuned):
    """FedInit (relaxed initialization): federated averaging whose clients start away from their last models.

    Client k, which ended its last round at u_k, starts at

        v_k = w + beta (w - u_k)

    trains to theta_k, keeps it as u_k, and sends w + (theta_k - v_k), so that the server's new model is

        w <- w + sum_k q_k (theta_k - v_k)

    or theta_k itself (``message: model``). Both are the same where all clients took part in the last round and count
    alike, for then the w - u_k cancel out. In a client's first participation u_k is the initial model, which in round
    0 is w, too. beta = 0 is federated averaging. Only parameters are moved; buffers (running statistics) are those of
    w at the start, and averaged.

    Server: model w. Client: u_k; never sent by itself. Down: w. Up: w + theta_k - v_k, or theta_k, and n_k.
    Evaluated: w (``global``), after training theta_k (``local``). With ``finetune_epochs`` each client fine-tunes the
    final w by plain steps.

    References:
        Sun, Shen, Tao: Understanding How Consistency Works in Federated Learning via Stage-wise Relaxed
        Initialization, NeurIPS 2023 (arXiv 2306.05706); formulas of the authors' code.
    """

    name: Literal["fedinit"] = "fedinit"
    citation: ClassVar[str] = "Sun et al., NeurIPS 2023"
    no_example_privacy: ClassVar[str] = ""
    client_keeps: ClassVar[str] = "u_k"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "the way from u_k to w needs a server that has the parameter; statistics is possible"
    }

    beta: float = setting(0.1, "beta", "how far to start from w, in units of w - u_k; 0 is federated averaging", ge=0)
    message: Literal["change", "model"] = setting(
        "change",
        "",
        "what the server averages: the change by training, added to w (authors' code), or the trained model",
        unless=_STILL,
    )
    aggregation: Literal["uniform", "samples", "population"] = setting(
        "uniform",
        "q_k",
        "weights of the mean: uniform 1/|S| (authors' code); samples n_k / sum over the cohort; population n_k / sum "
        "over all clients, the rest staying on w",
    )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains from v_k."""
        if self.beta == 0:
            return await super().local_update(client, model)
        received = parameters(model, client.task)
        last: Tree = client.state.get("last") or parameters(client.initial_model(), client.task)
        start = add_scaled(received, subtract(received, last), self.beta)
        trained = await client.train({**model, **start}, self.objective)
        ended = parameters(trained, client.task)
        client.state["last"] = copy(ended)
        client.publish(local=Predictor.of(trained))
        if self.message == "change":
            trained = {**trained, **map_leaves(lambda w, to, at: w + (to - at), received, ended, start)}
        return self.weighted(client, trained)
