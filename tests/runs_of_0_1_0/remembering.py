"""The method of docs/write-a-method.md, as the run beside this file has it."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from algorithms.base import Averaging, setting
from rayfl import Client, Predictor, Weighted
from rayfl.params import Tree, interpolate, squared_distance


class Remembering(Averaging):
    """Federated averaging whose clients are pulled towards the average of their own past models."""

    name: str = "remembering"
    personalized: ClassVar[str] = "memory"
    client_keeps: ClassVar[str] = "m_k"

    pull: float = setting(0.01, "mu", "weight of the squared distance to the memory", ge=0)
    forget: float = setting(0.5, "rho", "share of the newest model in the memory", ge=0, le=1)

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        memory = client.state.get("memory", model)
        trained = await client.train(model, self.objective, frozen={"memory": memory})
        client.state["memory"] = interpolate(memory, trained, self.forget)
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def objective(self, model: Any, batch: Any, task: Any, frozen: Any, draw: Any) -> Tensor:
        names = task.network.parameter_names
        moved, memory = ({name: tree[name] for name in names} for tree in (model, frozen["memory"]))
        return task.loss(model, batch) + self.pull * squared_distance(moved, memory)

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        memory = client.state.get("memory", server["model"])
        return {"global": Predictor.of(server["model"]), "memory": Predictor.of(memory)}
