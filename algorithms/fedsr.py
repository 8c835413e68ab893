"""FedSR: simple representations, drawn from a distribution for each sample, for people and domains not met before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Aggregation, Averaging, Clients, check_head, setting
from algorithms.parts.drawn_features import distribution, divergence, drawn_predictor
from algorithms.parts.heads import head_logits
from algorithms.parts.layers import draw_linear
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class FedSR(Averaging):
    """FedSR: federated averaging of a model with drawn representations that are short and tell little beside the label.

    With f(x) in R^d the input of the last linear layer W, a further linear layer, the encoder, gives a Gaussian of
    representations for every sample, of which one is drawn and read by W:

        (mu, rho) = A f(x) + b,    sigma = log(1 + e^rho),    z = mu + sigma eps,    eps ~ N(0, I)

    Clients minimise, with a mean over the mini-batch,

        CE(W z, y) + alpha ||z|| + beta KL( N(kappa mu, kappa^2 sigma^2) || N(r_y, s_y^2) )

    The length of z is its L2R. The divergence, CMI, bounds the information between z and x given y from above. Its
    reference, r_c and s_c = log(1 + e^{t_c}) in R^d for each class c and the factor kappa, is trained with the rest. At
    first r_c is 0, t_c is 1 and kappa is 1. For the divergence, summed over d dimensions, kappa counts by its size.

    Server: w, the encoder, and the reference. Client: nothing, or its own reference (``reference=own``), which is never
    sent then. Down: what the server has. Up: the same, trained, and n_k. Evaluated: the mean probability of
    ``evaluation_samples`` representations of each sample (``global``, after training ``local``). Newcomers have the
    same: the method is made for clients that take no part in training.

    References:
        Nguyen, Torr, Lim: FedSR: A Simple and Effective Domain Generalization Method for Federated Learning,
        NeurIPS 2022, its regularizers L2R and CMI.
    """

    name: Literal["fedsr"] = "fedsr"
    citation: ClassVar[str] = "Nguyen et al., NeurIPS 2022"
    needs: ClassVar[Mapping[Trait, str]] = {"features": "a layer makes a distribution of the features of a sample"}
    client_keeps: ClassVar[str] = "(r, s, kappa)_k or -"
    server_keeps: ClassVar[str] = "w, A, b, r, s, kappa"
    newcomer: ClassVar[str] = "w and the encoder"

    aggregation: Aggregation = setting(
        "uniform",
        "q_k",
        "weights of the mean: uniform 1/|S| (official code); samples n_k / sum over the cohort; population n_k / sum "
        "over all clients, the rest staying on the old server model; tokens those that a language model learns, in "
        "place of samples",
    )
    length_weight: float = setting(0.01, "alpha", "weight of L2R, the length of representations", ge=0)
    information_weight: float = setting(
        0.0005, "beta", "weight of CMI, the divergence from the reference of a sample's class", ge=0
    )
    reference: Literal["shared", "own"] = setting(
        "shared",
        "",
        "whether the reference is averaged with the model, so that all clients' representations of a class are drawn "
        "to one distribution; own: each client has its own (official code)",
        unless={"information_weight": (0,)},
        kept=True,
    )
    evaluation_samples: int = setting(
        20, "", "representations of a sample that predict by their mean probability; 0: the one at mu", ge=0
    )

    def needed(self) -> Mapping[Trait, str]:
        if self.information_weight == 0:
            return self.needs
        return {**self.needs, "classes": "every class has a reference distribution"}

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("FedSR", task.network)
        super().check(task, context)

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        weight = model[task.network.head_weight]
        width = weight.shape[1]
        encoder = draw_linear(width, 2 * width, weight, context.streams.generator("init.encoder"))
        shared = {"reference": first_reference(weight)} if self._shares_reference else {}
        return {"model": model, "encoder": encoder, **shared}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        rest = self.remainder(server, cohort, clients)
        return clients.mean(self.encoded_update, cohort, broadcast=server, also=rest)

    async def encoded_update(
        self, client: Client, model: Tree, encoder: Tree, reference: Tree | None = None
    ) -> Weighted:
        """Trains model, encoder and reference together, and sends what is shared."""
        start = {"model": model, "encoder": encoder}
        if self.information_weight > 0:
            own = client.state.get("reference") or first_reference(model[client.task.network.head_weight])
            start["reference"] = own if reference is None else reference
        shape = client.context.train.batch_size or client.num_samples, client.task.network.head_shape[1]
        trained = await client.train(start, self.objective, draw=lambda g, steps: {"noise": noise(g, (steps, *shape))})
        client.publish(local=self._predictor(trained["model"], trained["encoder"]))
        if self._shares_reference or self.information_weight == 0:
            return self.weighted(client, trained)
        client.state["reference"] = trained["reference"]
        return self.weighted(client, {"model": trained["model"], "encoder": trained["encoder"]})

    @property
    def objective(self) -> Sum:
        """The cross-entropy at drawn representations, L2R and CMI, from one forward pass."""
        return function(self._regularized)

    def _regularized(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, _ = task.head_inputs_and_logits(trained["model"], batch)
        mu, sigma = distribution(trained["encoder"], features)
        drawn = mu + sigma * draw["noise"][: len(batch.y)]
        value = task.loss_of(head_logits(task.network, trained["model"], drawn), batch)
        if self.length_weight > 0:
            value = value + self.length_weight * batch.mean(drawn.norm(dim=1))
        if self.information_weight > 0:
            apart = information(mu, sigma, trained["reference"], batch.y)
            value = value + self.information_weight * batch.mean(apart)
        return value

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        return super().update(trained["model"], received, task)

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {"global": self._predictor(server["model"], server["encoder"])}

    def _predictor(self, model: Model, encoder: Model) -> Predictor:
        """The mean probability of the same number of representations of every sample."""
        return drawn_predictor(model, encoder, self.evaluation_samples)

    @property
    def _shares_reference(self) -> bool:
        return self.information_weight > 0 and self.reference == "shared"


def first_reference(weight: Tensor) -> Tree:
    """The reference of all classes at first: ``mean`` r and ``spread`` t, shape (C, d) each, and ``factor`` kappa.

    Args:
        weight: of the head, shape (C, d).
    """
    return {"mean": torch.zeros_like(weight), "spread": torch.ones_like(weight), "factor": weight.new_ones(())}


def information(mu: Tensor, sigma: Tensor, reference: Mapping[str, Tensor], y: Tensor) -> Tensor:
    """KL( N(kappa mu, kappa^2 sigma^2) || N(r_y, s_y^2) ) of each sample in nats, shape (b,).

    Args:
        mu: shape (b, d).
        sigma: shape (b, d).
        reference: of :func:`first_reference`.
        y: the samples' classes, shape (b,).
    """
    spread, factor = F.softplus(reference["spread"])[y], reference["factor"]
    return divergence(factor * mu, factor.abs() * sigma, reference["mean"][y], spread)


def noise(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal numbers, float32."""
    return generator.standard_normal(shape, dtype=np.float32)
