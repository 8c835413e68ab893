"""pFedVEM: a shared body, heads that are Gaussians of the clients' own, and a centre weighted by how sure they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Clients, check_head, setting
from algorithms.parts.drawn_features import divergence
from algorithms.parts.heads import head_logits
from algorithms.parts.partial import PartialModel, part, shared_part
from algorithms.pfedbayes import distribution, drawn_model, flat, shaped
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.gradients.counted_normals import drawn_keys, normals
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree, map_leaves
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class PFedVEM(PartialModel):
    """pFedVEM (variational expectation maximization): personal Gaussian heads around a centre, by their confidence.

    The clients share the body G. The head of client k is a Gaussian q_k with independent parameters of means mu_k and
    standard deviations sigma_k = log(1 + e^rho_k), around the server's centre w. A client of the cohort first says how
    far its d parameters are from the centre, as q_k is by then:

        delta_k^2 = 1/d ( sum sigma_k^2 + ||mu_k - w||^2 )

    Its head then takes ``head_epochs`` passes, from q_k, on

        F_k = mean_m CE(G, mu_k + sigma_k eps_m) + 1/n_k KL( q_k || N(w, delta_k^2 I) ),    eps_m ~ N(0, I),  m = 1..M

    while G stands still, and its body E epochs on the first term of F_k, while q_k does. The server takes the mean of
    the bodies G_k, and as centre the mean of the means with the clients' confidence 1 / delta_k^2 for weight:

        w <- sum_k mu_k / delta_k^2 / sum_k 1 / delta_k^2

    At first w is the head of the initial model. q_k has mu_k = w as the client first receives it, and sigma_k is
    ``initial_sigma`` everywhere; it goes on from round to round.

    Server: G, w. Client: q_k, never sent as a whole. Down: G, w. Up: G_k, mu_k with its weight, n_k. Evaluated: the
    latest G with w (``global``) and with mu_k, or with ``evaluation_samples`` heads drawn from q_k, which predict by
    their mean (``personalized``); after training also G_k with mu_k (``local``). A client never sampled has w for mu_k.

    References:
        Zhu, Ma, Blaschko: Confidence-Aware Personalized Federated Learning via Variational Expectation Maximization,
        CVPR 2023.
    """

    name: Literal["pfedvem"] = "pfedvem"
    citation: ClassVar[str] = "Zhu et al., CVPR 2023"
    no_privacy: ClassVar[str] = "its clients send heads that are weighted by how sure they are, beside their bodies"
    needs: ClassVar[Mapping[Trait, str]] = {"features": "drawn heads read the features of a sample"}
    client_keeps: ClassVar[str] = "q_k"
    server_keeps: ClassVar[str] = "G, w"
    newcomer: ClassVar[str] = "G, and a Gaussian head fitted to that around w"

    head_group: Literal["last_layer"] = setting("last_layer", "", "the head: the last linear layer")
    initial_sigma: float = setting(
        0.1, "sigma_0", "standard deviation of a head's parameters at first (authors' code: 1)", gt=0
    )
    weight_samples: int = setting(5, "M", "heads drawn for each step (authors' code: 5)", ge=1)
    head_epochs: int = setting(10, "", "passes of the head over the client's samples (authors' code: 10)", ge=1)
    head_batch_size: int | None = setting(
        None, "", "samples of a step of the head; null: all of the client's (authors' code)", ge=1
    )
    head_lr: float | None = setting(
        None, "eta_h", "learning rate of the head, which follows the rounds as train.lr does; null: train.lr", gt=0
    )
    body_noise: bool = setting(
        True, "", "the body learns under drawn heads (authors' code); false: under the means mu_k alone"
    )
    evaluation_samples: int = setting(
        0, "", "heads drawn from q_k for its predictions; 0: the one head mu_k (authors' code)", ge=0
    )

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("pFedVEM", task.network)
        super().check(task, context)

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = task.network.initialize(context.streams.integer("init.global"))
        return {"shared": part(model, self.body(task.network)), "head": part(model, task.network.head_names)}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        head: Tree = server["head"]
        center, confidence = map_leaves(torch.zeros_like, head), next(iter(head.values())).new_zeros(())
        nothing = {"confident": center, "confidence": confidence}
        rest = self.remainder({"shared": server["shared"], **nothing}, cohort, clients)
        mean = clients.mean(self.learn, cohort, server, also=rest)
        center = {name: leaf / mean["confidence"] for name, leaf in mean["confident"].items()}
        return {"shared": mean["shared"], "head": center}

    async def learn(self, client: Client, shared: Tree, head: Tree) -> Weighted:
        """Fits q_k, then the body; sends the body, and mu_k and 1 by the confidence per weight of the body."""
        network = client.task.network
        posterior = self.posterior(client, head)
        deviation = self.deviation(posterior, head, network.head_names)
        posterior = await self.fitted(client, {**head, **shared}, posterior, deviation)
        client.state["posterior"] = posterior
        model = part({**shared, **posterior["mu"]}, network.parameter_names + network.buffer_names)
        body = await client.train(
            part(model, self.body(network)),
            self.body_objective,
            frozen={"posterior": posterior},
            draw=self.draws,
            stream=".1",
        )
        client.publish(local=self.predictor(client, body, posterior))
        weight = self.weighted(client, {}).weight
        # whatever the weight of the body, the centre is a mean by confidence alone
        confidence = 1 / (deviation.square() * float(weight))
        confident = {name: leaf * confidence for name, leaf in posterior["mu"].items()}
        return Weighted({"shared": body, "confident": confident, "confidence": confidence}, weight)

    def posterior(self, client: Client, head: Tree) -> Tree:
        """q_k, whose means are the received ones for a client that has not trained yet."""
        # log(e^sigma - 1), for large sigma as well
        rho = self.initial_sigma + math.log(-math.expm1(-self.initial_sigma))
        first = distribution(head, map_leaves(lambda leaf: torch.full_like(leaf, rho), head))
        found: Tree = client.state.get("posterior", first)
        return found

    def deviation(self, posterior: Tree, head: Tree, names: Sequence[str]) -> Tensor:
        """delta_k, a scalar."""
        mu, rho, center = (flat(model, names) for model in (posterior["mu"], posterior["rho"], head))
        return (F.softplus(rho).square() + (mu - center).square()).mean().sqrt()

    async def fitted(self, client: Client, model: Tree, posterior: Tree, deviation: Tensor) -> Tree:
        """q_k after its training, from q_k before, by the received body with the centre as its head, and delta_k."""
        train, share = client.context.train, 1 / max(client.num_samples, 1)
        trained: Tree = await client.train(
            posterior,
            self.head_objective,
            # a tensor: clients with different plain numbers are not stacked
            frozen={"model": model, "deviation": deviation, "share": deviation.new_tensor(share)},
            draw=self.draws,
            epochs=self.head_epochs,
            lr=None if self.head_lr is None else self.head_lr * train.factor_in(client.round),
            weight_decay=0.0,
            settings=train.model_copy(update={"batch_size": self.head_batch_size}),
        )
        return trained

    def draws(self, generator: np.random.Generator, steps: int) -> Tree:
        """Keys of the drawn heads of all steps."""
        return {"keys": drawn_keys(generator, steps, self.weight_samples)}

    def head_objective(self, posterior: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """F_k, on features of the body in evaluation mode."""
        names = task.network.head_names
        inputs, _ = task.head_inputs_and_logits(frozen["model"], batch, training=False)
        mu, sigma = flat(posterior["mu"], names), F.softplus(flat(posterior["rho"], names))
        apart = divergence(mu, sigma, flat(frozen["model"], names), frozen["deviation"])
        share: Tensor = frozen["share"]
        return self.expected_loss(posterior, inputs, batch, task, draw) + share * apart

    def body_objective(self, body: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The mean loss under drawn heads, or the loss under that of means."""
        posterior = frozen["posterior"]
        inputs, logits = task.head_inputs_and_logits({**body, **posterior["mu"]}, batch)
        if not self.body_noise:
            return task.loss_of(logits, batch)
        return self.expected_loss(posterior, inputs, batch, task, draw)

    def expected_loss(self, posterior: Any, inputs: Tensor, batch: Batch, task: Task, draw: Any) -> Tensor:
        """The mean loss of drawn heads for what they read."""
        names = task.network.head_names
        mu, sigma = flat(posterior["mu"], names), F.softplus(flat(posterior["rho"], names))
        heads = [shaped(mu + sigma * normals(key, len(mu)), posterior["mu"], names) for key in draw["keys"].unbind()]
        losses = [task.loss_of(head_logits(task.network, head, inputs), batch) for head in heads]
        return torch.stack(losses).mean()

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {"global": Predictor.of({**server["head"], **shared_part(server)})}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        posterior = self.posterior(client, server["head"])
        personalized = self.predictor(client, shared_part(server), posterior)
        return {**self.global_predictors(server, client.task), "personalized": personalized}

    def predictor(self, client: Client, body: Tree, posterior: Tree) -> Predictor:
        """A body with q_k's head of means, or with heads drawn from it, with the same noise in every round."""
        if not self.evaluation_samples:
            return Predictor.of({**posterior["mu"], **body})
        keys = drawn_keys(client.context.streams.generator("posterior", client=client.id), self.evaluation_samples)
        names = client.task.network.head_names
        return Predictor.of(*(partial(with_drawn_head, body, posterior, torch.from_numpy(key), names) for key in keys))

    @property
    def joins_for(self) -> str:
        return "algorithm.head_epochs"

    async def join(self, client: Client, server: Tree) -> Tree:
        """Fits a head of its own, while the body stays as it is."""
        head = server["head"]
        posterior = self.posterior(client, head)
        deviation = self.deviation(posterior, head, client.task.network.head_names)
        client.state["posterior"] = await self.fitted(client, {**head, **server["shared"]}, posterior, deviation)
        return {}


def with_drawn_head(body: Model, posterior: Tree, key: Tensor, names: Sequence[str]) -> Tree:
    """A body with a head drawn from a Gaussian, by a key of ``drawn_keys``."""
    return {**body, **drawn_model(posterior, key, names)}
