"""FedLoGe: a body trained under a fixed sparse simplex, and heads beside it whose lengths are realigned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Averaging, Clients, check_head, setting
from algorithms.parts.balanced import log_prior
from algorithms.parts.heads import head_logits
from algorithms.parts.partial import part
from algorithms.parts.prototypes import class_counts
from algorithms.parts.replaced_heads import body, check_replaceable
from algorithms.parts.requirements import clipped_together
from algorithms.parts.sparse_simplex import kept_elements, sparse_simplex
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class FedLoGe(Averaging):
    """FedLoGe (federated local and generic training): for data that have a long tail over all clients together.

    With f(x) in R^d the input of the last linear layer, classes have three heads. W, the static sparse simplex (SSE-C),
    is drawn once and never trained: a share beta of its elements is zero, and its rows w_c have about the length gamma
    and are as far apart as they can be,

        W = argmin sum_c (||w_c|| - gamma)^2 - 1/C sum_c min_{j != c} arccos(cos(w_c, w_j))

    The auxiliary head (psi, b) is the network's own last layer, and is averaged; (phi_k, b_k) is the client's own. A
    step goes down

        CE(W f, y) + CE(psi [f] + b, y) + CE(phi_k [f] + b_k, y)

    where brackets mark constants: the first term moves the body G alone, each other one its head alone. The lengths of
    trained rows follow the frequencies of classes. They are realigned when a model is used: those of psi are all made
    equal for the global model, and a client's are those of its own head:

        z_c(x) = gamma' psi_c / ||psi_c||_2 f + b_c
        z_kc(x) = psi_c f + b_c + ||phi_kc||_2 psi_c f + b_kc

    With ``personal_heads=both`` the second is ||phi_kc||_2 psi_c f + b_c + phi_kc f + b_kc. A class of which the client
    has no training sample is left out of its prediction.

    Server: G, psi, b, and the fixed W. Client: (phi_k, b_k), at first the initial (psi, b); never sent. Down: G, psi, b
    and W. Up: G, psi and b as trained, and n_k. Evaluated: the realigned model (``global``), G under W (``sparse``),
    and the client's (``personalized``), also of clients never sampled; after training G and psi (``local``,
    ``personalized``).

    A row of psi that is zero stays zero. W needs a last layer with as many inputs as there are classes.

    References:
        Xiao, Chen, Liu, Feng, Wu, Liu, Zhou, Yang, Liu: FedLoGe: Joint Local and Generic Federated Learning under
        Long-tailed Data, ICLR 2024 (arXiv 2401.08977); formulas of the authors' code.
    """

    name: Literal["fedloge"] = "fedloge"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Xiao et al., ICLR 2024"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "every class has a vector of the classifier"}
    client_keeps: ClassVar[str] = "phi_k, b_k"
    server_keeps: ClassVar[str] = "G, psi, b, W"
    newcomer: ClassVar[str] = "G, psi and b, and a head of its own after a local update"

    sparsity: float = setting(0.6, "beta", "share of the elements of W that are zero", ge=0, lt=1, kept=True)
    classifier_norm: float = setting(0.1, "gamma", "length of the rows of W that is aimed at", gt=0, kept=True)
    classifier_steps: int = setting(
        1000, "", "steps of Adam that spread W, of rate 1/steps; the authors' code takes 10000", ge=1, kept=True
    )
    head_norm: float | None = setting(
        None,
        "gamma'",
        "length of the rows of the global model's head; null: the mean of their lengths, 1.7: authors' code",
        gt=0,
    )
    personal_heads: Literal["auxiliary", "both"] = setting(
        "auxiliary",
        "",
        "rows in a client's prediction: those of psi, plain and as long as its own (authors' description); both, those "
        "of psi as long as its own, and its own (authors' script)",
    )
    absent_classes: Literal["left_out", "kept"] = setting(
        "left_out", "", "what a client predicts of classes of which it has no training sample: nothing, or as of others"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_head("FedLoGe", task.network, bias=True)
        check_replaceable("FedLoGe", task.network)
        classes, width = task.network.head_shape
        if not 2 <= classes <= width:
            raise ConfigError(
                "FedLoGe's fixed classifier needs from 2 classes to as many as the last layer has inputs "
                f"({width}), but there are {classes}: choose a wider model"
            )
        if not set(body(task.network)) & set(task.network.parameter_names):
            raise ConfigError(
                "FedLoGe trains all layers but the last under a fixed classifier, and this model trains none of these: "
                "choose a deeper model"
            )
        kept = kept_elements(classes, width, self.sparsity, context.streams)
        if not kept.any(1).all():
            raise ConfigError(
                f"algorithm.sparsity is {self.sparsity}, with which class {int(kept.any(1).argmin())} has no element "
                "of the fixed classifier that is not zero: lower it"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return clipped_together(context, "the body and of both heads")

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        frame = (*task.network.head_shape, self.sparsity, self.classifier_norm, self.classifier_steps)
        weight = model[task.network.head_weight]
        return {"model": model, "classifier": sparse_simplex(*frame, context.streams).to(weight, copy=True)}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model = server["model"]
        rest = self.remainder(model, cohort, clients)
        sent = {"model": model, "classifier": server["classifier"]}
        return {"model": clients.mean(self.local_update, cohort, broadcast=sent, also=rest)}

    async def local_update(self, client: Client, model: Tree, classifier: Tensor) -> Weighted:  # type: ignore[override]
        """Trains the body under the fixed classifier, and both heads on its features."""
        trained = await client.train(
            {"model": model, "personal": self._own(client)}, self.objective, frozen={"classifier": classifier}
        )
        client.state["personal"] = trained["personal"]
        client.publish(local=Predictor.of(trained["model"]), personalized=self._realigned(client, trained["model"]))
        return self.weighted(client, trained["model"])

    @property
    def objective(self) -> Sum:
        """The three losses, from one forward pass; each reaches its own tensors only."""
        return function(self._under_three_heads)

    def _under_three_heads(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, _ = task.head_inputs_and_logits(trained["model"], batch)
        heads = (head_logits(task.network, trained[name], features.detach()) for name in ("model", "personal"))
        under = task.loss_of(F.linear(features, frozen["classifier"]), batch)
        return sum((task.loss_of(logits, batch) for logits in heads), under)

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        model, network = server["model"], task.network
        weight = network.head_weight
        idle = {name: torch.zeros_like(model[name]) for name in network.head_names}
        return {
            "global": Predictor.of({**model, weight: rows_of_length(model[weight], self.head_norm)}),
            "sparse": Predictor.of({**model, **idle, weight: server["classifier"]}),
        }

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {
            **self.global_predictors(server, client.task),
            "personalized": self._realigned(client, server["model"]),
        }

    async def join(self, client: Client, server: Tree) -> Tree:
        await self.local_update(client, server["model"], server["classifier"])
        return {}

    def _own(self, client: Client) -> Tree:
        """The client's own head, the initial one until it trains."""
        stored: Tree | None = client.state.get("personal")
        return part(client.initial_model(), client.task.network.head_names) if stored is None else stored

    def _realigned(self, client: Client, model: Tree) -> Predictor:
        """The prediction of a model for one client."""
        network, own = client.task.network, self._own(client)
        auxiliary = model[network.head_weight]
        head = personal_head(network, model, own, self.personal_heads == "both")
        exponent = 1.0 if self.absent_classes == "left_out" else 0.0
        present = class_counts(client.examples().y, len(auxiliary)).clamp(max=1)
        return Predictor.of(
            model, {**head, "prior": log_prior(present, exponent).to(auxiliary)}, combine=_log_probabilities
        )


