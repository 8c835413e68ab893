"""Numbers to predict, of your own: a function that returns them. Seconds.

cd examples
rayfl run dataset=own_regression:houses partition=natural task=regression model=tabular_mlp algorithm=ditto
python own_regression.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import rayfl
from rayfl.randomness import RandomStreams

TOWNS, EACH = 10, 60


def houses(streams: RandomStreams) -> tuple[np.ndarray, np.ndarray, None, list[str]]:
    """Size, age and distance of houses, and their prices; a square metre costs something else in every town."""
    generator = streams.generator("houses")
    x = generator.normal(size=(TOWNS * EACH, 3))
    town = np.repeat(np.arange(TOWNS), EACH)
    price = generator.uniform(0.5, 2.5, TOWNS)[town] * x[:, 0] - 0.3 * x[:, 1] - 0.5 * x[:, 2]
    # The third is the number of classes; the numbers to predict are counted by their columns.
    return x, price + 0.1 * generator.normal(size=len(price)), None, [f"town-{number}" for number in town]


def main(folder: Path) -> None:
    """Trains a model for each town, and prints errors of one model for all and of the towns' own."""
    result = rayfl.run(
        {
            "dataset": "own_regression:houses",
            "partition": "natural",
            "task": {"name": "regression", "loss": "huber"},
            "model": "tabular_mlp",
            "algorithm": "ditto",
            "train": {"rounds": 20, "clients_per_round": 5, "lr": 0.05, "batch_size": 10},
        },
        **{"cluster.backend": "inline", "storage_path": str(folder), "name": "houses"},
    )
    for row in result.rounds.to_pylist():
        if (row["round"], row["cohort"], row["split"]) == (20, "all", "test"):
            print(f"{row['model']:>14}: MSE {row['mse']:.3f}, R2 {row['r2']:.3f} over {row['clients']} clients")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "~/ray_results/examples").expanduser())
