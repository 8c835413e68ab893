"""A server with a network of its own, which makes every client's model from an embedding of the client. Seconds.

The idea of pFedHN (Shamsian et al., ICML 2021) in one class; rayfl's own, with all options, is `algorithm=pfedhn`.

    python examples/hypernetwork.py [FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rayfl
from rayfl import Algorithm, Client, Clients, Predictor, Server
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, subtract


class Hyper(Algorithm):
    """A client's model is the output of the server's network for the client's embedding."""

    name: str = "hyper"
    personalized = "personalized"

    def init(self, task: Any, context: Any) -> Tree:
        draw, start = context.streams.generator("init.hyper"), task.network.initialize(0)
        embeddings = torch.from_numpy(draw.normal(size=(context.num_clients, 16))).float()
        heads = {n: torch.from_numpy(draw.normal(0, 0.02, (*leaf.shape, 16))).float() for n, leaf in start.items()}
        return {"hyper": {"embeddings": embeddings, "heads": heads, "start": start}}

    def made(self, hyper: Tree, k: int) -> Tree:
        return {name: start + hyper["heads"][name] @ hyper["embeddings"][k] for name, start in hyper["start"].items()}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        sent = {k: {"model": self.made(server["hyper"], k)} for k in cohort}
        replies = clients.map(self.local_update, cohort, {}, sent)
        changes = {str(k): subtract(sent[k]["model"], replies[k]) for k in cohort}
        return clients.on_server(self.descend, {"hyper": server["hyper"], "changes": changes})

    async def local_update(self, client: Client, model: Tree) -> Tree:
        return await client.train(model, self.objective)

    async def descend(self, server: Server, hyper: Tree, changes: Tree) -> Tree:
        settings, frozen = TrainConfig(lr=0.05), {"changes": changes}
        return {"hyper": await server.train(hyper, self.agreement, frozen=frozen, steps=1, settings=settings)}

    def agreement(self, hyper: Any, batch: Any, task: Any, frozen: Any, draw: Any) -> Tensor:
        made = {k: self.made(hyper, int(k)) for k in frozen["changes"]}
        return torch.stack(
            [(made[k][n] * d).sum() for k, tree in frozen["changes"].items() for n, d in tree.items()]
        ).sum()

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"personalized": Predictor.of(self.made(server["hyper"], client.id))}


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "~/ray_results/examples").expanduser()
    for method, row in (("hypernetwork:Hyper", "personalized"), ("fedavg", "global")):
        name = method.partition(":")[0]
        place = {"storage_path": str(folder), "name": name, "cluster.backend": "inline"}
        rows = rayfl.run("quickstart", algorithm=method, **place, **{"train.rounds": 20}).rounds.to_pylist()
        print(f"{name}: {[round(r['top1'], 4) for r in rows if (r['model'], r['split']) == (row, 'test')][-1]}")
