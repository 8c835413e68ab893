"""Survival of patients: a task of your own, with Cox's partial likelihood and the concordance index. Seconds.

python own_survival.py [FOLDER [FLAMBY]]  # FLAMBY: FLamby's flamby/datasets/fed_tcga_brca; without it, made-up patients
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import torch
from pyarrow import csv

import rayfl
from rayfl.engine.further_tasks import Regression
from rayfl.metrics.measures import Measures, Metric, ratio


def cox(risk, y, counts=None):
    """The loss of each patient (Cox, 1972; ties by Breslow). y: days, with a minus where the patient lived then."""
    at_risk = y.abs() >= y.abs()[:, None]
    if counts is not None:  # 0 for what pads a batch
        at_risk = at_risk & (counts > 0) | torch.eye(len(y), dtype=torch.bool, device=y.device)
    return (torch.where(at_risk, risk, -torch.inf).logsumexp(1) - risk) * ~torch.signbit(y)


class Concordance(Measures):
    """Harrell's C: of the pairs of a client's patients of which one surely died first, those where it has more risk."""

    metrics = (Metric("c_index", "C-index", "higher"), Metric("loss", "Cox loss", "lower", digits=4))
    size = 4

    def statistics(self, predictions, targets):
        risk, y, days, alive = predictions[:, 0], targets[:, 0], targets[:, 0].abs(), torch.signbit(targets[:, 0])
        pairs = ~alive[:, None] & ((days[:, None] < days) | (days[:, None] == days) & alive)
        right = ((risk[:, None] > risk) + 0.5 * (risk[:, None] == risk)) * pairs
        return torch.stack([torch.ones_like(y).sum(), cox(risk, y).sum(), right.sum(), pairs.sum()]).double()

    def values(self, vectors):
        return {"c_index": ratio(vectors[..., 2], vectors[..., 3]), "loss": ratio(vectors[..., 1], vectors[..., 0])}


class Survival(Regression):
    """The logarithm of a patient's risk is predicted; the patients of a mini-batch are compared with each other."""

    name, metrics, measures = "survival", Concordance.metrics, Concordance()

    def loss_of(self, outputs, batch):
        return batch.mean(cox(outputs[:, 0], batch.y[:, 0], batch.mask))


def patients(streams):
    """Made-up patients of six regions, each with a risk of its own."""
    generator, region = streams.generator("patients"), np.repeat(np.arange(6), 60)
    x, weight = generator.normal(size=(360, 4)), generator.normal([2, -1, 0, 1], size=(6, 4))
    death, end = generator.exponential(np.exp(7 - (x * weight[region]).sum(1))), generator.uniform(100, 3000, 360)
    return x, np.where(death < end, death, -end), None, region


def fed_tcga_brca(flamby, file):
    """FLamby's patients as one table, with regions as clients and FLamby's training and test parts."""
    split = csv.read_csv(flamby / "dataset_creation_scripts" / "train_test_split.csv")
    table = csv.read_csv(flamby / "brca.csv").join(split, "pid").sort_by("pid")
    inputs = table.column_names[1:-4]  # pid, the inputs, E and T, fold and fold2
    table = table.append_column("days", [np.copysign(table["T"], table["E"].to_numpy() - 0.5)])
    table = table.append_column("region", [[fold[-1] for fold in table["fold2"].to_pylist()]])
    pyarrow.parquet.write_table(table, file)
    columns = {"x": inputs, "y": "days", "client": "region", "split": "fold"}
    return {"name": "parquet", "path": str(file), **columns, "standardize": "global"}  # FLamby takes age in years


def main(folder, flamby=None):
    """Trains one model for all regions, and one for each, with FLamby's batches and learning rate."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "dataset": fed_tcga_brca(flamby, folder / "patients.parquet") if flamby else "own_survival:patients",
        "partition": "natural",
        "task": "own_survival:Survival",
        "model": {"name": "tabular_mlp", "hidden": []},
        "train": {"rounds": 10, "clients_per_round": "all", "local_epochs": 5, "lr": 0.1, "batch_size": 16},
    }
    for method in ("fedavg", "ditto"):
        own = {"cluster.backend": "inline", "storage_path": str(folder), "name": method}
        result = rayfl.run({**config, "algorithm": method}, **own)
        for row in result.rounds.to_pylist():
            if (row["round"], row["cohort"], row["split"]) == (10, "all", "test"):
                print(f"{method}, {row['model']}: C-index {row['c_index']:.3f} over {row['clients']} regions")


if __name__ == "__main__":
    given = [Path(place).expanduser() for place in sys.argv[1:3]] or [Path("~/ray_results/examples").expanduser()]
    main(*given)
