"""FLTrust: the server trains on a few labelled samples of its own, and trusts clients that move as it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.finetuning import FineTuning
from algorithms.parts.mixture import parameters
from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.robust import combined
from rayfl.engine.client import Client
from rayfl.engine.server import Server
from rayfl.errors import ConfigError
from rayfl.params import Tree, leaves
from rayfl.tasks.base import Predictor, Task


class FLTrust(FineTuning):
    """FLTrust: updates count by how far they point where the server's own update points, and are as long as it.

    The server has labelled samples D_0 of its own (the root set: ``holdout.public``, 100 in the paper). In a round it
    trains the model w on them as a client does on its samples, from which it has g_0 = w_0 - w, and receives the
    updates g_k = w_k - w of the cohort. With

        TS_k = max(0, cos(g_k, g_0)),    h_k = ||g_0|| / ||g_k|| g_k

    it moves by the mean of the scaled updates h_k, weighted by their trust scores TS_k:

        w <- w + alpha sum_k TS_k h_k / sum_k TS_k

    An update that points away from g_0, or is zero, counts nothing; where that holds for all, w stays. However long an
    update is, it moves w by no more than alpha ||g_0||. Cosines and norms are over all parameters, in float64. Running
    statistics are those of w_0: nothing bounds what a client may send as one.

    Server: model w, and D_0. Client: nothing. Down: w. Up: w_k. Evaluated: w (``global``), and with ``finetune_epochs``
    w fine-tuned by each client.

    References:
        Cao, Fang, Liu, Gong: FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping, NDSS 2021
        (arXiv 2012.13995), Algorithms 1 and 2.
    """

    name: Literal["fltrust"] = "fltrust"
    citation: ClassVar[str] = "Cao et al., NDSS 2021"
    no_privacy: ClassVar[str] = "its server reads the direction of each message, which noise on a sum does not hide"
    own_rule: ClassVar[str] = "it weighs each message by its cosine with the server's own update"
    server_keeps: ClassVar[str] = "w, D_0"
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("statistics", "all"), "the server trains the model on its own samples, and needs all of its layers for that"
    )

    server_lr: float = setting(1.0, "alpha", "step along the mean of the scaled updates", gt=0)
    root_steps: int | None = setting(
        None,
        "",
        "mini-batches of the server's training in a round; null: train.local_epochs passes over its samples",
        ge=1,
    )

    def check_data(self, task: Task, sizes: Any, public: int) -> None:
        super().check_data(task, sizes, public)
        if not public:
            raise ConfigError(
                "holdout.public is 0, but in fltrust the server trains on labelled samples of its own (the root set; "
                "the paper has 100): set holdout.public=100"
            )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model = server["model"]
        sent = clients.each(self.local_update, cohort, {"model": model})
        own = clients.on_server(self.root_update, {"model": model})["model"]
        start = parameters(model, clients.task)
        updates = [message.tree for message in sent.values()]
        shares = trusted_shares(updates, {name: own[name] for name in start}, start)
        return {"model": {**own, **combined(updates, start, self.server_lr * shares)}}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received model; returns its parameters."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return Weighted(parameters(trained, client.task), 1)

    async def root_update(self, server: Server, model: Tree) -> Tree:
        """Trains the model on the server's own samples, with the training section of the clients."""
        samples = server.labelled_public()
        return {"model": await server.train(model, self.objective, examples=samples, steps=self.root_steps)}


def trusted_shares(models: Sequence[Tree], root: Tree, start: Tree) -> Tensor:
    """Returns the factors of g_k in the mean of the scaled updates, TS_k ||g_0|| / ||g_k|| / sum TS; float64, (n,).

    Args:
        models: w_k, n trees of parameters.
        root: w_0.
        start: w.
    """
    along, squares = torch.zeros(2, len(models), dtype=torch.float64)
    length = torch.zeros((), dtype=torch.float64)
    for name, leaf in leaves(start):
        towards = root[name].double() - leaf.double()
        length += towards.square().sum()
        for k, model in enumerate(models):
            change = model[name].double() - leaf.double()
            along[k] += (change * towards).sum()
            squares[k] += change.square().sum()
    norms, length = squares.sqrt(), length.sqrt()
    apart = norms * length
    scores = torch.where(apart > 0, along / apart, 0).clamp(min=0)
    if not scores.any():
        return scores
    return torch.where(scores > 0, scores * length / norms, 0) / scores.sum()
