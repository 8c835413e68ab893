"""The race's works as Flower apps, in a module that Flower's workers import; client state in ``Context.state``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn
from work import Task, local_epochs, now

client_app, server_app = ClientApp(), ServerApp()


@cache
def given() -> tuple[Task, nn.Module]:
    torch.set_num_threads(1)
    task = Task.read(os.environ["RAYFL_RACE"])
    return task, task.model()


def _weights(record: ArrayRecord) -> list[Tensor]:
    return [torch.from_numpy(array) for array in record.to_numpy_ndarrays()]


def _load(model: nn.Module, weights: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for p, w in zip(model.parameters(), weights, strict=True):
            p.copy_(w)


def _record(model: nn.Module) -> ArrayRecord:
    return ArrayRecord([p.detach().cpu().numpy() for p in model.parameters()])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    task, model = given()
    client, weights = int(context.node_config["partition-id"]), _weights(message.content["arrays"])
    x, y = task.client(client)
    _load(model, weights)
    local_epochs(model, x, y, task.work)
    trained, metrics = _record(model), MetricRecord({"num-examples": len(y)})
    if task.work.method == "ditto":
        personal = context.state.get("personal")
        _load(model, weights if personal is None else _weights(personal))
        local_epochs(model, x, y, task.work, anchor=[w.to(task.device) for w in weights])
        context.state["personal"] = _record(model)
        if message.content["config"]["server-round"] == task.work.rounds:
            metrics["loss"], metrics["accuracy"] = _own_score(task, model, client)
    content = RecordDict({"arrays": trained, "metrics": metrics})
    return Message(content=content, reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    task, model = given()
    _load(model, _weights(message.content["arrays"]))
    loss, accuracy = _own_score(task, model, int(context.node_config["partition-id"]))
    metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": task.work.test_samples})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)


def _own_score(task: Task, model: nn.Module, client: int) -> tuple[float, float]:
    x, y = task.client(client, test=True)
    with torch.no_grad():
        out = model(x)
    return float(nn.functional.cross_entropy(out, y)), float((out.argmax(1) == y).float().mean())


class Timed(FedAvg):
    """Federated averaging that notes when its rounds end."""

    def __init__(self, task: Task) -> None:
        fraction = task.work.cohort / task.work.clients
        super().__init__(fraction, float(task.work.evaluate), min_available_nodes=task.work.clients)
        self.ends: list[float] = []
        self.evaluation: list[float] = []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        result = super().aggregate_train(server_round, self._complete(replies))
        self.ends.append(now())
        return result

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        result = super().aggregate_evaluate(server_round, self._complete(replies))
        self.evaluation.append(now() - self.ends[-1])
        return result

    def _complete(self, replies: Iterable[Message]) -> list[Message]:
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(reply.error.reason)
        return replies


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    task, model = given()
    strategy = Timed(task)
    result = strategy.start(grid, ArrayRecord(task.initial()), task.work.rounds)
    _load(model, _weights(result.arrays))
    if task.work.method == "fedavg":
        loss, accuracy = task.score(model)
    else:
        last = result.train_metrics_clientapp[task.work.rounds]
        loss, accuracy = float(last["loss"]), float(last["accuracy"])
    ends = strategy.ends
    if task.work.evaluate:
        # its evaluations lie between the rounds
        ends = list(np.array(ends) - np.concatenate([[0.0], np.cumsum(strategy.evaluation)[:-1]]))
    task.report(ends, loss, accuracy, strategy.evaluation[1:])
