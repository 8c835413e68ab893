"""FedPM: the weights stay as they are drawn; clients train the probabilities of a mask, and send masks of one bit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.partial import part
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.gradients.counted_normals import drawn_keys, uniforms
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.params import Tree, num_bytes
from rayfl.tasks.base import Batch, Model, Predictor, Task

_NO_NORM = "no client trains normalization layers, whose scales and shifts stay as they are drawn"


class FedPM(Algorithm):
    """FedPM: a sparse network of random weights, of which clients train the probability that each one stays.

    The weights w are drawn once, from the seed that all have, and never move. In a round client k begins with the
    scores s = logit(theta), and on each mini-batch draws a mask and goes down

        CE(m w),    m ~ Bernoulli(sigmoid(s)),    with the gradient of m in sigmoid(s) taken as 1

    (straight-through). It sends one mask drawn from its scores, of one bit for each weight. The server counts them in a
    Beta distribution for each weight, and takes its mode:

        alpha <- alpha + sum_k m_k,    beta <- beta + sum_k (1 - m_k),    theta <- (alpha - 1) / (alpha + beta - 2)

    where a bit counts as epsilon or 1 - epsilon, so that no probability ever is 0 or 1. Every ``reset_every`` rounds
    alpha and beta begin again at lambda_0. At first theta is sigmoid(z) with z ~ N(0, 1).

    Layers of normalization have no mask, and stay as they are drawn; running statistics are averaged.

    Server: theta, alpha, beta. Client: nothing. Down: theta. Up: m_k, one bit for each weight. Evaluated: m w with a
    mask that the server draws from theta in each round, or theta w (``evaluate``), for all clients (``global``); after
    training the client's m_k w (``local``).

    References:
        Isik, Pase, Gunduz, Weissman, Zorzi: Sparse Random Networks for Communication-Efficient Federated Learning, ICLR
        2023 (arXiv:2209.15328).
    """

    name: Literal["fedpm"] = "fedpm"
    citation: ClassVar[str] = "Isik et al., ICLR 2023"
    server_keeps: ClassVar[str] = "theta, alpha, beta"
    newcomer: ClassVar[str] = "m w, or theta w"
    no_privacy: ClassVar[str] = "its clients send masks, not changes of one model"
    running_statistics: ClassVar[str] = "they are those of the masks drawn in training, and another one is scored"
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(("statistics", "all"), _NO_NORM)

    weights: Literal["signed", "drawn"] = setting(
        "signed",
        "w",
        "the weights of a layer: signed, of one size, with the signs of the model's initial ones; drawn, these",
        kept=True,
    )
    scale: float = setting(
        1.0,
        "",
        "size of signed weights, times sqrt(2 / n) of a layer with n inputs",
        gt=0,
        only={"weights": ("signed",)},
        kept=True,
    )
    prior: float = setting(1.0, "lambda_0", "what alpha and beta begin with", ge=1)
    reset_every: int | None = setting(
        None, "1/rho", "rounds after which they begin again; null: clients / clients in a round, rounded up", ge=1
    )
    epsilon: float = setting(0.01, "epsilon", "what a bit 0 counts as, and 1 - epsilon a bit 1", gt=0, lt=0.5)
    evaluate: Literal["sampled", "mean"] = setting(
        "sampled", "", "what is scored: the network with a mask drawn from theta (sampled), or with theta (mean)"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        if not masked_names(task.network):
            raise ConfigError(
                "fedpm masks weights of layers, and this model trains none with two dimensions: choose a model with "
                "linear layers or convolutions (model=two_nn, two_cnn, ...), and let them require gradients"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        generator = context.streams.generator("init.scores")
        theta = {
            name: torch.from_numpy(generator.standard_normal(tuple(model[name].shape))).to(model[name]).sigmoid()
            for name in masked_names(task.network)
        }
        counts = {name: torch.full_like(leaf, self.prior) for name, leaf in theta.items()}
        server = {"theta": theta, "alpha": counts, "beta": dict(counts)}
        return {**server, "model": self.evaluated(theta, model, task, context, context.streams.generator("mask"))}

    def evaluated(
        self, theta: Tree, buffers: Model, task: Task, context: RoundContext, generator: np.random.Generator
    ) -> Tree:
        """The model that is scored.

        Args:
            theta: probabilities.
            buffers: a model whose buffers it has.
            task: has the network.
            context: of the run.
            generator: where its mask comes from.
        """
        network = task.network
        weights = self.frozen(network.initialize(context.streams.integer("init.global")), network)
        masks = theta if self.evaluate == "mean" else drawn_masks(theta, generator)
        found = {name: leaf * masks[name] if name in masks else leaf for name, leaf in weights.items()}
        return {**found, **part(buffers, network.buffer_names)}

    def frozen(self, model: Model, network: Network) -> Tree:
        """w: the parameters that never move, in which those of normalization layers are the initial ones."""
        found = part(model, network.parameter_names)
        if self.weights == "drawn":
            return found
        for names in _layers(network, model):
            size = self.scale * math.sqrt(2 / _inputs(model, names))
            found |= {name: torch.full_like(model[name], size).where(model[name] >= 0, -size) for name in names}
        return found

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        context, network = clients.context, clients.task.network
        buffers = part(server["model"], network.buffer_names)
        sent = {"theta": server["theta"], **({"buffers": buffers} if buffers else {})}
        mean, count = clients.mean(self.local_update, cohort, sent), len(cohort)
        begins = context.round % self._resets(context) == 0
        alpha, beta, theta = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        for name, share in _ordered(mean["masks"], network).items():
            ones = (share * count).round()
            ones = self.epsilon * count + (1 - 2 * self.epsilon) * ones
            first = torch.full_like(ones, self.prior)
            alpha[name] = (first if begins else server["alpha"][name]) + ones
            beta[name] = (first if begins else server["beta"][name]) + (count - ones)
            theta[name] = (alpha[name] - 1) / (alpha[name] + beta[name] - 2)
        generator = context.streams.generator("mask", context.round)
        model = self.evaluated(theta, mean.get("buffers", {}), clients.task, context, generator)
        return {"theta": theta, "alpha": alpha, "beta": beta, "model": model}

    def _resets(self, context: RoundContext) -> int:
        return self.reset_every or -(-context.num_clients // context.cohort_size)

    def sent(self, server: Tree) -> Tree:
        return {"theta": server["theta"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}

    async def local_update(self, client: Client, theta: Tree, buffers: Tree | None = None) -> Weighted:
        """Trains the scores, and sends a mask drawn from them."""
        network = client.task.network
        weights, running = self.frozen(client.initial_model(), network), buffers or {}
        scores = {name: leaf.logit() for name, leaf in _ordered(theta, network).items()}
        trained = await client.train({**scores, **running}, self.objective, frozen={"weights": weights}, draw=_keys)
        own = {name: trained[name].sigmoid() for name in scores}
        masks = drawn_masks(own, client.context.streams.generator("mask", client.round, client.id))
        moved = part(trained, running)
        client.publish(
            local=Predictor.of({**weights, **{name: weights[name] * mask for name, mask in masks.items()}, **moved})
        )
        sent = {"masks": masks, **({"buffers": moved} if moved else {})}
        bits = sum(mask.numel() for mask in masks.values())
        return Weighted(sent, 1, size=-(-bits // 8) + num_bytes(moved))

    def objective(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """CE of the network with a mask that is drawn from the scores."""
        weights, names = frozen["weights"], [*_ordered(trained, task.network)]
        sizes = [trained[name].numel() for name in names]
        numbers = uniforms(draw["key"], sum(sizes))
        model = {**weights, **{name: trained[name] for name in task.network.buffer_names}}
        for name, own in zip(names, torch.split(numbers, sizes), strict=True):
            theta = trained[name].sigmoid()
            mask = (own.view(theta.shape) < theta).to(theta.dtype)
            # a sum of products, since mask + theta - theta would not be the mask to the bit
            model[name] = weights[name] * mask + weights[name] * (theta - theta.detach())
        found: Tensor = task.loss(model, batch)
        return found


def masked_names(network: Network) -> tuple[str, ...]:
    """The parameters that have masks: those of layers that have one with two dimensions."""
    return tuple(name for names in _layers(network, network.initialize(0)) for name in names)


def drawn_masks(theta: Tree, generator: np.random.Generator) -> Tree:
    """Masks of 0 and 1, of the type of their probabilities.

    Args:
        theta: probabilities.
        generator: where the numbers come from.
    """
    return {
        name: (torch.from_numpy(generator.random(tuple(leaf.shape))).to(leaf.device) < leaf).to(leaf.dtype)
        for name, leaf in theta.items()
    }


def _ordered(tree: Mapping[str, Any], network: Network) -> dict[str, Any]:
    """The parameters among the tensors, in the network's order, by which random numbers are given to them."""
    return {name: tree[name] for name in network.parameter_names if name in tree}


def _layers(network: Network, model: Model) -> list[tuple[str, ...]]:
    return [names for names in network.layers if any(model[name].dim() > 1 for name in names)]


def _inputs(model: Model, names: Sequence[str]) -> int:
    """How many numbers a unit of a layer reads."""
    weight = next(model[name] for name in names if model[name].dim() > 1)
    return weight.numel() // weight.shape[0]


def _keys(generator: np.random.Generator, steps: int) -> Tree:
    return {"key": drawn_keys(generator, steps)}
