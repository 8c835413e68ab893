"""A method of your own in one class, without registration, next to the method that it changes. Seconds.

*Halfway* averages as FedAvg does, and a client uses the mean of the server's model and its own last one.

    cd examples; rayfl run quickstart algorithm=own_method:Halfway algorithm.share=0.3
    python examples/own_method.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import rayfl
from algorithms.base import Averaging, setting
from rayfl import Client, Predictor, Weighted
from rayfl.params import Tree, interpolate


class Halfway(Averaging):
    """Federated averaging whose clients use a point between the server's model and their own last one."""

    name: str = "halfway"
    personalized: ClassVar[str] = "halfway"
    client_keeps: ClassVar[str] = "v_k"

    share: float = setting(0.5, "s", "how far from the server's model (0) to the client's own (1)", ge=0, le=1)

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """What a client does in a round: local SGD, and it keeps what came out."""
        trained = await client.train(model, self.objective)
        client.state["own"] = trained
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        """The rows of the evaluation; a client never sampled has no model of its own yet."""
        own = client.state.get("own", server["model"])
        between = interpolate(server["model"], own, self.share)
        return {"global": Predictor.of(server["model"]), "halfway": Predictor.of(between)}


def main(folder: Path) -> dict[float, float]:
    """Runs it with three shares; prints and returns the mean test accuracy over clients by share."""
    found = {}
    for share in (0.0, 0.5, 1.0):
        settings = {"algorithm": "own_method:Halfway", "algorithm.share": share, "train.rounds": 8}
        place = {"storage_path": str(folder), "name": f"halfway-{share}", "cluster.backend": "inline"}
        result = rayfl.run("quickstart", **settings, **place)
        rows = [row for row in result.rounds.to_pylist() if (row["model"], row["split"]) == ("halfway", "test")]
        found[share] = rows[-1]["top1"]
        print(f"share {share}: {found[share]:.3f}")
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "~/ray_results/examples").expanduser())
