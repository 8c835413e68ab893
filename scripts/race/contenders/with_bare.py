"""The race's yardstick: a plain PyTorch loop in two processes, without any framework."""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from work import Task, local_epochs, now

PROCESSES = 2


def main(rank: int, task: Task) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{task.scratch}/meet", rank=rank, world_size=PROCESSES)
    work, model = task.work, task.model()
    weights = [p.detach().clone() for p in model.parameters()]
    personal: dict[int, list[Tensor]] = {}
    data: dict[int, tuple[Tensor, Tensor]] = {}
    ends, sampler = [], np.random.default_rng(0)
    for _ in range(work.rounds):
        # A client stays with its process, whose memory holds its model.
        cohort = [int(c) for c in sampler.choice(work.clients, work.cohort, replace=False)]
        total = [torch.zeros_like(w) for w in weights]
        for client in sorted(cohort)[rank::PROCESSES] if work.method == "fedavg" else _own(cohort, rank):
            if client not in data:
                data[client] = task.client(client)
            _load(model, weights)
            local_epochs(model, *data[client], work)
            for t, p in zip(total, model.parameters(), strict=True):
                t.add_(p.detach(), alpha=1 / work.cohort)
            if work.method == "ditto":
                _load(model, personal.get(client) or weights)
                local_epochs(model, *data[client], work, anchor=weights)
                personal[client] = [p.detach().clone() for p in model.parameters()]
        flat = nn.utils.parameters_to_vector(total)
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat, weights)
        ends.append(now())
    _load(model, weights)
    evaluation = [_evaluate(task, model, rank) for _ in range(3)] if work.evaluate else []
    _report(
        task,
        model,
        {client: personal[client] for client in _own(cohort, rank) if client in personal},
        ends,
        evaluation,
        rank,
    )


def _own(cohort: list[int], rank: int) -> list[int]:
    return [client for client in sorted(cohort) if client % PROCESSES == rank]


def _load(model: nn.Module, weights: list[Tensor]) -> None:
    with torch.no_grad():
        for p, w in zip(model.parameters(), weights, strict=True):
            p.copy_(w)


def _evaluate(task: Task, model: nn.Module, rank: int) -> float:
    start, work = now(), task.work
    correct = torch.zeros(work.clients)
    for client in range(rank, work.clients, PROCESSES):
        x, y = task.client(client, test=True)
        with torch.no_grad():
            correct[client] = (model(x).argmax(1) == y).float().mean()
    dist.all_reduce(correct)
    return now() - start


def _report(
    task: Task,
    model: nn.Module,
    personal: dict[int, list[Tensor]],
    ends: list[float],
    evaluation: list[float],
    rank: int,
) -> None:
    if task.work.method == "fedavg":
        score = torch.tensor([*task.score(model), 1.0])
    else:
        score = torch.zeros(3)
        for client, weights in personal.items():
            _load(model, weights)
            score += torch.tensor([*own_score(task, model, client), 1.0])
        dist.all_reduce(score)
    if rank == 0:
        task.report(ends, float(score[0] / score[2]), float(score[1] / score[2]), evaluation)


def own_score(task: Task, model: nn.Module, client: int) -> tuple[float, float]:
    """Loss and accuracy on a client's own test samples."""
    x, y = task.client(client, test=True)
    with torch.no_grad():
        out = model(x)
    return float(nn.functional.cross_entropy(out, y)), float((out.argmax(1) == y).float().mean())


if __name__ == "__main__":
    mp.spawn(main, (Task.read(sys.argv[-1]),), PROCESSES)
