"""FedKSeed: steps along directions of a fixed set of seeds, of which clients send numbers and slopes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.shared_directions import SharedDirections
from algorithms.parts.zeroth_order import Difference, walked
from rayfl.engine.client import Client
from rayfl.engine.gradients.counted_normals import drawn_keys
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.params import Tree, num_bytes
from rayfl.tasks.base import Task

_OF_AMPLITUDES = {"sampling": ("amplitude",)}


def chances(amplitudes: np.ndarray) -> np.ndarray:
    """The probabilities of seeds: softmax of their mean amplitudes, which are scaled to 0 to 1; both of shape (K,)."""
    low, high = amplitudes.min(), amplitudes.max()
    raised = np.exp((amplitudes - low) / (high - low)) if high > low else np.ones_like(amplitudes)
    found: np.ndarray = raised / raised.sum()
    return found


class FedKSeed(SharedDirections):
    """FedKSeed: the model is the sum of steps along the directions of K seeds, and K scalars are all that it needs.

    Seed j stands for the direction z_j, of standard normal entries. There are K seeds, the same in all rounds. Client k
    makes the model from the first one, w_0, and the accumulator A, takes local steps along directions of drawn seeds,
    and sends the numbers of the seeds and the slopes:

        w = w_0 - sum_j A_j z_j
        g = ( f(w + eps z_j) - f(w - eps z_j) ) / (2 eps),    w <- w - eta g z_j
        A_j <- A_j + eta sum_{k in S} q_k sum_{steps of k with seed j} g

    where f is the mean loss over a mini-batch. With ``sampling=amplitude`` (FedKSeed-Pro) seeds are drawn with

        p = softmax( (phi - min phi) / (max phi - min phi) )

    where phi_j is the mean of |g| over all steps that any client has taken with seed j, and one more of 0. Losses are
    those of models in evaluation mode: dropout is off, and running statistics stay as the model began.

    Server: A, with ``sampling=amplitude`` phi. Client: nothing. Down: A, with ``sampling=amplitude`` p. Up: j and g of
    each step.

    References:
        Qin, Chen, Qian, Ding, Li, Deng: Federated Full-Parameter Tuning of Billion-Sized Language Models with
        Communication Cost under 18 Kilobytes, ICML 2024 (arXiv:2312.06353).
    """

    name: Literal["fedkseed"] = "fedkseed"
    citation: ClassVar[str] = "Qin et al., ICML 2024"
    server_keeps: ClassVar[str] = "w, A; with sampling=amplitude phi"

    perturbation: float = setting(5e-4, "eps", "how far from the model the losses are taken", gt=0)
    difference: Difference = setting(
        "central", "", "slopes from w - eps z and w + eps z (central, paper), or from w and w + eps z (forward)"
    )
    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_k", "weights of clients' slopes: samples n_k / sum over the cohort (paper); uniform 1/|S|"
    )
    candidates: int = setting(4096, "K", "number of seeds", ge=1, le=1 << 16, kept=True)
    sampling: Literal["uniform", "amplitude"] = setting(
        "uniform", "p", "seeds are drawn alike, or by the mean size of their slopes (FedKSeed-Pro)", kept=True
    )
    amplitude_clip: float = setting(
        1000.0, "", "largest size that a slope counts with in phi", gt=0, only=_OF_AMPLITUDES
    )

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        dtype = torch.promote_types(next(iter(server["model"].values())).dtype, torch.float32)
        server["accumulator"] = torch.zeros(self.candidates, dtype=dtype)
        if self.sampling == "amplitude":
            server["sizes"] = torch.zeros(self.candidates, dtype=dtype)
            server["draws"] = torch.ones(self.candidates, dtype=dtype)
        return server

    def sent(self, server: Tree) -> Tree:
        told = {"accumulator": server["accumulator"]}
        return told if self.sampling == "uniform" else {**told, "chances": self.chances_of(server)}

    def chances_of(self, server: Tree) -> Tensor:
        """Returns p, of the accumulator's type."""
        found = chances((server["sizes"] / server["draws"]).numpy())
        return torch.from_numpy(found).to(server["accumulator"].dtype)

    def keys(self, context: RoundContext) -> np.ndarray:
        """Returns the keys of the seeds' directions, shape (K, 7)."""
        return drawn_keys(context.streams.generator("directions"), self.candidates)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        # Clients of a deployment make the model from A by themselves; here it is made once for all of them.
        sent = self.sent(server)
        given = {"model": server["model"], **{name: sent[name] for name in sent if name != "accumulator"}}
        found = clients.map(self.walk, cohort, given, down=dict.fromkeys(cohort, num_bytes(sent)))
        mass = {client: int(self.aggregation == "uniform" or clients.num_samples([client])[0]) for client in found}
        total, eta = server["accumulator"].double(), clients.context.train.lr_in(clients.context.round)
        after: Tree = {name: server[name].clone() for name in ("sizes", "draws") if name in server}
        for client, pairs in found.items():
            seeds, slopes = pairs["seeds"].long(), pairs["slopes"].to(server["accumulator"].dtype)
            total = total.index_add(0, seeds, slopes.double(), alpha=eta * mass[client] / sum(mass.values()))
            if after:
                after["sizes"].index_add_(0, seeds, slopes.abs().clamp(max=self.amplitude_clip))
                after["draws"].index_add_(0, seeds, torch.ones_like(slopes))
        accumulator = total.to(server["accumulator"].dtype)
        made = clients.on_server(self.made, {"accumulator": accumulator})
        return {**after, "accumulator": accumulator, "model": made["model"]}

    async def made(self, server: Server, accumulator: Tensor) -> Tree:
        """w_0 - sum_j A_j z_j: what every client can make, too."""
        keys = torch.from_numpy(self.keys(server.context))
        return {"model": walked(server.initial_model(), keys, accumulator, server.task)}

    async def walk(self, client: Client, model: Tree, chances: Tensor | None = None) -> Tree:
        """Takes local steps along the directions of drawn seeds; sends these and the slopes, each of shape (steps,)."""
        context = client.context
        generator = context.streams.generator("directions", client.round, client.id)
        p = None if chances is None else chances.cpu().double().numpy()
        p = None if p is None else p / p.sum()
        seeds = generator.choice(self.candidates, size=client.batches().steps, p=p)
        slopes = await self.descended(client, model, self.keys(context)[seeds][:, None])
        return {"seeds": torch.from_numpy(seeds).to(torch.int32), "slopes": slopes[:, 0]}
