"""MetaFed: clients learn one after the other, each from the one before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import loss
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch, Predictor, Task, Trait


class MetaFed(Algorithm):
    """MetaFed: models of the clients' own, which go round in a cycle without a mean (cyclic knowledge distillation).

    A client that takes part for the first time trains the initial model v_k alone, for E_w epochs. Then the clients of
    the cohort train one after the other, in the order of their numbers. Each gets the model u of the one before it, the
    first one that of the last one of the round before; with features f(x), which the last layer reads, it takes

        v_k <- E epochs from v_k:  CE + lambda mean (f(x; v) - f(x; u))^2    if it is ready
        v_k <- E epochs from u:    CE                                        otherwise

    where the mean is over samples and features. A client is ready from when v_k's accuracy on its validation samples
    is above theta_1, measured after the first training and after each turn. After the last round (personalization)
    every client that has taken part trains once more, from the same place with the last u, where a(v) is that accuracy,
    on

        CE + lambda' mean (f(x; v) - f(x; u))^2,    lambda' = lambda / 10  10^min(1, 5 (a(u) - a(v_k)))

    if it is ready, with lambda' = 0 where a(u) <= a(v_k) and a(u) < theta_2.

    Server: u, which in a deployment would be the last client, and who has begun. Client: v_k, and whether it is ready.
    Down: u. Up: v_k. Evaluated: v_k (``cyclic``), and the personalized model, which is v_k until the last round
    (``personalized``). A client never sampled has the initial model. There is no global model.

    References:
        Chen, Lu, Qin, Wang, Xie: MetaFed: Federated Learning among Federations with Cyclic Knowledge Distillation for
        Personalized Healthcare, IEEE TNNLS 2023.
    """

    name: Literal["metafed"] = "metafed"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Chen et al., TNNLS 2023"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "a client is ready by the accuracy of its model"}
    client_keeps: ClassVar[str] = "v_k"
    server_keeps: ClassVar[str] = "u, who has begun"
    newcomer: ClassVar[str] = "a model after the first training and a turn with u"

    distillation_weight: float = setting(1.0, "lambda", "weight of the distance of features to those of u", ge=0)
    ready_above: float = setting(0.6, "theta_1", "accuracy above which a client is ready", ge=0, le=1)
    teaches_above: float = setting(
        0.5,
        "theta_2",
        "accuracy from which u teaches in the personalization, although it is no better than v_k",
        ge=0,
        le=1,
        unless={"distillation_weight": (0,), "personal_epochs": (0,)},
    )
    warmup_epochs: int = setting(30, "E_w", "epochs of a client's first training", ge=0, kept=True)
    personal_epochs: int | None = setting(
        None, "", "epochs of the personalization; null: train.local_epochs, 0: none", ge=0
    )
    select_on: Literal["validation", "train"] = setting(
        "validation", "", "samples of the accuracies (training samples where a client has none for validation)"
    )

    def check_data(self, task: Task, sizes: np.ndarray, public: int) -> None:
        super().check_data(task, sizes, public)
        if self.select_on == "validation" and not sizes[:, 1].any():
            raise ConfigError(
                "holdout.validation leaves no client validation samples, on which metafed measures accuracies: raise "
                "it, or set algorithm.select_on=train"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        return {"begun": torch.zeros(context.num_clients, dtype=torch.int64)}

    def sent(self, server: Tree) -> Tree:
        return {"teacher": server["teacher"]} if "teacher" in server else {}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return self.sent(server), {}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        begun, teacher = server["begun"].clone(), server.get("teacher")
        if new := [client for client in cohort if not begun[client]]:
            clients.map(self.warm_up, new, {})
            begun[new] = 1
        for client in cohort:
            given = {} if teacher is None else {"teacher": teacher}
            teacher = clients.map(self.take_turn, [client], given)[client]["model"]
        return {"begun": begun, "teacher": teacher}

    async def warm_up(self, client: Client) -> Tree:
        """Trains the initial model; sends nothing."""
        start = client.initial_model()
        trained = await client.train(start, loss(), epochs=self.warmup_epochs, stream=".warmup", keep_optimizer=False)
        client.state.update(model=trained, ready=int(await self.accuracy(client, trained) > self.ready_above))
        return {}

    async def take_turn(self, client: Client, teacher: Tree | None = None) -> Tree:
        """Trains from v_k, drawn to the teacher's features, or from the teacher; returns v_k.

        Args:
            client: who trains.
            teacher: u; None for the first client of all, which trains v_k alone.
        """
        if "model" not in client.state:  # it was lost with the states of a repaired run
            await self.warm_up(client)
        trained = await self.taught(client, teacher, self.distillation_weight)
        ready = client.state["ready"] or await self.accuracy(client, trained) > self.ready_above
        client.state.update(model=trained, ready=int(ready))
        client.publish(cyclic=Predictor.of(trained))
        return {"model": copy(trained)}

    async def taught(self, client: Client, teacher: Tree | None, weight: float, **options: Any) -> Tree:
        """The model after training with a teacher, whose features count by a weight; options of ``Client.train``."""
        own: Tree = client.state["model"]
        if teacher is not None and not client.state["ready"]:
            return await client.train(teacher, loss(), **options)
        if teacher is None or not weight:
            return await client.train(own, loss(), **options)
        # a tensor, with which clients of several weights are stacked
        reads = {"teacher": teacher, "weight": next(iter(own.values())).new_tensor(weight)}
        return await client.train(own, self.objective, frozen=reads, **options)

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """CE + lambda mean (f(x; v) - f(x; u))^2."""
        features, logits = task.head_inputs_and_logits(model, batch)
        wanted, _ = task.head_inputs_and_logits(frozen["teacher"], batch, training=False)
        apart = batch.mean((features - wanted).square().mean(-1))
        found: Tensor = task.loss_of(logits, batch) + frozen["weight"] * apart
        return found

    async def accuracy(self, client: Client, model: Tree) -> float:
        """a(v), in [0, 1]."""
        split = "validation" if self.select_on == "validation" and len(client.examples("validation")) else "train"
        return (await client.score(Predictor.of(model), split)).top1

    async def personalize(self, client: Client, teacher: Tree) -> Tree:
        """The model after the personalization."""
        theirs, own = await self.accuracy(client, teacher), await self.accuracy(client, client.state["model"])
        weight = self.distillation_weight / 10 * 10 ** min(1.0, 5 * (theirs - own))
        if theirs <= own and theirs < self.teaches_above:
            weight = 0.0
        return await self.taught(
            client, teacher, weight, epochs=self.personal_epochs, stream=".personal", keep_optimizer=False
        )

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.warm_up(client)
        await self.take_turn(client, server.get("teacher"))
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        own = client.state.get("model")
        model = client.initial_model() if own is None else own
        tuned = model
        if client.context.final and own is not None and "teacher" in server and self.personal_epochs != 0:
            tuned = await self.personalize(client, server["teacher"])
        return {"personalized": Predictor.of(tuned), "cyclic": Predictor.of(model)}
