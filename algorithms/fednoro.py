"""FedNoRo: clients with wrong labels are told by their losses, taught by the received model, and count less."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.balanced import log_prior
from algorithms.parts.means import mean_over_cohort
from algorithms.parts.noisy_clients import in_higher_component, normalized_losses, relative_distances
from algorithms.parts.prototypes import class_counts, class_means
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait

_UNTAUGHT = {"distillation_weight": (0,)}


class FedNoRo(FineTuned):
    """FedNoRo (noise-robust federated learning): for label noise that some clients have, and others have not.

    With z the logits and pi_k the shares of the classes in the client's training samples, the first T_1 rounds are
    federated averaging on losses with adjusted logits,

        CE(z + log pi_k, y)

    At the start of round T_1 (0-indexed) every client, sampled or not, says for each class c the mean l_kc of its
    samples' plain cross-entropies under the received model. On a scale from 0 to 1 for each class they are a vector of
    C numbers for each client, and a mixture of two Gaussians divides the clients: those in the component of higher
    losses are noisy, for good. From then on a noisy client trains on

        lambda_t KL(softmax(z_w / tau) || softmax(z + log pi_k)) + (1 - lambda_t) CE(z + log pi_k, y)
        lambda_t = lambda e^{-5 (1 - u)^2},    u = min(1, (t - T_1) / R)

    with z_w the logits of the received model in evaluation mode, and a clean one as before. The server weighs models
    down that are far from all of clean clients,

        w <- sum_{k in S} q_k e^{-D_k} w_k / sum_{k in S} q_k e^{-D_k}
        D_k = min_{j clean} d(w_k, w_j) / max_i min_{j clean} d(w_i, w_j)    for noisy k, else 0

    where d is the sum over tensors of the norms of the differences, and k, i and j are of the cohort S. A class of
    which the client has no sample is left out of the softmax, and of the divergence.

    Server: w, and from round T_1 on who is noisy. Client: nothing. Down: w, and from round T_1 on lambda_t, which is 0
    for clean clients. Up: w_k and n_k; in round T_1 every client's l_kc, and which classes it has. Evaluated: w
    (``global``), and with ``finetune_epochs`` w fine-tuned by each client on the plain cross-entropy.

    The mixture always divides clients, also where all have the same share of wrong labels: there who counts as noisy
    has the higher losses for another reason.

    References:
        Wu, Yu, Jiang, Cheng, Yan: FedNoRo: Towards Noise-Robust Federated Learning by Addressing Class Imbalance and
        Label Noise Heterogeneity, IJCAI 2023 (arXiv 2305.05230); formulas of the authors' code.
    """

    name: Literal["fednoro"] = "fednoro"
    citation: ClassVar[str] = "Wu et al., IJCAI 2023"
    no_privacy: ClassVar[str] = "its clients say their losses by class, and the server compares their models one by one"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "clients are told apart by their losses on each class"}
    server_keeps: ClassVar[str] = "w, who is noisy"

    warmup_rounds: int = setting(
        10,
        "T_1",
        "round (0-indexed) at whose start noisy clients are told; never, if there are no more rounds",
        ge=1,
        kept="warmup_rounds",
    )
    mixtures: int = setting(
        9, "", "fits of the mixture, of which the most frequent outcome counts", ge=1, kept="warmup_rounds"
    )
    distillation_weight: float = setting(
        0.8,
        "lambda",
        "last weight of what the received model says; 0: labels alone, for noisy clients, too",
        ge=0,
        le=1,
    )
    ramp_rounds: int = setting(
        39, "R", "rounds after round T_1 in which lambda_t rises to lambda; 0: none", ge=0, unless=_UNTAUGHT
    )
    temperature: float = setting(
        0.8, "tau", "temperature of what the received model says; below 1 it is sharper", gt=0, unless=_UNTAUGHT
    )
    distance_aware: bool = setting(True, "", "whether noisy clients count less the farther they are; if not, D_k is 0")

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if context.num_clients < 2:
            raise ConfigError(
                "FedNoRo divides the clients into noisy and clean ones, but there is one client: take another method"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if self.warmup_rounds < context.rounds:
            return ()
        return (
            f"no noisy clients are told: algorithm.warmup_rounds is {self.warmup_rounds}, but the run has "
            f"{context.rounds} rounds; until then it is federated averaging with adjusted logits",
        )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        noisy: Tensor | None = server.get("noisy")
        if noisy is None and clients.context.round < self.warmup_rounds:
            return super().round(server, cohort, clients)
        model, told = server["model"], {}
        if noisy is None:
            noisy = self.told(model, clients)
            told = {"noisy": noisy}
        weight = self.weight_in(clients.context.round)
        payloads = {client: {"weight": weight if noisy[client] else 0.0} for client in cohort}
        trained = clients.map(self.taught_update, cohort, {"model": model}, payloads)
        factors = None
        if self.distance_aware:
            distances = relative_distances(trained, noisy)
            factors = {client: math.exp(-distance) for client, distance in distances.items()}
        return {"model": mean_over_cohort(self, trained, model, clients, factors), **told}

    def weight_in(self, round: int) -> float:
        """Returns lambda_t.

        Args:
            round: t, 0-indexed.
        """
        risen = min(1.0, (round - self.warmup_rounds) / self.ramp_rounds) if self.ramp_rounds else 1.0
        return self.distillation_weight * math.exp(-5 * (1 - risen) ** 2)

    def told(self, model: Tree, clients: Clients) -> Tensor:
        """Who is noisy, bool of shape (K,), from the losses of all clients.

        Args:
            model: w.
            clients: the clients.
        """
        everyone = range(clients.context.num_clients)
        replies = clients.map(self.class_losses, everyone, {"model": model}, required=True)
        losses, present = (
            np.stack([replies[client][key].cpu().numpy() for client in everyone]) for key in ("losses", "present")
        )
        return torch.from_numpy(in_higher_component(normalized_losses(losses, present), self.mixtures))

    async def class_losses(self, client: Client, model: Tree) -> Tree:
        """The mean cross-entropy of each class, 0 without samples, float64 (C,), and which classes there are."""
        logits = await client.outputs(lambda x, task: task.network.logits(model, x, training=False))
        labels = client.examples().y
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        counts, means = class_means(losses[:, None], labels, logits.shape[1])
        return {"losses": means[:, 0], "present": counts > 0}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        return self.weighted(client, await self.taught_update(client, model, 0.0))

    async def taught_update(self, client: Client, model: Tree, weight: float) -> Tree:
        """Trains the received model.

        Args:
            client: who trains.
            model: w.
            weight: lambda_t; 0 for a clean client.
        """
        network = client.task.network
        counts = class_counts(client.examples().y, network.head_shape[0])
        like = model[network.parameter_names[0]]
        frozen: Tree = {"prior": log_prior(counts, 1.0).to(like)}
        if weight:
            frozen |= {"received": model, "present": counts.clamp(max=1).to(like), "weight": weight}
        trained = await client.train(model, self.taught if weight else self.objective, frozen=frozen)
        client.publish(local=Predictor.of(trained))
        return trained

    @property
    def objective(self) -> Sum:
        """CE(z + log pi_k, y)."""
        return function(self._adjusted)

    @property
    def taught(self) -> Sum:
        """What a noisy client trains on."""
        return function(self._taught)

    def _adjusted(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        return task.loss_of(task.logits(model, batch) + frozen["prior"], batch)

    def _taught(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        adjusted, weight = task.logits(model, batch) + frozen["prior"], frozen["weight"]
        wanted = (task.logits(frozen["received"], batch, training=False) / self.temperature).log_softmax(-1)
        # what the received model says of a class that the client lacks is nothing that its prior would let it say
        said = adjusted.log_softmax(-1) * frozen["present"]
        divergence = batch.mean((wanted.exp() * (wanted - said)).sum(-1))
        found: Tensor = weight * divergence + (1 - weight) * task.loss_of(adjusted, batch)
        return found

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return self.sent(server), {}
