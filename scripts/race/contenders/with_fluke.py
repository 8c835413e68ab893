"""The race's works in fluke, which computes one client after the other in one process."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.ditto import Ditto
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.utils import FederationObserver, ServerObserver
from torch import nn
from work import LR, MOMENTUM, PROXIMAL_WEIGHT, Task, now


class Clock(FederationObserver, ServerObserver):
    """Notes when rounds end and whom the last one asked."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.selected: list[Any] = []

    def selected_clients(self, round: int, clients: Any) -> None:
        self.selected = list(clients)

    def end_round(self, round: int) -> None:
        self.ends.append(now())
        print(f"round {round} has ended", flush=True)


def _federation(task: Task) -> Any:
    work = task.work

    def loaders(test: bool) -> list[FastDataLoader]:
        return [
            FastDataLoader(
                *task.client(client, test), num_labels=work.classes, batch_size=work.batch, shuffle=not test,
                skip_singleton=False,
            )
            for client in range(work.clients)
        ]  # fmt: skip

    model = task.model().cpu()  # where fluke keeps what clients send
    client: dict[str, Any] = {
        "batch_size": work.batch,
        "local_epochs": work.epochs,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": LR, "momentum": MOMENTUM},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
    }
    if work.method == "ditto":
        client |= {"model": task.model().cpu(), "tau": work.epochs, "lam": PROXIMAL_WEIGHT}
    else:
        client |= {"persistency": False}
    data = DummyDataContainer(loaders(False), loaders(True), None, work.classes)
    parameters = DDict({"client": client, "server": {"weighted": True}, "model": model})
    algorithm = Ditto if work.method == "ditto" else FedAVG
    return algorithm(work.clients, DataSplitter(data, "iid"), parameters)


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    task, clock = Task.read(sys.argv[-1]), Clock()
    work, env = task.work, FlukeENV()
    env.set_seed(0)
    env.set_device(task.device)
    env.set_inmemory(True)
    evaluator = ClassificationEval(eval_every=1, n_classes=work.classes)
    env.set_evaluator(evaluator)
    env.set_eval_cfg(task="classification", eval_every=1, pre_fit=False, post_fit=False, server=False, locals=False)
    federation = _federation(task)
    federation.set_callbacks(clock)
    federation.finalize = lambda: None  # it would evaluate all participants
    federation.run(work.rounds, work.cohort / work.clients)
    seconds = []
    for repeat in range(3 if work.evaluate else 0):
        start = now()
        for client in federation.clients:
            evaluator.evaluate(work.rounds + repeat, federation.server.model, client.test_set, nn.CrossEntropyLoss())
        seconds.append(now() - start)
    if work.method == "fedavg":
        loss, accuracy = task.score(federation.server.model.to(task.device))
    else:
        scores = [_score(client) for client in clock.selected]
        loss, accuracy = (sum(column) / len(scores) for column in zip(*scores, strict=True))
    task.report(clock.ends, loss, accuracy, seconds)


def _score(client: Any) -> tuple[float, float]:
    model = client.personalized_model
    device = next(model.parameters()).device
    x, y = (part.to(device) for part in client.test_set.tensors)
    with torch.no_grad():
        out = model(x)
    return float(nn.functional.cross_entropy(out, y)), float((out.argmax(1) == y).float().mean())


if __name__ == "__main__":
    main()
