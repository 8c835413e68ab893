"""FedSelect: every client makes those elements its own that its training moves most; the others are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.masks import encoded, inverted, kept_count, with_largest
from algorithms.parts.partial import joined, part
from algorithms.parts.shared_elements import mean_of_sharing, message
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.batches import num_steps
from rayfl.models.base import Network
from rayfl.models.private_norm import private_names
from rayfl.params import Tree, num_bytes
from rayfl.tasks.base import Batch, Model, Predictor, Task


def grown(mask: Tensor, change: Tensor, rate: float, limit: float) -> Tensor:
    """Returns the mask with those of the other elements that changed most (GradSelect).

    Args:
        mask: bool.
        change: how much each element changed, not negative, of the same shape. Of equal ones the first count.
        rate: p, the share of the other elements that enter, rounded.
        limit: alpha, the share of all elements that the mask has at most, rounded down.
    """
    had = int(mask.sum())
    count = min(round(rate * (mask.numel() - had)), kept_count(limit, mask.numel()) - had)
    return with_largest(mask, change, count) if count > 0 else mask


class FedSelect(Averaging):
    """FedSelect: a client's own subnetwork grows by what its training moves most, and the rest is averaged.

    Client k has a mask m_k, at first empty, of the elements of weights that are its own. It begins with its own
    values v_k of these and with the received ones of the others. In turns of an epoch it trains the former while the
    latter stand still, and the latter while the former stand still (LocalAlt), from w_k^0 to w_k. Then its mask grows
    in each tensor (GradSelect): of the elements that it lacks, those enter that changed most,

        m_k <- m_k + top_p |w_k - w_k^0|    until |m_k| = alpha

    a share p of those that it lacked, until it has the share alpha of all. The server takes the mean of each element
    over those that share it,

        w <- sum_k n_k (1 - m_k) w_k / sum_k n_k (1 - m_k)

    where m_k is the mask with which the client has trained (``first_value=mean``: an element that was chosen begins as
    that mean), or the one that has grown (``own``: it begins as the client has trained it). What nobody shares stays at
    the server as it was. Biases and buffers (running statistics) are everybody's.

    Server: w. Client: m_k, and v_k, its values of w_k. Down: w. Up: the elements of w_k that it shares, one bit for
    each element of a tensor of which it does not share all, and n_k. Evaluated: w (``global``), and w with the
    client's own elements (``personalized``), which a client never sampled has not.

    References:
        Tamirisa, Xie, Bao, Zhou, Arel, Shamsian: FedSelect: Personalized Federated Learning with Customized Selection
        of Parameters for Fine-Tuning, CVPR 2024 (arXiv 2404.02478).
    """

    name: Literal["fedselect"] = "fedselect"
    personalized: ClassVar[str] = "personalized"
    no_privacy: ClassVar[str] = (
        "its clients send parts of the model, and each number is the mean over those who share it"
    )
    citation: ClassVar[str] = "Tamirisa et al., CVPR 2024"
    client_keeps: ClassVar[str] = "m_k, v_k"

    aggregation: Literal["samples", "uniform", "population"] = setting(
        "samples",
        "q_k",
        "weights of the mean of an element, relative to their sum over the clients that share it: samples n_k; uniform "
        "1; population n_k, with the old server model for all clients not sampled",
    )
    rate: float = setting(
        0.25, "p", "share of the elements not yet its own that a client chooses", ge=0, le=1, unless={"limit": (0,)}
    )
    limit: float = setting(
        0.8,
        "alpha",
        "share of a tensor's elements that a client has as its own at most",
        ge=0,
        le=1,
        unless={"rate": (0,)},
    )
    choose_every: int = setting(1, "", "rounds from one choice to the next", ge=1, unless={"rate": (0,), "limit": (0,)})
    biases: bool = setting(False, "", "whether biases can be a client's own", kept=True)
    first_value: Literal["mean", "own"] = setting(
        "mean",
        "",
        "what an element begins as when it was chosen: the mean over those who share it, once more (authors' code), or "
        "what the client has trained",
        unless={"rate": (0,), "limit": (0,)},
    )
    turns: Literal["epochs", "once"] = setting(
        "epochs",
        "",
        "when a client's own elements and the others take turns: after every epoch (authors' code), or once, after all",
        unless={"rate": (0,), "limit": (0,)},
    )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, network = server["model"], clients.task.network
        everything = message(model, self.first_masks(model, network, clients.context), network)
        rest = self.remainder(everything, cohort, clients)
        found = clients.mean(self.local_update, cohort, {"model": model}, also=rest)
        parameters = mean_of_sharing(found["parameters"], found.get("sharing", {}), model)
        return {"model": joined({**found, "parameters": parameters}, model)}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains both parts in turn, chooses further elements, and returns what it shares."""
        network = client.task.network
        masks: Tree = client.state.get("mask", self.first_masks(model, network, client.context))
        start = self.assembled(client, model)
        trained = await self.trained_in_turns(client, start, masks)
        chosen = masks
        if (client.round + 1) % self.choose_every == 0:
            change = {name: (trained[name] - start[name]).abs() for name in masks}
            chosen = {name: grown(mask, change[name], self.rate, self.limit) for name, mask in masks.items()}
        if masks:
            client.state.update(model=part(trained, masks), trained=masks, mask=chosen)
        client.publish(local=Predictor.of(trained))
        kept = masks if self.first_value == "mean" else chosen
        private = private_names(network, client.context.train.private_norm)
        sent = encoded({name: leaf for name, leaf in trained.items() if name not in private}, inverted(kept))
        return replace(self.weighted(client, message(trained, kept, network)), size=num_bytes(sent))

    async def trained_in_turns(self, client: Client, model: Tree, masks: Tree) -> Tree:
        """Returns the model after as many steps on the client's own elements as on the others (LocalAlt).

        Args:
            client: k.
            model: the model before; it stays as it is.
            masks: which elements are the client's own.
        """
        network, train = client.task.network, client.context.train
        own = {name: mask for name, mask in masks.items() if mask.any()}
        if not own or all(name in own and bool(own[name].all()) for name in network.parameter_names):
            return await client.train(model, self.objective)  # one of both parts is everything
        others, turn, left = inverted(own), 0, client.num_steps()
        epoch = num_steps(client.num_samples, train.batch_size, 1, train.drop_last)
        while left:
            steps = left if self.turns == "once" else min(epoch, left)
            stream = f".{turn}" if turn else ""
            for masks, names, suffix in ((own, (*own, *network.buffer_names), ".own"), (others, tuple(model), "")):
                moved = await client.train(
                    part(model, names),
                    self.part_loss,
                    frozen={"masks": masks, "model": model},
                    steps=steps,
                    stream=f"{suffix}{stream}",
                )
                # weight decay moves what stands still, too
                model = {**model, **moved, **taken(masks, moved, model)}
            turn, left = turn + 1, left - steps
        return model

    def part_loss(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The loss of the model whose elements outside of the masks stand still, in tensors that have a mask."""
        rest = frozen["model"]
        found: Tensor = task.loss({**rest, **trained, **taken(frozen["masks"], trained, rest)}, batch)
        return found

    def first_masks(self, model: Model, network: Network, context: RoundContext) -> Tree:
        """Masks without any element, of the tensors of which elements may be chosen."""
        private = private_names(network, context.train.private_norm)
        names = [name for name in network.parameter_names if name not in private]
        if not self.biases:
            names = [name for name in names if "bias" not in name.rpartition(".")[2]]
        return {name: torch.zeros_like(model[name], dtype=torch.bool) for name in names}

    def assembled(self, client: Client, model: Tree) -> Tree:
        """The model of the client's own elements and the server's others."""
        if "mask" not in client.state:
            return dict(model)
        own = client.state["trained" if self.first_value == "mean" else "mask"]
        return {**model, **taken(own, client.state["model"], model)}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = server["model"]
        return {"global": Predictor.of(model), "personalized": Predictor.of(self.assembled(client, model))}


def taken(masks: Tree, inside: Model, outside: Model) -> Tree:
    """The tensors that have masks: elements of one model within these, of the other elsewhere."""
    return {name: torch.where(mask, inside[name], outside[name]) for name, mask in masks.items()}
