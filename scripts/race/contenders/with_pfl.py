"""The race's works in Apple's pfl-research: two processes, each with a replica, one all-reduce per round.

On a GPU it is one process, and pfl-research itself finds the device.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.common_types import Population
from pfl.context import CentralContext
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import CrossSiloUserSampler, MinimizeReuseUserSampler
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.exception import UserNotFoundError
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.bridge import FrameworkBridgeFactory as bridges
from pfl.internal.ops.selector import get_default_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from work import LR, MOMENTUM, PROXIMAL_WEIGHT, Task, now

PROCESSES = 2


class WithLoss(nn.Module):
    """A model with the two methods that pfl-research asks for, and an anchor for Ditto."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.anchor: Any = None

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        value = nn.functional.cross_entropy(self.model(x), y)
        if self.anchor is not None:
            distance = sum((p - self.anchor[name]).pow(2).sum() for name, p in self.named_parameters())
            value = value + PROXIMAL_WEIGHT / 2 * distance
        return value

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        out = self.model(x)
        loss, correct = nn.functional.cross_entropy(out, y, reduction="sum"), (out.argmax(1) == y).sum()
        return {"loss": Weighted(float(loss), len(y)), "accuracy": Weighted(float(correct), len(y))}


class Ditto(FederatedAveraging):
    """A personal model of each user, kept in pfl-research's storage of user state."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.storage = task, InMemoryUserStateStorage()
        self.scores: list[tuple[float, float]] = []

    def train_one_user(self, initial_model_state: Any, model: Any, user_dataset: Any, central_context: Any) -> Any:
        bridges.sgd_bridge().do_sgd(model, user_dataset, central_context.model_train_params)
        statistics = model.get_model_difference(initial_model_state, clone=True)
        try:
            model.set_parameters(self.storage.load_state(user_dataset.user_id))
        except UserNotFoundError:
            model.set_parameters(initial_model_state)
        model.pytorch_model.anchor = initial_model_state
        bridges.sgd_bridge().do_sgd(model, user_dataset, central_context.model_train_params)
        model.pytorch_model.anchor = None
        self.storage.save_state({k: v.detach().clone() for k, v in model.variable_map.items()}, user_dataset.user_id)
        if central_context.current_central_iteration == self.task.work.rounds - 1:
            x, y = self.task.client(int(user_dataset.user_id), test=True)
            scores = model.pytorch_model.metrics(x, y)
            self.scores.append((scores["loss"].overall_value, scores["accuracy"].overall_value))
        return statistics, Metrics()


class Clock(TrainingProcessCallback):
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        self.ends.append(now())
        return False, Metrics()


def _backend(task: Task) -> SimulatedBackend:
    users = [str(client) for client in range(task.work.clients)]
    cached: dict[str, Dataset] = {}

    def train(user: str) -> Dataset:
        if user not in cached:
            cached[user] = Dataset(task.client(int(user)), user_id=user)
        return cached[user]

    def test(user: str) -> Dataset:
        return Dataset(task.client(int(user), test=True), user_id=user)

    pinned = CrossSiloUserSampler("minimize_reuse", users, num_silos=int(os.environ["WORLD_SIZE"]))
    sampler = pinned if task.work.method == "ditto" else MinimizeReuseUserSampler(users)
    training = FederatedDataset(train, sampler)
    return SimulatedBackend(training, FederatedDataset(test, MinimizeReuseUserSampler(users)), [WeightByDatapoints()])


def main() -> None:
    torch.set_num_threads(1)
    np.random.seed(0)
    task, clock = Task.read(sys.argv[-1]), Clock()
    work, module = task.work, WithLoss(task.model())
    model = PyTorchModel(
        module,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM),
        torch.optim.SGD(module.parameters(), lr=1.0),
    )
    backend = _backend(task)
    algorithm = Ditto(task) if work.method == "ditto" else FederatedAveraging()
    parameters = NNAlgorithmParams(work.rounds, work.rounds, work.cohort, 0)
    train = NNTrainHyperParams(local_num_epochs=work.epochs, local_learning_rate=LR, local_batch_size=work.batch)
    evaluate = NNEvalHyperParams(local_batch_size=work.test_samples)
    algorithm.run(parameters, backend, model, train, evaluate, [clock], send_metrics_to_platform=False)

    seconds = []
    for _ in range(3 if work.evaluate else 0):
        start = now()
        context = CentralContext(0, True, work.clients, Population.VAL, parameters, train, evaluate, 0)
        asyncio.run(backend.async_gather_results(model, algorithm, central_context=context))
        seconds.append(now() - start)
    if isinstance(algorithm, Ditto):
        sums = torch.tensor([*np.sum(algorithm.scores, axis=0), len(algorithm.scores)], device=task.device)
        torch.distributed.all_reduce(sums)
        loss, accuracy = (float(value) for value in sums[:2] / sums[2])
    else:
        loss, accuracy = task.score(module.model)
    if get_default_framework_module().distributed.global_rank == 0:
        task.report(clock.ends, loss, accuracy, seconds)


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        processes = PROCESSES if Task.read(sys.argv[-1]).device == "cpu" else 1
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        sys.exit(subprocess.call([*launcher, __file__, sys.argv[-1]]))
    main()
