"""A task of your own, with a loss and measures of your own: the price that nine of ten houses do not reach. Seconds.

cd examples
rayfl run dataset=own_regression:houses partition=natural task=own_task:Quantile model=tabular_mlp algorithm=ditto
python own_task.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import rayfl
from rayfl.metrics import MeasuresBySample, Metric
from rayfl.metrics.measures import counted, ratio
from rayfl.tasks.further_tasks import Regression

SHARE = 0.9


def pinball(predicted, y):
    """The loss of each number that the quantile makes least (Koenker and Bassett, 1978)."""
    return (SHARE * (y - predicted)).maximum((SHARE - 1) * (y - predicted))


class Coverage(MeasuresBySample):
    """The mean loss, and the share of numbers below their predicted quantile; all that is kept are sums."""

    metrics = (Metric("loss", "pinball loss", "lower", digits=4), Metric("below", "below", "higher", 100, 1, "%"))
    size = 3

    def by_sample(self, predictions, targets):
        found = [torch.ones_like(targets), pinball(predictions, targets), targets < predictions]
        return (torch.cat(found, 1).double(),)

    def added(self, found, mask=None):
        return counted(found[0], mask).sum(-2)

    def values(self, vectors):
        return {"loss": ratio(vectors[..., 1], vectors[..., 0]), "below": ratio(vectors[..., 2], vectors[..., 0])}


class Quantile(Regression):
    """Learns from one number a sample, as regression does; batch.mean leaves out what pads a stacked batch."""

    name, metrics, measures = "quantile", Coverage.metrics, Coverage()

    def loss_of(self, outputs, batch):
        return batch.mean(pinball(outputs, batch.y).mean(-1))


def main(folder: Path) -> None:
    """Trains a model for each town, and prints how many prices are below what is predicted."""
    result = rayfl.run(
        {
            "dataset": "own_regression:houses",
            "partition": "natural",
            "task": "own_task:Quantile",
            "model": "tabular_mlp",
            "algorithm": "ditto",
            "train": {"rounds": 20, "clients_per_round": 5, "lr": 0.05, "batch_size": 10},
        },
        **{"cluster.backend": "inline", "storage_path": str(folder), "name": "quantiles"},
    )
    for row in result.rounds.to_pylist():
        if (row["round"], row["cohort"], row["split"]) == (20, "all", "test"):
            print(f"{row['model']:>14}: pinball loss {row['loss']:.3f}, {100 * row['below']:.0f} % are below it")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "~/ray_results/examples").expanduser())
