"""FedNH: a head of normalized class prototypes, which no gradient trains and the server smooths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.partial import part
from algorithms.parts.prototypes import class_means
from algorithms.parts.replaced_heads import (
    body,
    check_replaceable,
    idle_head,
    orthogonal_directions,
    simplex_etf,
    with_idle_head,
)
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class FedNH(Averaging):
    """FedNH (normalized head): the classifier is one unit vector a class, spread evenly at first, then class means.

    With f(x) in R^d the input of the last linear layer, whose place the prototypes take, logits are

        z_c(x) = s W_c^T r(x),    r(x) = f(x) / ||f(x)||,    ||W_c|| = 1

    At first the prototypes W_c are orthonormal (up to C = d classes). Client k trains the body G of f and the scale s
    on the cross-entropy of z, while W stands still. From all its samples at the trained body in evaluation mode it
    takes mean features by class, of length 1,

        mu_kc = m_kc / ||m_kc||,    m_kc = mean of r(x) over its samples of class c

    and the server smooths the prototypes with those of the cohort, of weights n_kc (its samples of class c):

        W_c <- N( rho W_c + (1 - rho) N( sum_k n_kc mu_kc ) ),    N(v) = v / ||v||

    A class of which nobody in the cohort has a sample keeps its prototype. G and s are averaged. rho = 1 leaves the
    prototypes as they were drawn.

    After the last round each client personalizes: it trains G and s for ``finetune_epochs`` as in a round, under W.

    Server: G, s and W. Client: nothing. Down: G, s and W. Up: G_k, s_k and n_kc mu_kc. Evaluated: the server's model
    (``global``), and after the last round the client's own (``finetuned``), also of clients never sampled.

    References:
        Dai, Chen, Li, Heinecke, Sun, Xu: Tackling Data Heterogeneity in Federated Learning with Class Prototypes,
        AAAI 2023 (arXiv 2212.02758).
    """

    name: Literal["fednh"] = "fednh"
    personalized: ClassVar[str] = "finetuned"
    personalized_later: ClassVar[bool] = True
    no_privacy: ClassVar[str] = "its clients send mean features by class, too"
    citation: ClassVar[str] = "Dai et al., AAAI 2023"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "every class has a prototype"}
    server_keeps: ClassVar[str] = "G, s, W"
    newcomer: ClassVar[str] = "G, s and W; fine-tuned after the last round"

    aggregation: Literal["uniform", "samples", "population"] = setting(
        "uniform",
        "q_k",
        "weights of the means of G and s: uniform 1/|S| (authors' code); samples n_k / sum over the cohort; population "
        "n_k / sum over all clients, the rest staying on the server's",
    )
    smoothing: float = setting(0.9, "rho", "how much of its old prototype a class keeps in a round", ge=0, le=1)
    scale: float = setting(20.0, "s", "initial scale of the logits", gt=0, kept=True)
    train_scale: bool = setting(True, "", "train the scale with the body; false: it stays as it is")
    initial: Literal["orthogonal", "simplex"] = setting(
        "orthogonal",
        "",
        "first prototypes, drawn once: orthonormal vectors, or a simplex, whose vectors are as far apart as possible",
        kept=True,
    )
    prototype_weights: Literal["samples", "uniform"] = setting(
        "samples",
        "",
        "weights of the clients that have a class in its mean: their samples of it, or equal",
        unless={"smoothing": (1,)},
    )
    finetune_epochs: int | None = setting(
        None, "E_ft", "personalization: epochs of G and s; null: train.local_epochs", ge=0
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_replaceable("FedNH", task.network)
        classes, width = task.network.head_shape
        if self.initial == "simplex" and not 2 <= classes <= width:
            raise ConfigError(
                f"algorithm.initial is simplex, which needs from 2 classes to as many as the last layer has inputs "
                f"({width}), but there are {classes}: set algorithm.initial=orthogonal"
            )
        if not set(body(task.network)) & set(task.network.parameter_names):
            raise ConfigError(
                "FedNH trains all layers but the last, of which this model trains none: choose a deeper model"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        like = next(iter(model.values()))
        classes, width = task.network.head_shape
        spread = simplex_etf if self.initial == "simplex" else orthogonal_directions
        prototypes = spread(classes, width, context.streams.generator("init.prototypes"))
        return {
            "shared": part(model, body(task.network)),
            "scale": like.new_tensor(self.scale),
            "prototypes": prototypes.to(like),
        }

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        kept = {name: server[name] for name in self._trained}
        sent = {name: server[name] for name in ("shared", "scale", "prototypes")}
        rest = self.remainder({**kept, "sums": torch.zeros_like(server["prototypes"])}, cohort, clients)
        mean = clients.mean(self.local_update, cohort, broadcast=sent, also=rest)
        sums = mean.pop("sums")
        return {**mean, "prototypes": smoothed(server["prototypes"], sums, self.smoothing)}

    @property
    def _trained(self) -> tuple[str, ...]:
        """What clients train and send back."""
        return ("shared", "scale") if self.train_scale else ("shared",)

    async def local_update(  # type: ignore[override]
        self, client: Client, shared: Tree, scale: Tensor, prototypes: Tensor
    ) -> Weighted:
        """Trains body and scale under the received prototypes; returns them with sums of class means."""
        trained = await self.trained(client, {"shared": shared, "scale": scale, "prototypes": prototypes})
        client.publish(local=_predictor(client.task.network, trained))
        sums = await self.class_sums(client, trained)
        # whatever the weight of the body, every sample (or client) weighs the same in the prototypes
        share = 1 if self.aggregation == "uniform" else 1 / client.num_samples
        sent = {name: trained[name] for name in self._trained}
        return self.weighted(client, {**sent, "sums": (share * sums).to(prototypes)})

    async def trained(self, client: Client, server: Tree, **options: Any) -> Tree:
        """Returns the whole model of a server's tree after local steps.

        Args:
            client: the client.
            server: what :meth:`init` returns.
            **options: of ``client.train``.
        """
        prototypes = server["prototypes"]
        moving = {"model": server["shared"], **({"scale": server["scale"]} if self.train_scale else {})}
        found = await client.train(
            moving,
            self.objective,
            frozen={
                "head": idle_head(client.task.network, prototypes),
                "scale": server["scale"],
                "prototypes": prototypes,
            },
            **options,
        )
        return {**server, "shared": found["model"], "scale": found.get("scale", server["scale"])}

    @property
    def objective(self) -> Sum:
        """The cross-entropy of z."""
        return function(self._normalized)

    def _normalized(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, _ = task.head_inputs_and_logits({**frozen["head"], **trained["model"]}, batch)
        scale = trained["scale"] if self.train_scale else frozen["scale"]
        return task.loss_of(scaled_cosines(features, frozen["prototypes"], scale), batch)

    async def class_sums(self, client: Client, model: Tree) -> Tensor:
        """n_kc mu_kc by class, or mu_kc with equal weights; zero without samples; shape (C, d), float64."""
        whole = with_idle_head(client.task.network, model["shared"], model["prototypes"])
        features = await client.outputs(lambda x, task: task.network.head_inputs_and_logits(whole, x)[0])
        directions = F.normalize(features.double(), dim=-1)
        counts, means = class_means(directions, client.examples().y, len(model["prototypes"]))
        weights = counts if self.prototype_weights == "samples" else 1
        return F.normalize(means, dim=-1) * torch.as_tensor(weights).reshape(-1, 1)

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {"global": _predictor(task.network, server)}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        rows = self.global_predictors(server, client.task)
        if client.context.final:
            own = await self.trained(
                client, server, epochs=self.finetune_epochs, keep_optimizer=False, stream=".finetune"
            )
            rows["finetuned"] = _predictor(client.task.network, own)
        return rows


def smoothed(prototypes: Tensor, sums: Tensor, smoothing: float) -> Tensor:
    """The prototypes after a round, shape (C, d), rows of length 1.

    Args:
        prototypes: W, shape (C, d).
        sums: of each class any multiple of the sum of the clients' class means; zero keeps the prototype.
        smoothing: rho.
    """
    if smoothing == 1:
        return prototypes  # to the bit
    moved = smoothing * prototypes + (1 - smoothing) * F.normalize(sums, dim=-1)
    return torch.where((sums == 0).all(-1, keepdim=True), prototypes, F.normalize(moved, dim=-1))


def scaled_cosines(features: Tensor, prototypes: Tensor, scale: Tensor) -> Tensor:
    """z of shape (b, C), for features f of shape (b, d) and prototypes of shape (C, d)."""
    return scale * F.linear(F.normalize(features, dim=-1), prototypes)


def _predictor(network: Network, model: Tree) -> Predictor:
    """The prediction of body, scale and prototypes."""
    head = {"scale": model["scale"], "prototypes": model["prototypes"]}
    whole = with_idle_head(network, model["shared"], model["prototypes"])
    return Predictor.of(whole, head, combine=_log_probabilities)


def _log_probabilities(models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
    """Log-probabilities (b, C) of (network, scale and prototypes)."""
    model, head = models
    features, _ = task.network.head_inputs_and_logits(model, x, training=False)
    return scaled_cosines(features, head["prototypes"], head["scale"]).log_softmax(-1)
