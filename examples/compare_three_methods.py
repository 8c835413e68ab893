"""Three methods on the same clients: a DataFrame, a table and a figure. Seconds; needs `pip install pandas`.

python examples/compare_three_methods.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

import rayfl
from algorithms.registry import Experiment
from rayfl.plots.output import write_plot
from rayfl.runs.folder import open_run

METHODS = {"fedavg": {}, "ditto": {}, "superfed": {"algorithm.start": 0.3}}
ROUNDS = 6
SETTINGS = {"train.rounds": ROUNDS, "evaluation.every": 2, "cluster.backend": "inline"}
"""`inline` is this process; leave it out to use all CPUs through Ray, with the same results."""


def main(folder: Path) -> pd.DataFrame:
    """Runs what is missing, prints a row per method and writes curves.png and curves.csv; returns the rows."""
    results = {
        method: rayfl.run(
            "quickstart",
            **{**SETTINGS, "algorithm": method, **own, "name": method, "storage_path": str(folder)},
        )
        for method, own in METHODS.items()
    }
    rows = []
    for method, result in results.items():
        rounds = result.rounds.to_pandas()
        last = rounds[(rounds["round"] == ROUNDS) & (rounds["cohort"] == "all") & (rounds["split"] == "test")]
        # The method's own answer for a client; where there are several, the one chosen on validation data.
        own = last[last["model"] == result.config.algorithm.personalized]
        chosen = last[last["selected_on"] == "validation"]
        row = (chosen if len(chosen) else own).iloc[0]
        rows.append({"method": method, **row[["model", "choice", "top1", "top1_std", "top1_worst5", "ece"]]})
    table = pd.DataFrame(rows).set_index("method")
    print(table.round(3).to_string())
    runs = [open_run(result.path, Experiment) for result in results.values()]
    write_plot("curves", runs, folder / "curves.png", x="rounds")
    print(f"figure: {folder / 'curves.png'}")
    return table


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "~/ray_results/examples").expanduser())
