"""FedAwS: clients pull features to the embedding of the right class, and the server spreads the embeddings apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.fednh import scaled_cosines
from algorithms.parts.partial import part
from algorithms.parts.prototypes import class_counts
from algorithms.parts.replaced_heads import body, check_replaceable, idle_head, with_idle_head
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class FedAwS(Averaging):
    """FedAwS (averaging with spreadout): clients know right classes alone, and the server keeps the classes apart.

    With f(x) in R^d the input of the last linear layer, whose place one embedding w_c a class takes, client k trains
    the body G of f and the embeddings on its samples' similarity with their own classes,

        mean of max(0, m - cos(f(x), w_y))^2

    which reads nothing of the classes that the client has no samples of. It may have a single class; then nothing
    keeps all embeddings from becoming one. The server averages G, and w_c over the clients that have class c, to which
    their samples of it are the weights. A class of which nobody in the cohort has a sample keeps its embedding. All
    have length 1. Then the server takes S steps that spread them:

        w_c <- N(w_c - gamma grad_c R(W)),    N(v) = v / ||v||
        R(W) = sum_c sum_{j != c} max(0, nu - (1 - cos(w_c, w_j)))^2

    At first w_c are drawn uniformly from the sphere. The predicted class is that of the embedding with the largest
    cosine; probabilities are the softmax of the cosines.

    Server: G and W. Client: nothing. Down: G and W. Up: G_k, and of each of its classes w_kc by its weight, with that
    weight. Evaluated: the server's model (``global``).

    References:
        Yu, Rawat, Menon, Kumar: Federated Learning with Only Positive Labels, ICML 2020 (arXiv 2004.10342),
        Algorithm 1.
    """

    name: Literal["fedaws"] = "fedaws"
    no_privacy: ClassVar[str] = "its clients send embeddings by class with weights, too"
    citation: ClassVar[str] = "Yu et al., ICML 2020"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "every class has an embedding"}
    server_keeps: ClassVar[str] = "G, W"
    newcomer: ClassVar[str] = "G and W"

    aggregation: Literal["samples", "uniform"] = setting(
        "samples",
        "q_k",
        "weights of the means: samples, for G n_k / sum over the cohort and for w_c those of class c; or uniform, for "
        "w_c over the clients that have the class",
    )
    positive_margin: float = setting(0.9, "m", "cosine with its own class from which a sample has no loss", gt=0, le=1)
    spread_margin: float = setting(
        1.0,
        "nu",
        "distance 1 - cos from which two classes are left alone; 1: a right angle",
        gt=0,
        le=2,
        unless={"spread_steps": (0,)},
    )
    spread_rate: float = setting(
        0.1, "gamma", "step of the server that spreads the embeddings", gt=0, unless={"spread_steps": (0,)}
    )
    spread_steps: int = setting(1, "S", "such steps in a round; 0: the embeddings are averaged alone", ge=0)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_replaceable("FedAwS", task.network)
        if not set(body(task.network)) & set(task.network.parameter_names):
            raise ConfigError(
                "FedAwS trains all layers but the last, of which this model trains none: choose a deeper model"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        drawn = context.streams.generator("init.prototypes").standard_normal(task.network.head_shape)
        embeddings = F.normalize(torch.from_numpy(drawn), dim=-1).to(next(iter(model.values())))
        return {"shared": part(model, body(task.network)), "embeddings": embeddings}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        before = server["embeddings"]
        sent = {"shared": server["shared"], "embeddings": before}
        mean = clients.mean(self.local_update, cohort, broadcast=sent)
        known = (mean["weights"] > 0)[:, None]
        embeddings = torch.where(known, F.normalize(mean["sums"].double(), dim=-1), before.double())
        for _ in range(self.spread_steps):
            embeddings = spread(embeddings, self.spread_margin, self.spread_rate)
        return {"shared": mean["shared"], "embeddings": embeddings.to(before)}

    async def local_update(  # type: ignore[override]
        self, client: Client, shared: Tree, embeddings: Tensor
    ) -> Weighted:
        """Trains the body and the embeddings; returns the body, and the embeddings of the client's classes."""
        moving = {"model": shared, "embeddings": embeddings}
        idle = idle_head(client.task.network, embeddings)
        trained = await client.train(moving, self.objective, frozen={"head": idle})
        own = {"shared": trained["model"], "embeddings": F.normalize(trained["embeddings"], dim=-1)}
        client.publish(local=_predictor(client.task.network, own))
        counts = class_counts(client.examples().y, len(embeddings))
        # whatever the weight of the body, every sample (or client) weighs the same in the embeddings
        weights = (counts > 0).double() if self.aggregation == "uniform" else counts / client.num_samples
        sums = weights[:, None] * own["embeddings"]
        return self.weighted(
            client, {"shared": own["shared"], "sums": sums.to(embeddings), "weights": weights.to(embeddings)}
        )

    @property
    def objective(self) -> Sum:
        """The squared hinge of the cosine with the right class."""
        return function(self._positive)

    def _positive(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, _ = task.head_inputs_and_logits({**frozen["head"], **trained["model"]}, batch)
        right = F.normalize(trained["embeddings"], dim=-1)[batch.y]
        cosines = (F.normalize(features, dim=-1) * right).sum(-1)
        return batch.mean((self.positive_margin - cosines).clamp(min=0).square())

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {"global": _predictor(task.network, server)}


def spread(embeddings: Tensor, margin: float, rate: float) -> Tensor:
    """The embeddings after one step that spreads them, shape (C, d), rows of length 1.

    Args:
        embeddings: W, rows of length 1.
        margin: nu; where all pairs are so far apart W is returned to the bit.
        rate: gamma.
    """
    cosines = embeddings @ embeddings.T
    near = (margin - 1 + cosines).clamp(min=0).fill_diagonal_(0)
    if not near.any():
        return embeddings
    # each pair is in the sum twice, and a row of length 1 moves along the sphere alone
    slopes = 4 * (near @ embeddings - (near * cosines).sum(1, keepdim=True) * embeddings)
    return F.normalize(embeddings - rate * slopes, dim=-1)


def _predictor(network: Network, model: Tree) -> Predictor:
    """The prediction of a body and embeddings."""
    whole = with_idle_head(network, model["shared"], model["embeddings"])
    return Predictor.of(whole, {"embeddings": model["embeddings"]}, combine=_log_probabilities)


def _log_probabilities(models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
    """Log-probabilities (b, C) of (network, embeddings)."""
    model, head = models
    features, _ = task.network.head_inputs_and_logits(model, x, training=False)
    cosines = scaled_cosines(features, head["embeddings"], torch.ones_like(features[0, 0]))
    return cosines.log_softmax(-1)