def rows_of_length(weight: Tensor, length: float | None) -> Tensor:
    """A head's weight with rows of one length, shape (C, d).

    Args:
        weight: psi, shape (C, d); a row of zeros stays one.
        length: gamma'; None for the mean of the rows' own.
    """
    lengths = weight.norm(dim=1, keepdim=True)
    return F.normalize(weight, dim=1) * (lengths.mean() if length is None else length)


def personal_head(network: Network, auxiliary: Model, own: Model, both: bool) -> Tree:
    """The head of a client's prediction: its weight, and its bias if there is one.

    Args:
        network: names the tensors.
        auxiliary: psi and b, with or without a body.
        own: phi_k and b_k.
        both: whether the client's own rows are added, in place of those of psi.
    """
    weight = network.head_weight
    transferred = auxiliary[weight] * own[weight].norm(dim=1, keepdim=True)
    summed = {name: auxiliary[name] + own[name] for name in network.head_names if name != weight}
    return {weight: transferred + (own if both else auxiliary)[weight], **summed}


def _log_probabilities(models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
    """Log-probabilities (b, C) of (model, a client's head and prior)."""
    model, head = models
    features, _ = task.network.head_inputs_and_logits(model, x, training=False)
    found: Tensor = (head_logits(task.network, head, features) + head["prior"]).log_softmax(-1)
    return found
