"""PerAda: personal models held near a federated one, which the server teaches what all clients' models say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from algorithms.base import Clients, setting
from algorithms.ditto import Ditto
from algorithms.parts.ensemble import EnsembleDistillation
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree

_NO_STEPS = {"distill_steps": (0,)}


class PerAda(EnsembleDistillation, Ditto):
    """PerAda (personalized adapters): personal models near a federated one, whose mean learns what all models say.

    A client trains the received model w to x_k, and its personal model v_k from where it was, on

        CE(v_k) + lambda/2 ||v_k - w||^2

    The server takes the mean of the x_k for w and goes N steps down

        mean over a mini-batch of U of KL(softmax(T / tau) || softmax(f(w) / tau)),    T = 1/|S| sum_k f(x_k)

    where U are public samples without labels and T the mean logits of the clients' models on them, in evaluation mode.
    In the paper w, x_k and v_k are adapters, normalization and last layer of a pretrained network that stays as it is;
    here they are whatever the model trains, with ``model.adapter`` adapters. With N = 0 it is Ditto. Buffers (running
    statistics) are no part of the norm.

    Server: w, and U. Client: v_k, at first the initial w; never sent. Down: w. Up: x_k and n_k. Evaluated: w
    (``global``) and v_k (``personalized``); a client never sampled has its initial v_k, with ``unseen`` ``global`` it
    has w.

    References:
        Xie, Huang, Chu, Xu, Xiao, Li, Anandkumar: PerAda: Parameter-Efficient Federated Learning Personalization with
        Generalization Guarantees, CVPR 2024.
    """

    name: Literal["perada"] = "perada"  # type: ignore[assignment]
    citation: ClassVar[str] = "Xie et al., CVPR 2024"
    server_keeps: ClassVar[str] = "w, U"

    aggregation: Literal["uniform", "samples"] = setting(
        "uniform", "q_k", "weights of the mean: uniform 1/|S| (authors' code), or samples n_k / sum over the cohort"
    )
    distill_steps: int = setting(500, "N", "steps of the server in a round; 0: Ditto", ge=0)
    distill_rounds: int | None = setting(
        None, "", "the first rounds, in which the server distils; null: all (authors' code: 30)", ge=1, unless=_NO_STEPS
    )
    server_batch_size: int = setting(2048, "", "public samples in a mini-batch of the server", ge=1, unless=_NO_STEPS)
    server_max_grad_norm: float | None = setting(
        None, "", "largest norm of a gradient of the server; null: no limit", gt=0, unless=_NO_STEPS
    )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model = clients.mean(self.local_update, cohort, broadcast={"model": server["model"]})
        if self._distils(clients.context):
            model = self.taught({"0": model}, cohort, clients)["0"]
        return {"model": model}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Makes both of Ditto's updates, and keeps the federated one until it has taught."""
        found = await super().local_update(client, model)
        if self._distils(client.context):
            client.state["teacher"] = found.tree
        return found

    def _distils(self, context: RoundContext) -> bool:
        """Whether the server takes steps in the round."""
        return bool(self.distill_steps) and (self.distill_rounds is None or context.round < self.distill_rounds)
