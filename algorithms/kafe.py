"""KAFE: a last layer drawn from the density of the clients' last layers, over a mean of all else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Clients, check_head, setting
from algorithms.parts.finetuning import FineTuning
from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.robust import combined
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task


class Kafe(FineTuning):
    """KAFE (kernel aggregation for federated learning): the last layer is the mean of draws from a density estimate.

    The server takes the mean of the clients' models, of weights q_k, for all but the last layer. Of each of that
    layer's tensors P (its weight, its bias) it estimates the density over clients by kernels of bandwidth h around the
    P_k of the cohort S, and puts in its place the mean of m draws,

        P = 1/m sum_{j=1..m} ( P_{k_j} + h eps_j ),    k_j ~ q,    eps_j ~ N(0, I)

    or, with ``kernel=tophat``, eps_j uniform in the ball of radius 1. m is |S| unless ``draws`` says how many. Clients
    do not do more than in federated averaging. With ``finetune_epochs`` each client fine-tunes the final model.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. Evaluated: w (``global``).

    References:
        Qi, Chiaro, Giampaolo, Piccialli: KAFE: Kernel Aggregation for FEderated, ECML PKDD 2024.
    """

    name: Literal["kafe"] = "kafe"
    citation: ClassVar[str] = "Qi et al., ECML PKDD 2024"
    no_privacy: ClassVar[str] = "its server draws from the last layers of single clients"
    own_rule: ClassVar[str] = "it draws a last layer from the density of the clients'"

    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_k", "weights of the mean, and of the kernels: samples n_k / sum over the cohort, or uniform 1/|S|"
    )
    bandwidth: float = setting(1.0, "h", "bandwidth of the kernels (authors' code: 1, for CIFAR-10 0.1)", ge=0)
    kernel: Literal["gaussian", "tophat"] = setting("gaussian", "", "the kernels' form", unless={"bandwidth": (0.0,)})
    draws: int | None = setting(None, "m", "draws whose mean is the last layer; null: one for each client", ge=1)

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("KAFE", task.network)
        super().check(task, context)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, network, context = server["model"], clients.task.network, clients.context
        messages = clients.each(self.local_update, cohort, {"model": model})
        models = [message.tree for message in messages.values()]
        sizes = np.array([float(message.weight) for message in messages.values()])
        shares = sizes / sizes.sum()
        mean = combined(models, {name: model[name] for name in models[0]}, torch.from_numpy(shares))
        generator = context.streams.generator("density", context.round)
        drawn = {
            name: self.drawn(torch.stack([one[name] for one in models]), shares, generator)
            for name in network.head_names
            if name in mean
        }
        return {"model": {**model, **mean, **drawn}}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received model."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return Weighted(trained, 1 if self.aggregation == "uniform" else client.num_samples)

    def drawn(self, tensors: Tensor, shares: np.ndarray, generator: np.random.Generator) -> Tensor:
        """The mean of draws from the density of a tensor.

        Args:
            tensors: P_k, shape (|S|, *).
            shares: q_k, shape (|S|,).
            generator: draws.
        """
        number = self.draws or len(tensors)
        counts = np.bincount(generator.choice(len(tensors), number, p=shares), minlength=len(tensors))
        found = torch.tensordot(torch.from_numpy(counts / number).to(tensors.device), tensors.double(), dims=1)
        noise = self.noise(number, tensors[0].numel(), generator).mean(0).reshape(tensors[0].shape)
        moved: Tensor = found + self.bandwidth * torch.from_numpy(noise).to(found)
        return moved.to(tensors)

    def noise(self, number: int, size: int, generator: np.random.Generator) -> np.ndarray:
        """eps_j, shape (number, size)."""
        normal = generator.standard_normal((number, size))
        if self.kernel == "gaussian":
            return normal
        radii = generator.random((number, 1)) ** (1 / size)
        found: np.ndarray = radii * normal / np.linalg.norm(normal, axis=1, keepdims=True)
        return found
