"""Rounds of federated averaging of adapters in Flower's simulation, and the seconds of each.

    CAMPAIGN_FLOWER=SETTINGS python -c "from flower_adapters import main; main()"

The settings are JSON. Flower's workers import this module, so that it may not be the main one. A worker keeps its base
from one client to the next, which templates that make a model for every client do not.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peft_clients import PeftClients

SETTINGS: dict[str, Any] = json.loads(os.environ["CAMPAIGN_FLOWER"])
client_app, server_app = ClientApp(), ServerApp()


@cache
def base() -> PeftClients:
    """The base of this process."""
    torch.set_num_threads(1)
    return PeftClients(SETTINGS["folder"], SETTINGS["device"])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    clients, batch, shape = base(), SETTINGS["batch"], SETTINGS["shape"]
    generator = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    x = torch.rand(batch, *shape, generator=generator).to(SETTINGS["device"])
    y = torch.randint(0, SETTINGS["classes"], (batch,), generator=generator).to(SETTINGS["device"])
    clients.load(message.content["arrays"].to_torch_state_dict())
    clients.train(x, y, SETTINGS["steps"])
    state = {name: leaf.cpu() for name, leaf in clients.state().items()}
    metrics = MetricRecord({"num-examples": batch * SETTINGS["steps"]})
    return Message(content=RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message)


class Timed(FedAvg):
    """Federated averaging that notes when its rounds end."""

    def __init__(self, clients: int) -> None:
        super().__init__(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=clients)
        self.ends: list[float] = []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(reply.error.reason)
        result = super().aggregate_train(server_round, replies)
        self.ends.append(time.perf_counter())
        return result


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    strategy = Timed(SETTINGS["clients"])
    initial = PeftClients(SETTINGS["folder"], "cpu").state()
    print("the base is loaded; the first round starts", flush=True)
    strategy.start(grid, ArrayRecord(initial), SETTINGS["rounds"])
    seconds = [after - before for before, after in zip(strategy.ends, strategy.ends[1:], strict=False)]
    print("FLOWER " + json.dumps(seconds), flush=True)


def main() -> None:
    """Simulates, and prints the seconds of the rounds after the first."""
    print("imported; Ray and its workers, which import the same, start", flush=True)
    logging.disable(logging.WARNING)
    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": SETTINGS["gpu_share"]},
        "init_args": {"num_cpus": SETTINGS["workers"], "include_dashboard": False},
    }
    run_simulation(server_app, client_app, SETTINGS["clients"], backend_config=resources)
