"""Data and a model of your own: a function that returns arrays, and a function that returns a module. Seconds.

cd examples
rayfl run dataset=own_data_and_model:rings partition=natural "model={name: own_data_and_model:network, head: '3'}"
python own_data_and_model.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import rayfl
from rayfl.randomness import RandomStreams

CLIENTS, EACH = 12, 80


def rings(streams: RandomStreams) -> tuple[np.ndarray, np.ndarray, int, list[str]]:
    """Points inside or outside of a circle; every client has a circle of its own, and so a task of its own."""
    generator = streams.generator("rings")
    x = generator.uniform(-1, 1, (CLIENTS * EACH, 2))
    owner = np.repeat(np.arange(CLIENTS), EACH)
    centre = generator.uniform(-0.5, 0.5, (CLIENTS, 2))[owner]
    y = (np.linalg.norm(x - centre, axis=1) < 0.6).astype(np.int64)
    return x, y, 2, [f"ring-{client}" for client in owner]


def network(spec: Any) -> nn.Module:
    """One hidden layer; `spec` says what comes in and how many classes there are."""
    inputs = int(np.prod(spec.shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, spec.num_classes))


def main(folder: Path) -> None:
    """Trains a model for each client, and prints the accuracy of one model for all and of the clients' own."""
    result = rayfl.run(
        {
            "dataset": "own_data_and_model:rings",
            "partition": "natural",
            "model": {"name": "own_data_and_model:network", "head": "3"},  # the layer that makes the logits
            "algorithm": "ditto",
            "train": {"rounds": 15, "clients_per_round": 6, "lr": 0.3, "batch_size": 20},
        },
        **{"cluster.backend": "inline", "storage_path": str(folder), "name": "rings"},
    )
    for row in result.rounds.to_pylist():
        if (row["round"], row["cohort"], row["split"]) == (15, "all", "test"):
            print(f"{row['model']:>14}: {row['top1']:.3f} +- {row['top1_std']:.3f} over {row['clients']} clients")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "~/ray_results/examples").expanduser())
