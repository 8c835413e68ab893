"""FedCorr: clients with wrong labels are told by the dimensionality of predictions, and their labels are corrected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.corrected_labels import correct, corrected, outputs_of
from algorithms.parts.dimensionality import local_dimensionality
from algorithms.parts.masks import kept_count
from algorithms.parts.mixup import check_mixed, mixed_loss, mixing
from algorithms.parts.noisy_clients import in_higher_component
from algorithms.parts.proximity import proximity
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import TRAINED, Sum, frozen, function, loss
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task, Trait


class FedCorr(Averaging):
    """FedCorr: noisy clients are told, their labels corrected, and then all train as usual.

    Each of the first T_1 rounds is a pass over all clients, sampled or not. In random order each trains the model that
    the one before it has sent, without a mean (or ``clients_at_once`` of them, which are averaged), on

        l CE(f(x_l), y) + (1 - l) CE(f(x_l), y') + beta mu_k ||theta - w||^2,    x_l = l x + (1 - l) x'

    where x' and y' are the samples of the mini-batch in another order, and l ~ Beta(alpha, alpha), both drawn for each
    step (mixup). mu_k is the share of wrong labels that client k is estimated to have, 0 in the first pass. By its
    trained model client k computes the loss of each of its samples, and the mean of their local intrinsic
    dimensionalities: with r_1 <= .. <= r_m the distances from the probabilities of sample x to the nearest ones of its
    other samples,

        LID(x) = -m / sum_{i=1..m} log(r_i / r_m)

    After a pass the sums of these means over the passes so far are divided by a mixture of two Gaussians. Clients in
    the component of higher sums are noisy. Each of these divides its own losses by such a mixture: mu_k is the share of
    samples in the component of higher losses, and mu_k = 0 for the others. Of the floor(pi n_k mu_k) samples with the
    highest losses those get a new label, argmax f(x; w), for which max softmax(f(x; w)) >= theta.

    In the next T_2 rounds only clients with mu_k <= kappa train. After them noisy clients give a new label to all
    samples of which w is that sure. From then on it is federated averaging with these labels. Mixup stays; beta is 0.

    Server: w, the sums, who is noisy, and mu_k. Client: its labels, and losses of the last pass.
    Down: w, and mu_k in the first T_1 rounds. Up: w_k and n_k; the mean dimensionality, and mu_k of noisy clients.
    Evaluated: w (``global``).

    The mixtures always divide, also where all clients have the same share of wrong labels.

    References:
        Xu, Chen, Quek, Chong: FedCorr: Multi-Stage Federated Learning for Label Noise Correction, CVPR 2022 (arXiv
        2204.04677), Algorithm 1; formulas of the authors' code.
    """

    name: Literal["fedcorr"] = "fedcorr"
    citation: ClassVar[str] = "Xu et al., CVPR 2022"
    no_privacy: ClassVar[str] = "its clients say one by one how their predictions spread, and train one after the other"
    needs: ClassVar[Mapping[Trait, str]] = {
        "classes": "labels are corrected by the likeliest class",
        "distribution": "clients are told apart by their probabilities of classes",
    }
    needs_everyone: ClassVar[str] = "in its first rounds every client trains, one after the other"
    client_keeps: ClassVar[str] = "its labels, its losses"
    server_keeps: ClassVar[str] = "w, sums of LID, mu_k"

    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_k", "weights of the mean: samples n_k / sum over the cohort, or uniform 1/|S|"
    )
    iterations: int = setting(
        5, "T_1", "passes over all clients in the beginning, a round each", ge=1, kept="iterations"
    )
    clients_at_once: int = setting(
        1,
        "",
        "clients that train from the same model in a pass, and are averaged before the next ones",
        ge=1,
        kept="iterations",
    )
    clean_rounds: int = setting(
        50, "T_2", "rounds after the passes in which only clean clients train; 0: none", ge=0, kept=True
    )
    clean_level: float = setting(
        0.1, "kappa", "largest mu_k of a clean client", ge=0, le=1, unless={"clean_rounds": (0,)}
    )
    neighbours: int = setting(20, "m", "nearest samples for the dimensionality", ge=2, kept="iterations")
    relabel_share: float = setting(
        0.5, "pi", "share of the labels estimated to be wrong that a pass may correct", ge=0, le=1, kept="iterations"
    )
    confidence: float = setting(
        0.5, "theta", "probability of the likeliest class from which on a label is corrected", ge=0, le=1
    )
    proximal_weight: float = setting(5.0, "beta", "weight of the proximal term in the passes", ge=0, kept="iterations")
    proximal_form: Literal["squared", "norm"] = setting(
        "squared", "", "||.||^2, or ||.|| (official code)", unless={"proximal_weight": (0,)}, kept="iterations"
    )
    mixup_concentration: float = setting(1.0, "alpha", "of the Beta distribution of l; 0: no mixup", ge=0)

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        if self.mixup_concentration:
            check_mixed("fedcorr", "mixup_concentration", task)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if context.num_clients < 2:
            raise ConfigError(
                "FedCorr divides the clients into noisy and clean ones, but there is one client: take another method"
            )
        if context.stages.active:
            raise ConfigError(
                "stages: not with FedCorr, whose clients keep corrected labels of the samples that they have in the "
                "beginning: leave out the section stages, or take another method"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        begins = self.iterations + self.clean_rounds
        if begins < context.rounds:
            return ()
        return (
            f"no round of usual training: algorithm.iterations={self.iterations} and algorithm.clean_rounds="
            f"{self.clean_rounds} come first, and the run has {context.rounds} rounds",
        )

    def init(self, task: Task, context: RoundContext) -> Tree:
        nothing = torch.zeros(context.num_clients, dtype=torch.float64)
        return {
            **super().init(task, context),
            "dimensions": nothing,
            "levels": nothing.clone(),
            "noisy": torch.zeros(context.num_clients, dtype=torch.bool),
        }

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        after = clients.context.round - self.iterations
        if after < 0:
            return self.iteration(server, clients)
        sent = self.sent(server)
        if after < self.clean_rounds:
            cohort = self.clean_cohort(server["levels"], cohort, clients)
        elif after == self.clean_rounds and after and server["noisy"].any():
            clients.map(self.relabel, server["noisy"].nonzero().flatten().tolist(), sent, required=True)
        return {"model": clients.mean(self.local_update, cohort, sent)}

    def iteration(self, server: Tree, clients: Clients) -> Tree:
        """A pass over all clients, and what follows from it: who is noisy, and how much.

        Args:
            server: its tree.
            clients: the clients.
        """
        context = clients.context
        model, levels = server["model"], server["levels"]
        samples = clients.num_samples(range(context.num_clients))
        order = context.streams.generator("fedcorr.order", context.round).permutation(context.num_clients)
        taking_part = [int(client) for client in order if samples[client]]
        for start in range(0, len(taking_part), self.clients_at_once):
            group = sorted(taking_part[start : start + self.clients_at_once])
            payloads = {client: {"level": levels[client]} for client in group}
            model = clients.mean(self.first_update, group, {"model": model}, payloads, required=True)
        taking_part.sort()
        replies = clients.map(self.describe, taking_part, {}, required=True)
        dimensions, levels = server["dimensions"].clone(), torch.zeros_like(levels)
        for client, reply in replies.items():
            dimensions[client] += reply["dimension"].cpu()
        noisy = torch.zeros(context.num_clients, dtype=torch.bool)
        noisy[taking_part] = torch.from_numpy(in_higher_component(dimensions[taking_part, None].numpy()))
        told = noisy.nonzero().flatten().tolist()
        if told:
            for client, reply in clients.map(self.settle, told, {"model": model}, required=True).items():
                levels[client] = reply["level"].cpu()
        return {"model": model, "dimensions": dimensions, "levels": levels, "noisy": noisy}

    def clean_cohort(self, levels: Tensor, cohort: Sequence[int], clients: Clients) -> list[int]:
        """As many clean clients as there are in the cohort, or all: the cohort's own, and others drawn at random.

        Args:
            levels: mu_k, shape (K,).
            cohort: the clients that are sampled.
            clients: the clients.
        """
        context = clients.context
        # a client without training samples has mu_k = 0, and nothing to train on
        there = clients.num_samples(range(context.num_clients)).nonzero()[0].tolist()
        most = max(self.clean_level, float(levels[there].min()))
        clean = [client for client in there if levels[client] <= most]
        found = [client for client in cohort if client in clean]
        others = [client for client in clean if client not in found]
        missing = min(len(cohort) - len(found), len(others))
        drawn = context.streams.generator("fedcorr.clean", context.round).choice(others, size=missing, replace=False)
        return sorted([*found, *(int(client) for client in drawn)])

    async def first_update(self, client: Client, model: Tree, level: Tensor) -> Weighted:
        """Trains in a pass, and keeps what follows from the trained model.

        Args:
            client: who trains.
            model: w.
            level: mu_k.
        """
        known = {"received": model, "level": level.to(next(iter(model.values())))}
        trained = await self.trained(client, model, self.first_objective, known)
        logits = await outputs_of(client, trained)
        client.state["losses"] = cross_entropy(logits, corrected(client).y, reduction="none")
        client.state["dimension"] = local_dimensionality(logits.softmax(-1), self.neighbours).mean()
        return self.weighted(client, trained)

    async def describe(self, client: Client) -> Tree:
        """Returns the mean local dimensionality of the last pass."""
        return {"dimension": client.state.pop("dimension")}

    async def settle(self, client: Client, model: Tree) -> Tree:
        """Corrects labels of high losses, and returns mu_k.

        Args:
            client: a noisy client.
            model: w at the end of the pass.
        """
        losses = client.state["losses"]
        wrong = in_higher_component(losses.double().cpu().numpy()[:, None])
        count = kept_count(self.relabel_share, int(wrong.sum()))
        chosen = torch.zeros_like(losses, dtype=torch.bool)
        chosen[losses.argsort(descending=True, stable=True)[:count]] = True
        await correct(client, model, self.confidence, chosen)
        return {"level": torch.tensor(wrong.mean(), dtype=torch.float64)}

    async def relabel(self, client: Client, model: Tree) -> Tree:
        """Corrects labels of all samples of which the model is sure; returns nothing."""
        await correct(client, model, self.confidence)
        return {}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        return self.weighted(client, await self.trained(client, model, self.objective, None))

    async def trained(self, client: Client, model: Tree, objective: Sum, known: Tree | None) -> Tree:
        """Trains the received model on the labels as they are now.

        Args:
            client: who trains.
            model: w.
            objective: on what.
            known: what the objective reads.
        """
        trained = await client.train(
            model,
            objective,
            frozen=known,
            draw=mixing(client, self.mixup_concentration) if self.mixup_concentration else None,
            examples=corrected(client),
            views=client.context.augmentation,
        )
        client.publish(local=Predictor.of(trained))
        return trained

    @property
    def objective(self) -> Sum:
        """The cross-entropy, of mixed samples with mixup."""
        return function(mixed_loss) if self.mixup_concentration else loss()

    @property
    def first_objective(self) -> Sum:
        """The objective of the passes, with the proximal term."""
        if not self.proximal_weight:
            return self.objective
        return self.objective + self.proximal_weight * (
            frozen("level") * proximity(self.proximal_form, TRAINED, "received")
        )

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return self.sent(server), {}
