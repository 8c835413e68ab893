"""Several labels a sample, of your own: a CSV file whose columns have names, with missing values. Seconds.

python own_labels.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow.csv import write_csv

import rayfl

HOSPITALS, EACH = 8, 80


def patients(path: Path) -> None:
    """Writes made-up patients: age, temperature (sometimes not measured), sex, and what they complain of."""
    generator = np.random.default_rng(0)
    count = HOSPITALS * EACH
    age, temperature = generator.uniform(20, 90, count), generator.normal(37.5, 1, count)
    columns = {
        "age": age.round(1),
        "temperature": pa.array(temperature.round(1), mask=generator.random(count) < 0.1),
        "sex": generator.choice(["f", "m"], count),
        "fever": (temperature > 38).astype(int),
        "weakness": (age / 30 + temperature - 37 + generator.normal(size=count) > 3).astype(int),
        "hospital": [f"hospital-{number}" for number in np.repeat(np.arange(HOSPITALS), EACH)],
    }
    write_csv(pa.table(columns), path)


def main(folder: Path) -> None:
    """Trains models of both complaints, and prints their scores."""
    folder.mkdir(parents=True, exist_ok=True)
    patients(folder / "patients.csv")
    result = rayfl.run(
        {
            "dataset": {
                "name": "parquet", "path": str(folder / "patients.csv"), "root": str(folder), "client": "hospital",
                "x": ["age", "temperature", "sex"], "y": ["fever", "weakness"],
                "standardize": "global", "missing": "indicator",
            },
            "task": "multilabel",
            "model": "tabular_mlp",
            "algorithm": "fedper",
            "train": {"rounds": 15, "clients_per_round": 4, "lr": 0.2, "batch_size": 10},
        },
        **{"cluster.backend": "inline", "storage_path": str(folder), "name": "patients"},
    )  # fmt: skip
    row = [r for r in result.rounds.to_pylist() if (r["cohort"], r["split"]) == ("all", "test")][-1]
    print(f"{row['model']}: micro F1 {row['f1_micro']:.3f}, mAP {row['map']:.3f}, all right {row['exact_match']:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "~/ray_results/examples").expanduser())
