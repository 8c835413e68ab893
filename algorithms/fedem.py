"""FedEM: clients whose distributions are mixtures of common components learn one model of each, and its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.likelihoods import log_probabilities, losses_of_samples
from algorithms.parts.requirements import check_initial_models
from algorithms.parts.sample_rows import by_step
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import loss
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


def responsibilities(losses: Tensor, mixture: Tensor) -> Tensor:
    """q_im = pi_m exp(-l_im) / sum_h pi_h exp(-l_ih), the E-step; float64 of shape (n, M).

    Args:
        losses: l_im, the loss of sample i under component m, shape (n, M).
        mixture: pi, shape (M,), not negative and not all zero. A component without weight stays without.
    """
    return (mixture.double().log() - losses.double()).softmax(-1)


class FedEM(Averaging):
    """FedEM: every client's data are a mixture of M components; all learn the M models, and each its own weights.

    With the received models theta_m and its weights pi_km, client k computes for each of its training samples, in
    evaluation mode and without augmentation,

        q_im = pi_km exp(-l(theta_m; x_i, y_i)) / sum_h pi_kh exp(-l(theta_h; x_i, y_i)),    pi_km <- mean_i q_im

    and trains all theta_m on the same mini-batches, each on the mean of q_im CE(theta_m; x_i, y_i) with these q_im. The
    server averages every theta_m with weights n_k.

    Server: theta_1..theta_M, drawn independently: equal ones would never part. Client: pi_k. Down: M models. Up: M
    models and n_k. Evaluated: sum_m pi_km softmax(theta_m(x)) with the server's models (``personalized``). A client
    never sampled makes one E-step from equal weights for that. There is no single global model.

    References:
        Marfoq, Neglia, Bellet, Kameni, Vidal: Federated Multi-Task Learning under a Mixture of Distributions,
        NeurIPS 2021, Algorithm 1 and eqs. 8-10.
    """

    name: Literal["fedem"] = "fedem"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Marfoq et al., NeurIPS 2021"
    needs: ClassVar[Mapping[Trait, str]] = {
        "classes": "the likelihood of its class says of which component a sample is"
    }
    client_keeps: ClassVar[str] = "pi_k"
    server_keeps: ClassVar[str] = "theta_1..theta_M"
    newcomer: ClassVar[str] = "the models, mixed by an E-step from equal weights"
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("statistics", "all"), "clients send several models, whose layers would be the same ones"
    )

    components: int = setting(3, "M", "number of models", ge=1)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.components > 1 and context.train.max_grad_norm is not None:
            raise ConfigError(
                "fedem trains its components in one step, and train.max_grad_norm would scale the gradient of each by "
                "the others': set train.max_grad_norm=null"
            )
        if self.components > 1:
            check_initial_models("fedem", task.network)

    def init(self, task: Task, context: RoundContext) -> Tree:
        """Model 0 is the initial model of federated averaging; the others are drawn from streams of their own."""
        streams = ["init.global", *(f"init.global.{m}" for m in range(1, self.components))]
        return {"models": {str(m): task.network.initialize(context.streams.integer(s)) for m, s in enumerate(streams)}}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        models = server["models"]
        rest = self.remainder(models, cohort, clients)
        return {"models": clients.mean(self.local_update, cohort, broadcast={"models": models}, also=rest)}

    async def local_update(self, client: Client, models: Tree) -> Weighted:
        """Makes the E-step, and trains all models."""
        if self.components == 1:  # every weight is 1
            trained = {"0": await client.train(models["0"], loss())}
            mixture = torch.ones(1, dtype=torch.float64)
        else:
            weights = await self.weights(client, models, self.mixture_of(client))
            mixture = self.renewed(client, weights)
            width = client.context.train.batch_size or client.num_samples
            rows = partial(by_step, weights.cpu().numpy(), client.batches(), width)
            trained = await client.train(models, self.weighted_losses, draw=rows)
        client.state["mixture"] = mixture
        client.publish(local=self.mixed(trained, mixture))
        return self.weighted(client, trained)

    def weighted_losses(self, models: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """sum_m mean_i q_im CE(theta_m; x_i, y_i): each model's own loss, since none has a gradient in another's."""
        weights = draw["rows"][: len(batch.y)]
        parts = []
        for m, model in models.items():
            losses = F.cross_entropy(task.logits(model, batch), batch.y, reduction="none")
            parts.append(batch.mean(weights[:, int(m)] * losses))
        return torch.stack(parts).sum()

    def mixture_of(self, client: Client) -> Tensor:
        """pi_k, equal weights until the client has trained."""
        if "mixture" in client.state:
            kept: Tensor = client.state["mixture"]
            return kept
        return torch.full((self.components,), 1 / self.components, dtype=torch.float64)

    async def weights(self, client: Client, models: Tree, mixture: Tensor) -> Tensor:
        """q of the client's training samples, float64 of shape (n, M)."""
        if not client.num_samples:
            return torch.zeros(0, self.components, dtype=torch.float64)
        losses = await losses_of_samples(client, models.values())
        return responsibilities(losses, mixture.to(losses.device))

    def renewed(self, client: Client, weights: Tensor) -> Tensor:
        """pi_k after the E-step; as before for a client without training samples."""
        return weights.mean(0) if len(weights) else self.mixture_of(client)

    def mixed(self, models: Tree, mixture: Tensor) -> Predictor:
        """The models' mixture of probabilities."""
        return Predictor.of(*models.values(), combine=partial(_log_mixture, mixture))

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        models, mixture = server["models"], self.mixture_of(client)
        if "mixture" not in client.state:
            mixture = self.renewed(client, await self.weights(client, models, mixture))
        return {"personalized": self.mixed(models, mixture)}


def _log_mixture(mixture: Tensor, models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
    """log sum_m pi_m p_m, shape (b, C)."""
    members = torch.stack([log_probabilities(model, x, task) for model in models])
    weights: Tensor = mixture.to(members.device).log().to(members.dtype)
    return torch.logsumexp(members + weights[:, None, None], 0)
