"""Survival of your own patients: a function that returns days and deaths, for the task survival. Seconds.

cd examples
rayfl run dataset=own_survival:patients partition=natural task=survival model=tabular_mlp algorithm=ditto
python own_survival.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import rayfl
from rayfl.randomness import RandomStreams

REGIONS, EACH = 6, 60


def patients(streams: RandomStreams) -> tuple[np.ndarray, np.ndarray, None, list[str]]:
    """Four measurements of patients, the days they were followed, and whether they died; each region has its risks."""
    generator = streams.generator("patients")
    x = generator.normal(size=(REGIONS * EACH, 4))
    region = np.repeat(np.arange(REGIONS), EACH)
    weight = generator.normal([2, -1, 0, 1], size=(REGIONS, 4))
    death = generator.exponential(np.exp(7 - (x * weight[region]).sum(1)))
    end = generator.uniform(100, 3000, len(x))  # of the study; who lived then may have died at any time after it
    y = np.stack([np.minimum(death, end), death < end], axis=1)
    # The third is the number of outputs, which is one: the risk.
    return x, y, None, [f"region-{number}" for number in region]


def main(folder: Path) -> None:
    """Trains a model for each region, and prints how well one model for all and the regions' own order the deaths."""
    result = rayfl.run(
        {
            "dataset": "own_survival:patients",
            "partition": "natural",
            "task": "survival",
            "model": {"name": "tabular_mlp", "hidden": []},
            "algorithm": "ditto",
            "train": {"rounds": 10, "clients_per_round": "all", "local_epochs": 5, "lr": 0.1, "batch_size": 16},
        },
        **{"cluster.backend": "inline", "storage_path": str(folder), "name": "patients"},
    )
    for row in result.rounds.to_pylist():
        if (row["round"], row["cohort"], row["split"]) == (10, "all", "test"):
            print(f"{row['model']:>14}: C-index {row['c_index']:.3f} over {row['clients']} regions")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "~/ray_results/examples").expanduser())
