"""Toys of methods without a barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree
from rayfl.system.schedule import Clock, Turnout
from rayfl.system.unfinished import Unfinished
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, random_clients
from tests.system.test_buffered import lasting, schedule

SIZES = (8, 12, 6, 10)

TRAIN = TrainConfig(
    rounds=6, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def trained(toy: Toy, model: Tree, client: int, round: int, weight: float = 0.0) -> Tree:
    """A client's two-layer model after a local update as TRAIN has it, near the one it began from."""
    part = toy.dataset.load(client)["train"]
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    rule = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
    generator = toy.context.streams.generator("batches", round, client)
    for index in plan_batches(len(part.y), 4, 2 * -(-len(part.y) // 4), generator).batches(CPU):
        hidden = torch.relu(part.x[index] @ leaves["inner.weight"].T + leaves["inner.bias"])
        loss = F.cross_entropy(hidden @ leaves["head.weight"].T + leaves["head.bias"], part.y[index])
        loss = loss + weight / 2 * sum((leaves[name] - leaf).square().sum() for name, leaf in model.items())
        rule.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        rule.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


class Rounds:
    """Rounds without a barrier of a method, as a run has them."""

    def __init__(self, toy: Toy, seconds: Sequence[float], size: int, **options: Any) -> None:
        self.toy = toy
        self.turnouts: list[Turnout] = []
        self._schedule = schedule(lasting(*seconds), size, **options)
        self._clock, self._unfinished = Clock(), Unfinished()

    def step(self, absent: Sequence[int] = ()) -> Tree:
        """One round, in which some clients fail; returns the server's tree."""
        toy, round = self.toy, self.toy.round
        turnout = self._schedule.plan(round, self._clock, self._unfinished.updates)
        cohort = [client for client in turnout.cohort if client not in absent]
        toy.federation.begin_round(round, ("test",), cohort, started=turnout.started, past=self._unfinished.past)
        sent = toy.algorithm.sent(toy.server)
        toy.server = {**toy.server, **toy.federation.play(toy.algorithm, toy.server, cohort)}
        self._clock = self._clock.after(turnout.duration_us, [], turnout.events)
        self._unfinished = self._unfinished.after(round, sent, turnout.under_way)
        self.turnouts.append(turnout)
        toy.round += 1
        return toy.server

    def run(self, rounds: int) -> Tree:
        for _ in range(rounds):
            self.step()
        return self.toy.server
