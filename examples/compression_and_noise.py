"""What travels, changed by a method of one's own: sparse updates, and updates that are clipped and noisy. Seconds.

*Noisy* has the mechanism of differential privacy without its guarantee: nothing counts what is spent.

    python examples/compression_and_noise.py [FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path

import torch

import rayfl
from algorithms.base import Averaging, Clients, setting
from rayfl.params import Tree, map_leaves, subtract


class Sparse(Averaging):
    """Federated averaging of the largest entries of each change; a client keeps the rest for the next time."""

    name: str = "sparse"
    share: float = setting(0.1, "k", "share of a tensor's entries that is sent", gt=0, le=1)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        replies = clients.map(self.compressed, cohort, {"model": server["model"]})
        shares = clients.num_samples(cohort) / clients.num_samples(cohort).sum()
        model = map_leaves(torch.clone, server["model"])
        for client, weight in zip(cohort, shares.tolist(), strict=True):
            for name, sent in replies[client].items():
                model[name].view(-1).index_add_(0, sent["places"].long(), weight * sent["values"])
        return {"model": model}

    async def compressed(self, client: rayfl.Client, model: Tree) -> Tree:
        change = subtract(await client.train(model, self.objective), model)
        rest, sent = client.state.get("rest", map_leaves(torch.zeros_like, change)), {}
        change = map_leaves(lambda new, old: (new + old).flatten(), change, rest)
        for name, flat in change.items():
            places = flat.abs().topk(ceil(self.share * flat.numel())).indices.sort().values
            sent[name] = {"places": places.int(), "values": flat[places]}
            change[name] = flat.index_fill(0, places, 0.0).view_as(model[name])
        client.state["rest"] = change
        return sent


class Noisy(Averaging):
    """Federated averaging of changes of a limited length, each with noise of its own."""

    name: str = "noisy"
    clip: float = setting(1.0, "C", "largest norm of a client's change", gt=0)
    noise: float = setting(0.01, "sigma", "standard deviation of the noise, in units of C", ge=0)

    async def local_update(self, client: rayfl.Client, model: Tree) -> rayfl.Weighted:
        change = subtract(await client.train(model, self.objective), model)
        factor = (self.clip / torch.cat([leaf.flatten() for leaf in change.values()]).norm()).clamp(max=1.0)
        drawn, width = client.context.streams.generator("noise", client.round, client.id), self.clip * self.noise
        noise = map_leaves(lambda leaf: torch.from_numpy(drawn.normal(0.0, width, tuple(leaf.shape))).to(leaf), change)
        return self.weighted(client, map_leaves(lambda w, d, e: w + factor * d + e, model, change, noise))


if __name__ == "__main__":
    folder = str(Path(sys.argv[1] if len(sys.argv) > 1 else "~/ray_results/examples").expanduser())
    for method in ("fedavg", "compression_and_noise:Sparse", "compression_and_noise:Noisy"):
        place = {"storage_path": folder, "name": method.rpartition(":")[2], "cluster.backend": "inline"}
        last = rayfl.run("quickstart", algorithm=method, train__rounds=8, **place).rounds.to_pylist()[-1]
        print(f"{place['name']}: {last['top1']:.3f}, {last['bytes_up'] / 1e6:.2f} MB up")
