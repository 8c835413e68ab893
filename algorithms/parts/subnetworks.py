"""Clients that prune a subnetwork of their own out of the shared model, and a server that averages what they keep."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.masks import encoded, inverted, kept_count, masked, without_smallest
from algorithms.parts.partial import joined
from algorithms.parts.shared_elements import mean_of_sharing, message
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.models.private_norm import private_names
from rayfl.params import Tree, num_bytes
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class Subnetworks(Averaging):
    """What Sub-FedAvg and LotteryFL have in common: masks of the clients' own, in training, messages and evaluation.

    A client's state has its ``mask`` from when it has first taken part: bool, of all weights that the server averages;
    biases and buffers have none.
    """

    personalized: ClassVar[str] = "personalized"
    no_privacy: ClassVar[str] = (
        "its clients send parts of the model, and each number is the mean over those who keep it"
    )
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "clients prune by the accuracy of their models"}
    client_keeps: ClassVar[str] = "m_k"

    aggregation: Literal["samples", "uniform", "population"] = setting(
        "uniform",
        "q_k",
        "weights of the mean of an element, relative to their sum over the clients that keep it: uniform 1 (authors' "
        "code); samples n_k; population n_k, with the old server model for all clients not sampled",
    )
    prune_share: float
    target: float
    accuracy_threshold: float
    select_on: Literal["validation", "train"] = setting(
        "validation",
        "",
        "samples of the accuracy (training samples where a client has none for validation)",
        unless={"prune_share": (0,), "target": (0,)},
    )

    @property
    def prunes(self) -> bool:
        """Whether clients ever prune."""
        return self.prune_share > 0 and self.target > 0

    def check_data(self, task: Task, sizes: np.ndarray, public: int) -> None:
        super().check_data(task, sizes, public)
        if self.prunes and self.select_on == "validation" and not sizes[:, 1].any():
            raise ConfigError(
                f"holdout.validation leaves no client validation samples, on which {self.name} measures accuracies: "
                "raise it, or set algorithm.select_on=train"
            )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, network = server["model"], clients.task.network
        whole = whole_masks(model, network, clients.context.train.private_norm)
        rest = self.remainder(message(model, inverted(whole), network), cohort, clients)
        found = clients.mean(self.local_update, cohort, {"model": model}, also=rest)
        parameters = mean_of_sharing(found["parameters"], found.get("sharing", {}), model)
        return {"model": joined({**found, "parameters": parameters}, model)}

    def masks_of(self, client: Client, model: Model) -> Tree:
        """Returns m_k, which keeps everything before the client has taken part."""
        found: Tree | None = client.state.get("mask")
        if found is not None:
            return found
        return whole_masks(model, client.task.network, client.context.train.private_norm)

    def pruned(self, masks: Tree, model: Model) -> Tree:
        """Returns the masks without the elements of the least magnitude, tensor by tensor.

        Args:
            masks: m_k.
            model: whose magnitudes count.
        """
        return {name: _pruned(mask, model[name], self.prune_share, self.target) for name, mask in masks.items()}

    async def accuracy(self, client: Client, model: Tree) -> float:
        """Returns the accuracy of a model on the client's samples, between 0 and 1."""
        split = "validation" if self.select_on == "validation" and len(client.examples("validation")) else "train"
        return (await client.score(Predictor.of(model), split)).top1

    async def trained(
        self, client: Client, model: Tree, masks: Tree, each_epoch: Callable[[Tree], Awaitable[None]] | None = None
    ) -> Tree:
        """Returns the model after a local update of the kept elements.

        Args:
            client: k.
            model: with zeros outside of the masks.
            masks: m_k.
            each_epoch: see :meth:`Client.train`.
        """
        if all(bool(mask.all()) for mask in masks.values()):
            return await client.train(model, self.objective, each_epoch=each_epoch)
        found = await client.train(model, masked_loss, frozen={"masks": masks}, each_epoch=each_epoch)
        return masked(found, masks)  # what an optimizer that goes on still moves

    def reply(self, client: Client, model: Tree, masks: Tree) -> Weighted:
        """Returns what the client sends, and keeps its masks.

        Args:
            client: k.
            model: w_k, with zeros outside of the masks.
            masks: m_k.
        """
        network = client.task.network
        client.state["mask"] = masks
        client.publish(local=Predictor.of(model))
        private = private_names(network, client.context.train.private_norm)
        sent = encoded({name: leaf for name, leaf in model.items() if name not in private}, masks)
        return replace(self.weighted(client, message(model, inverted(masks), network)), size=num_bytes(sent))

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = server["model"]
        own = masked(model, self.masks_of(client, model))
        return {"global": Predictor.of(model), "personalized": Predictor.of(own)}


def whole_masks(model: Model, network: Network, private_norm: Any) -> Tree:
    """Masks that keep every element of the weights that the server averages.

    Args:
        model: the tensors.
        network: names the parameters.
        private_norm: ``train.private_norm``: what it keeps with the clients has no mask.
    """
    private = private_names(network, private_norm)
    names = [name for name in network.parameter_names if name not in private]
    kept = [name for name in names if "bias" not in name.rpartition(".")[2]]
    return {name: torch.ones_like(model[name], dtype=torch.bool) for name in kept}


def differ(one: Tree, other: Tree) -> bool:
    """Whether two sets of masks differ."""
    return any(not torch.equal(mask, other[name]) for name, mask in one.items())


def masked_loss(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    """The loss of the model whose elements outside of the masks are 0, and so are their gradients."""
    kept = {name: model[name] * mask for name, mask in frozen["masks"].items()}
    found: Tensor = task.loss({**model, **kept}, batch)
    return found


def _pruned(mask: Tensor, leaf: Tensor, share: float, target: float) -> Tensor:
    """A mask without a share of its elements, rounded down, until the share ``target`` of the tensor is gone."""
    kept = int(mask.sum())
    count = min(kept_count(share, kept), kept_count(target, mask.numel()) - (mask.numel() - kept))
    return without_smallest(mask, leaf, count) if count > 0 else mask
