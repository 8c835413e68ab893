"""One work of the race: what every contender computes, and how it says what it took.

Runs in every contender's environment, so it needs numpy and torch alone.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LR = 0.01
MOMENTUM = 0.9
PROXIMAL_WEIGHT = 0.1
"""lambda of Ditto."""


@dataclass(frozen=True)
class Work:
    """A federated training task.

    Attributes:
        name: W1, W1E5, ...
        title: a line for people.
        model: ``two_nn``, ``two_cnn`` or ``char_lstm``.
        clients: K.
        cohort: clients per round.
        samples: training samples of a client.
        test_samples: test samples of a client.
        shape: shape of one sample.
        classes: number of labels; for tokens the vocabulary.
        batch: mini-batch size.
        epochs: local epochs.
        rounds: rounds that one process runs. The first is timed as part of the start alone, the last not at all: rayfl
            ends it with an evaluation of all clients and a commit, the others do not.
        method: ``fedavg`` or ``ditto``.
        evaluate: whether the last thing timed is an evaluation of all clients, in place of rounds.
        classes_per_client: labels that a client has; 0 for all.
    """

    name: str
    title: str
    model: str = "two_nn"
    clients: int = 100
    cohort: int = 10
    samples: int = 400
    test_samples: int = 20
    shape: tuple[int, ...] = (1, 28, 28)
    classes: int = 10
    batch: int = 10
    epochs: int = 1
    rounds: int = 12
    method: str = "fedavg"
    evaluate: bool = False
    classes_per_client: int = 0


WORKS = {
    work.name: work
    for work in (
        Work("W1", "TwoNN, 10 of 100 clients, 400 samples, batch 10, E = 1", rounds=21),
        Work("W1E5", "as W1, E = 5", epochs=5, rounds=9),
        Work(
            "W2",
            "TwoCNN on 3x32x32, 10 of 100 clients, 100 samples, batch 10, E = 1",
            model="two_cnn",
            samples=100,
            shape=(3, 32, 32),
            rounds=9,
        ),
        Work(
            "W3",
            "Ditto, TwoNN, 100 of 2,000 clients, 50 samples, 2 labels a client: every client keeps a model",
            clients=2000,
            cohort=100,
            samples=50,
            method="ditto",
            classes_per_client=2,
            rounds=9,
        ),
        Work(
            "W4",
            "character LSTM (2 x 256), 5 of 50 clients, 100 sequences of 80, batch 50, E = 1",
            model="char_lstm",
            clients=50,
            cohort=5,
            samples=100,
            shape=(80,),
            classes=80,
            batch=50,
            rounds=7,
        ),
        Work(
            "W5",
            "evaluation of all 2,000 clients, 20 test samples each, TwoNN",
            clients=2000,
            samples=50,
            rounds=4,
            evaluate=True,
        ),
    )
}


class TwoNN(nn.Module):
    """784-200-200-10."""

    def __init__(self, inputs: int = 784, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))


class TwoCNN(nn.Module):
    """Two 5x5 convolutions with pooling, 512 units, 10 labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 8 * 8, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class CharLSTM(nn.Module):
    """Embedding of 8, two LSTM layers of 256, next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(80, 8)
        self.lstm = nn.LSTM(8, 256, 2, batch_first=True)
        self.head = nn.Linear(256, 80)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0][:, -1])


MODELS = {"two_nn": TwoNN, "two_cnn": TwoCNN, "char_lstm": CharLSTM}


@dataclass(frozen=True)
class Task:
    """A work, its files and what this process has measured of it.

    Attributes:
        work: the work.
        folder: where ``x.npy``, ``y.npy``, ``x_test.npy``, ``y_test.npy`` (client first) and ``initial.npz`` are.
        born: when the process was started, as ``time.time()`` of the one that started it.
        scratch: an empty folder for whatever the contender writes.
        device: where models are trained, and samples brought first.
    """

    work: Work
    folder: str
    born: float
    scratch: str
    device: str = "cpu"

    @staticmethod
    def read(path: str) -> Task:
        """What :meth:`write` wrote."""
        raw: dict[str, Any] = json.loads(Path(path).read_text())
        work = raw.pop("work")
        return Task(Work(**{**work, "shape": tuple(work["shape"])}), **raw)

    def write(self, path: Path) -> None:
        """For :meth:`read`, in another process."""
        path.write_text(json.dumps(asdict(self)))

    def array(self, name: str) -> np.ndarray:
        """``x``, ``y``, ``x_test`` or ``y_test`` of all clients, memory-mapped."""
        # Never written to; but PyTorch would warn of arrays that cannot be.
        return np.load(f"{self.folder}/{name}.npy", mmap_mode="c")

    def client(self, client: int, test: bool = False) -> tuple[Tensor, Tensor]:
        """One client's samples and labels."""
        suffix = "_test" if test else ""
        x, y = (np.array(self.array(name + suffix)[client]) for name in ("x", "y"))
        return torch.from_numpy(x).to(self.device), torch.from_numpy(y).to(self.device)

    def initial(self) -> list[np.ndarray]:
        """The initial weights, in the order of the model's parameters."""
        with np.load(f"{self.folder}/initial.npz") as arrays:
            return [arrays[name] for name in sorted(arrays.files)]

    def model(self) -> nn.Module:
        """The model with the initial weights."""
        model = MODELS[self.work.model]()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), self.initial(), strict=True):
                parameter.copy_(torch.from_numpy(value))
        return model.to(self.device)

    def score(self, model: nn.Module) -> tuple[float, float]:
        """Loss and accuracy (in 0 to 1) on the test samples of the first 100 clients together."""
        x = torch.from_numpy(np.array(self.array("x_test")[:100])).flatten(0, 1).to(self.device)
        y = torch.from_numpy(np.array(self.array("y_test")[:100])).flatten(0, 1).to(self.device)
        with torch.no_grad():
            out = model(x)
        return float(nn.functional.cross_entropy(out, y)), float((out.argmax(1) == y).float().mean())

    def report(
        self, ends: list[float], loss: float | None, accuracy: float | None, evaluation: list[float] | None = None
    ) -> None:
        """Prints what the race reads.

        Args:
            ends: ``time.time()`` at the end of each round.
            loss: of the global model on the test samples of the first 100 clients; of the personal models, where the
                method has some, the mean over the clients of the last round; None where it is not known.
            accuracy: likewise.
            evaluation: seconds of each evaluation of all clients.
        """
        seconds = np.diff(ends)[:-1].tolist()
        result = {"start": ends[0] - self.born, "rounds": seconds, "loss": loss, "accuracy": accuracy}
        print("RACE " + json.dumps({**result, "evaluation": evaluation or []}), flush=True)


def local_epochs(model: nn.Module, x: Tensor, y: Tensor, work: Work, anchor: list[Tensor] | None = None) -> None:
    """Plain local training: fresh SGD with momentum, new batches every epoch; near ``anchor`` where there is one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    loss_function = nn.CrossEntropyLoss()
    for _ in range(work.epochs):
        for index in torch.randperm(len(y)).split(work.batch):
            optimizer.zero_grad()
            loss = loss_function(model(x[index]), y[index])
            if anchor is not None:
                distance = sum((p - a).pow(2).sum() for p, a in zip(model.parameters(), anchor, strict=True))
                loss = loss + PROXIMAL_WEIGHT / 2 * distance
            loss.backward()
            optimizer.step()


def now() -> float:
    """The clock of all measurements, comparable between processes."""
    return time.time()
