"""Elastic aggregation: the server moves a parameter the less, the more the network's outputs depend on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.accumulators import ACCUMULATOR, averaging
from algorithms.parts.mixture import parameters
from algorithms.parts.slopes import constant_slope
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.examples import Examples
from rayfl.objectives import Sum, function
from rayfl.params import Tree, map_leaves, zeros_like
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait

MEASURING = ".sensitivity"
"""Suffix of the random streams of the pass that measures sensitivities."""


class Elastic(FineTuned):
    """Elastic aggregation: parameters to which the outputs are sensitive take short steps, the others long ones.

    With F(x; w) the network's outputs, client k goes through mini-batches b = 1..B of a share of its samples, once,
    at the received w, in evaluation mode and without labels, and measures the sensitivity of every parameter i,

        Omega_k,i <- mu Omega_k,i + (1 - mu) |d/dw_i mean_b ||F(x; w)||^2|

    from 0 on. What it sends is divided by 1 - mu^B, so that it is a weighted mean over the batches, however many there
    are. Then it trains the model on all its samples. With the mean x of the clients' models and Omega of their
    sensitivities, of the same weights q_k, the server takes

        w_i <- w_i + zeta_i (x_i - w_i),    zeta_i = 1 + tau - Omega_i / max_j Omega_j

    with the maximum over the tensor of which i is an element. So zeta is between tau and 1 + tau, and tau in a tensor
    of one element. A tensor on which no output depends has zeta = 1 + tau. Buffers (running statistics) are averaged.
    Without samples to measure with (``sample_share=0``) it is federated averaging. With ``finetune_epochs`` each
    client fine-tunes the final model.

    Server: model w. Client: nothing. Down: w. Up: x_k, Omega_k and n_k.

    References:
        Chen, Hu, Tan, Wei, Wu: Elastic Aggregation for Federated Optimization, CVPR 2023.
    """

    name: Literal["elastic"] = "elastic"
    citation: ClassVar[str] = "Chen et al., CVPR 2023"
    no_privacy: ClassVar[str] = "its clients send sensitivities of parameters, too"
    needs: ClassVar[Mapping[Trait, str]] = {
        "features": "a sensitivity is the slope of the length of one vector of outputs a sample"
    }
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "sensitivities are of all parameters, at the clients as at the server; statistics is possible"
    }

    tau: float = setting(
        0.5, "tau", "least step of a parameter; the longest is 1 + tau", ge=0, unless={"sample_share": (0,)}
    )
    mu: float = setting(
        0.95,
        "mu",
        "how much of earlier mini-batches a sensitivity keeps",
        ge=0,
        lt=1,
        unless={"sample_share": (0,)},
    )
    sample_share: float = setting(
        0.3, "", "share of a client's samples that measure sensitivities; 0: federated averaging", ge=0, le=1
    )
    most_of: Literal["tensor", "model"] = setting(
        "tensor",
        "",
        "where the largest sensitivity is looked for: the parameter's own tensor, or the whole model",
        unless={"sample_share": (0,)},
    )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        if not self.sample_share:
            return super().round(server, cohort, clients)
        model = server["model"]
        here = parameters(model, clients.task)
        rest = self.remainder({"model": model, "sensitivity": zeros_like(here)}, cohort, clients)
        mean = clients.mean(self.measured_update, cohort, broadcast={"model": model}, also=rest)
        there = parameters(mean["model"], clients.task)
        moved = map_leaves(torch.lerp, here, there, self.steps(mean["sensitivity"]))
        return {"model": {**mean["model"], **moved}}

    async def measured_update(self, client: Client, model: Tree) -> Weighted:
        """Measures the received model's sensitivities, then trains it."""
        measured = await self.sensitivity(client, model)
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, {"model": trained, "sensitivity": measured})

    async def sensitivity(self, client: Client, model: Tree) -> Tree:
        """Returns Omega_k by parameter, of the shapes of the parameters and not negative."""
        samples, count = client.examples(), math.ceil(self.sample_share * client.num_samples)
        order = client.context.streams.generator(MEASURING[1:], client.round, client.id).permutation(client.num_samples)
        chosen = torch.from_numpy(order[:count]).to(samples.y.device)
        found = await client.train(
            {"sensitivity": zeros_like(parameters(model, client.task))},
            self.measuring,
            frozen={"model": model},
            examples=Examples(samples.x[chosen], samples.y[chosen]),
            epochs=1,
            # a clipped gradient would shorten what is collected
            settings=client.context.train.model_copy(update={"max_grad_norm": None}),
            groups={"sensitivity": ACCUMULATOR},
            keep_optimizer=False,
            stream=MEASURING,
        )
        total = 1 - self.mu ** client.num_steps(epochs=1, samples=count)
        return map_leaves(lambda leaf: leaf / total, found["sensitivity"])

    @property
    def measuring(self) -> Sum:
        """A function whose steps average the sizes of the slopes of ||F(x; w)||^2."""
        return function(self._measured)

    def _measured(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        def length(model: Model, batch: Batch) -> Tensor:
            return batch.mean(task.logits(model, batch, training=False).square().sum(-1))

        slopes, _ = constant_slope(frozen["model"], batch, task, length)
        parts = [averaging(trained["sensitivity"][name], slope.abs(), 1 - self.mu) for name, slope in slopes.items()]
        return torch.stack(parts).sum()

    def steps(self, sensitivity: Tree) -> Tree:
        """Returns zeta by parameter.

        Args:
            sensitivity: Omega.
        """
        most = {name: leaf.max() for name, leaf in sensitivity.items()}
        if self.most_of == "model":
            most = dict.fromkeys(most, torch.stack(list(most.values())).max())
        # where nothing is sensitive, no parameter is
        return {
            name: 1 + self.tau - leaf / torch.where(most[name] > 0, most[name], 1) for name, leaf in sensitivity.items()
        }
