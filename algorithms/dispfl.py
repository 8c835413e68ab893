"""Dis-PFL: sparse personal models with masks of their own, averaged with neighbours' where these have an element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.masks import (
    decoded,
    drawn_masks,
    encoded,
    kept_count,
    kept_shares,
    masked,
    with_largest,
    without_smallest,
)
from algorithms.parts.partial import part
from algorithms.parts.peers import Peers
from algorithms.parts.slopes import buffers
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.examples import Examples
from rayfl.models.private_norm import private_names
from rayfl.objectives import loss
from rayfl.params import Tree, num_bytes
from rayfl.tasks.base import Batch, Predictor, Task


class DisPFL(Peers):
    """Dis-PFL: decentralized sparse training. Each client keeps a fixed number of elements, which ones it learns.

    Client i has a mask m_i and a model w_i that is zero outside of the mask s_i with which it was trained last. In a
    round every client of the cohort gets w_j and s_j of its neighbours N_i, takes for each element the mean over those
    that have it, and keeps what its mask has:

        w_i <- m_i * (w_i + sum_{j in N_i} w_j) / (s_i + sum_{j in N_i} s_j)

    with 0 / 0 = 0. It trains the kept elements alone to w_i, and s_i becomes m_i. Then in each tensor the share

        alpha_t = alpha / 2 (1 + cos(pi t / T))

    of the kept elements, those of the least |w|, leaves m_i, and as many enter: those with the largest gradient of the
    loss at w_i. They begin as the mean of neighbours that have them, or at 0. At first all have the same initial
    weights, and in the tensor l a share of elements in proportion to the sum of its dimensions over their product
    (ERK). Small tensors, such as biases, are then dense.

    With ``topology=random`` client i gets the models of ``neighbours`` clients that it draws in each round, which do
    not get its model for that. Buffers (running statistics) are dense, and averaged with the neighbours'.

    Server: nothing. Client: w_i, s_i, m_i. Down: w_j and s_j of its neighbours: kept elements, and one bit for each
    element of a tensor that is not dense. Up: w_i and s_i, once for each client that gets them. Evaluated: w_i as
    trained last (``personalized``). There is no global model.

    References:
        Dai, Shen, He, Tian, Tao: DisPFL: Towards Communication-Efficient Personalized Federated Learning via
        Decentralized Sparse Training, ICML 2022.
    """

    name: Literal["dispfl"] = "dispfl"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Dai et al., ICML 2022"
    client_keeps: ClassVar[str] = "w_k, s_k, m_k"
    newcomer: ClassVar[str] = "a sparse model that it trains alone"

    neighbours: int = setting(
        10,
        "d",
        "links of every client (regular), or clients whose models each draws (random), all where fewer take part",
        only={"topology": ("random", "regular")},
        ge=1,
    )
    density: float = setting(0.5, "", "share of the elements that a client keeps", gt=0, le=1, kept=True)
    layers: Literal["erk", "uniform"] = setting(
        "erk", "", "how that is spread over tensors: small ones keep more (ERK), or all alike", kept=True
    )
    first_masks: Literal["own", "shared"] = setting(
        "own", "m_0", "masks in the beginning: drawn for each client, or one for all", kept=True
    )
    prune_share: float = setting(
        0.5, "alpha", "share of the kept elements that is exchanged after the first round; 0: masks stay", ge=0, le=1
    )
    growth: Literal["gradient", "random"] = setting(
        "gradient",
        "",
        "which elements enter a mask: those with the largest gradients, or random ones",
        unless={"prune_share": (0,)},
    )
    growth_samples: Literal["batch", "all"] = setting(
        "batch",
        "",
        "samples of that gradient: one mini-batch (authors' code), or all training samples",
        only={"growth": ("gradient",)},
        unless={"prune_share": (0,)},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        weights = part(task.network.initialize(0), task.network.parameter_names)
        shares = self.shares(weights)
        if empty := [name for name, leaf in weights.items() if not kept_count(shares[name], leaf.numel())]:
            raise ConfigError(
                f"algorithm.density is {self.density}, which leaves {empty[0]!r} none of its "
                f"{weights[empty[0]].numel()} elements: raise it"
            )

    def shares(self, weights: Tree) -> dict[str, float]:
        """Returns the share of its elements that each tensor keeps."""
        shapes = {name: tuple(leaf.shape) for name, leaf in weights.items()}
        return kept_shares(shapes, self.density, self.layers == "erk")

    def pruned_in(self, round: int, rounds: int) -> float:
        """Returns alpha_t, the share of the kept elements that leave the masks after a round (0-indexed)."""
        return self.prune_share / 2 * (1 + math.cos(math.pi * round / rounds))

    def course(self, round: int, rounds: int) -> Any:
        return self.pruned_in(round, rounds)

    def init(self, task: Task, context: RoundContext) -> Tree:
        return {}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        links = self.graph.of_round(clients.context, cohort)
        receivers = {i: {"receivers": int(count)} for i, count in zip(cohort, links.sum(0), strict=True)}
        sent = clients.map(self.share, cohort, {}, receivers, counted=False)
        senders = {i: [cohort[j] for j in np.flatnonzero(row).tolist()] for i, row in zip(cohort, links, strict=True)}
        given = {i: {"neighbours": {str(j): sent[j] for j in found}} for i, found in senders.items()}
        clients.mean(self.local_update, cohort, {}, given)
        return {}

    async def share(self, client: Client, receivers: int) -> Tree:
        """Returns w_i and s_i for its neighbours, which are counted when these get them."""
        own = self._own(client)
        private = private_names(client.task.network, client.context.train.private_norm)
        message = encoded(part(own["model"], [name for name in own["model"] if name not in private]), own["trained"])
        client.state.update(own, sent=receivers * num_bytes(message))  # until it trains
        return message

    async def local_update(self, client: Client, neighbours: Tree) -> Weighted:
        """Averages, trains and moves the mask; returns nothing but the size of what the client has sent."""
        sent = client.state.pop("sent")
        await self._update(client, neighbours)
        return Weighted({}, size=sent)

    async def _update(self, client: Client, neighbours: Tree) -> None:
        own = self._own(client)
        start = self.mixed(own, list(neighbours.values()))
        trained = await client.train(start, self.objective, frozen={"mask": own["mask"]})
        trained = masked(trained, own["mask"])  # what an optimizer that goes on still moves
        client.publish(personalized=Predictor.of(trained))
        client.state["model"], client.state["trained"] = trained, own["mask"]
        client.state["mask"] = await self.moved_mask(client, trained, own["mask"])

    def mixed(self, own: Tree, messages: Sequence[Tree]) -> Tree:
        """Returns the mean over those that have an element, where the client's mask has it.

        Args:
            own: the client's ``model``, and the masks ``trained`` (s_i) and ``mask`` (m_i).
            messages: of its neighbours.
        """
        model: Tree = own["model"]
        found = [decoded(message, model) for message in messages]
        sums: Tree = {}
        for name, leaf in model.items():
            total = leaf.double()
            count = own["trained"][name].double() if name in own["trained"] else torch.ones_like(total)
            for other, masks in found:
                if name in other:  # private tensors are in no message
                    total, count = total + other[name], count + masks[name]
            sums[name] = (total / count.clamp_min(1)).to(leaf.dtype)
        return masked(sums, own["mask"])

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The loss of the model whose elements outside of the mask are 0, and so are their gradients."""
        kept = {name: model[name] * mask for name, mask in frozen["mask"].items()}
        found: Tensor = task.loss({**buffers(model, task), **kept}, batch)
        return found

    async def moved_mask(self, client: Client, model: Tree, masks: Tree) -> Tree:
        """Returns the mask of the next round: without its least elements, and with as many new ones.

        Args:
            client: i.
            model: w_i as trained.
            masks: m_i.
        """
        share = self.pruned_in(client.round, client.context.rounds)
        if not share or not client.num_samples:
            return masks
        generator = client.context.streams.generator("mask", client.round, client.id)
        merits = await self._merits(client, model, generator)
        found = {}
        for name, mask in masks.items():
            count = math.ceil(share * int(mask.sum()))
            found[name] = with_largest(without_smallest(mask, model[name], count), merits[name], count)
        return found

    async def _merits(self, client: Client, model: Tree, generator: np.random.Generator) -> Tree:
        """Returns how much each element deserves to enter a mask, of the tensors' shapes."""
        if self.growth == "random":
            return {
                name: torch.from_numpy(generator.random(leaf.shape)).to(leaf.device) for name, leaf in model.items()
            }
        examples, size = client.examples(), client.context.train.batch_size
        if self.growth_samples == "batch" and size:
            rows = torch.from_numpy(generator.permutation(len(examples))[:size].copy()).to(examples.x.device)
            examples = Examples(examples.x[rows], examples.y[rows])
        gradient = await client.gradient(model, loss(), examples=examples)
        return {name: leaf.abs() for name, leaf in gradient.items()}

    def _own(self, client: Client) -> Tree:
        """The client's model and masks; before it has taken part the initial model under its first mask."""
        if "model" in client.state:
            return {key: client.state[key] for key in ("model", "trained", "mask")}
        initial = client.initial_model()
        weights = part(initial, client.task.network.parameter_names)
        whose = {"client": client.id} if self.first_masks == "own" else {}
        masks = drawn_masks(weights, self.shares(weights), client.context.streams.generator("mask", **whose))
        return {"model": masked(initial, masks), "trained": masks, "mask": masks}

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains alone, as a client without neighbours does."""
        await self._update(client, {})
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"personalized": Predictor.of(self._own(client)["model"])}
