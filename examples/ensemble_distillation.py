"""A server that trains: it distils the clients' models into their mean, on public samples without labels. Seconds.

The idea of FedDF (Lin et al., NeurIPS 2020) in one class; rayfl's own, with all options, is `algorithm=feddf`.

    python examples/ensemble_distillation.py [FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import rayfl
from algorithms.base import Averaging, setting
from rayfl import Client, Clients, Server, Weighted
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import Examples
from rayfl.params import Tree


class Distilled(Averaging):
    """Federated averaging whose mean learns what the clients' models say of public samples, on average."""

    name: str = "distilled"
    server_keeps = "w, U"
    steps: int = setting(100, "N", "steps of the server in a round", ge=0)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        mean = super().round(server, cohort, clients)["model"]
        said = clients.mean(self.teach, cohort, {}, counted=False)  # the server has the models: no message
        return clients.on_server(self.distil, {"model": mean, "targets": said["logits"]})

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        client.state["teacher"] = trained = await client.train(model, self.objective)
        return self.weighted(client, trained)

    async def teach(self, client: Client) -> Weighted:
        model = client.state.pop("teacher")
        return Weighted(
            {"logits": await client.outputs(lambda x, task: task.network.logits(model, x), client.public())}
        )

    async def distil(self, server: Server, model: Tree, targets: Tensor) -> Tree:
        samples, adam = Examples(server.public(), targets), TrainConfig(optimizer="adam", lr=1e-3, batch_size=64)
        return {"model": await server.train(model, self.lesson, examples=samples, steps=self.steps, settings=adam)}

    def lesson(self, model: Any, batch: Any, task: Any, frozen: Any, draw: Any) -> Tensor:
        return batch.mean(-(batch.y.softmax(-1) * task.logits(model, batch).log_softmax(-1)).sum(-1))


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "~/ray_results/examples").expanduser()
    for steps in (0, 100):
        place = {"storage_path": str(folder), "name": f"distilled-{steps}", "cluster.backend": "inline"}
        method = {"algorithm": "ensemble_distillation:Distilled", "algorithm.steps": steps, "holdout.public": 300}
        rows = rayfl.run("quickstart", **method, **place, **{"train.rounds": 6}).rounds.to_pylist()
        print(
            steps, "steps:", [round(r["top1"], 4) for r in rows if (r["model"], r["split"]) == ("global", "test")][-1]
        )
