"""FedBuff (Nguyen et al., AISTATS 2022) as a user would write it: a method in rounds without a barrier. Seconds.

Clients begin and end at any time on devices of different speed; the server steps when five updates have arrived.

    cd examples; rayfl run quickstart algorithm=own_asynchronous_method:Buffer system=sampled system.mode=buffered
    python examples/own_asynchronous_method.py [FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import rayfl
from algorithms.base import Averaging, setting
from rayfl import Client, Clients, Weighted
from rayfl.params import Tree, add_scaled, subtract


class Buffer(Averaging):
    """The server adds the mean of the clients' changes, each divided by the root of its age."""

    name: str = "buffer"
    asynchronous: ClassVar[bool] = True

    server_lr: float = setting(1.0, "eta_g", "step of the server", gt=0)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        """What the server does with the updates that have arrived since its last step."""
        began = {client: {"model": clients.received(client, server)["model"]} for client in cohort}
        mean = clients.mean(self.change, cohort, broadcast={}, payloads=began)
        factors = sum(self.factor(clients.context.staleness(client)) for client in cohort)
        return {"model": add_scaled(server["model"], mean, self.server_lr * factors / len(cohort))}

    async def change(self, client: Client, model: Tree) -> Weighted:
        """What a client does, from the model with which it began."""
        trained = await client.train(model, self.objective)
        return Weighted(subtract(trained, model), self.factor(client.staleness))

    def factor(self, staleness: int) -> float:
        """1 / sqrt(1 + s) for a change that began s steps of the server ago."""
        return float((1 + staleness) ** -0.5)


def main(folder: Path) -> None:
    """Runs it on the same devices as a server that waits; prints when the last round ends, and the test accuracy."""
    devices = {"name": "sampled", "computation": {"name": "lognormal", "median": 40, "sigma": 1.5}}
    train = {"train.rounds": 20, "train.clients_per_round": 5, "cluster.backend": "inline", "storage_path": str(folder)}
    buffered = {**devices, "mode": "buffered", "concurrency": 10}
    for method, system in (("fedavg", devices), ("own_asynchronous_method:Buffer", buffered)):
        result = rayfl.run("quickstart", algorithm=method, system=system, **train)
        row = next(row for row in result.rounds.to_pylist()[::-1] if (row["model"], row["split"]) == ("global", "test"))
        print(f"{method}: {row['simulated_s']:.0f} s, oldest {row.get('staleness_max', 0)}, accuracy {row['top1']:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "~/ray_results/examples").expanduser())
