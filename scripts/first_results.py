"""Global and personalized accuracy of five methods on one preset, as a Markdown table.

    python scripts/first_results.py PRESET [OVERRIDE ...]

Does ``rayfl run PRESET algorithm=METHOD OVERRIDE ...`` once per method; finished runs are only read again.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.experiment import Parts
from rayfl.result import Result
from rayfl.tables import from_parquet
from rayfl.tracking.summary import final_rows

METHODS = {
    "FedAvg": ["algorithm=fedavg"],
    "FedProx": ["algorithm=fedprox"],
    "SuPerFed-MM": [],
    "FLOCO": ["algorithm=floco", "algorithm.assignment_round=10"],
    "FedPHP": ["algorithm=fedphp"],
}


def main(preset: str, overrides: list[str]) -> None:
    """Runs what is missing, then prints the table."""
    print("| method | personalized model | global accuracy | personalized accuracy | worst 5 % | ECE |")
    print("|---|---|---|---|---|---|", flush=True)
    for method, own in METHODS.items():
        settings = [*own, *overrides]
        subprocess.run([sys.executable, "-m", "rayfl", "run", preset, *settings], check=True, stdout=sys.stderr)
        print(_row(method, _result(preset, settings)), flush=True)


def _result(preset: str, settings: list[str]) -> Result:
    config = load_config(Experiment, preset, settings)
    storage = Parts(config).storage
    tables = {name: from_parquet(storage.read(f"{name}.parquet")) for name in ("rounds", "clients")}
    return Result(storage.uri, config, tables["rounds"], tables["clients"], config.train.rounds)


def _row(method: str, result: Result) -> str:
    rows = final_rows(result)
    algorithm = result.config.algorithm
    overall = next(row for row in rows if row["model"] == "global")
    own = _personalized(rows, algorithm)
    cells = [
        method,
        own["choice"] or own["model"],
        f"{100 * overall['top1']:.2f} +- {100 * overall['top1_std']:.2f}",
        f"{100 * own['top1']:.2f} +- {100 * own['top1_std']:.2f}",
        f"{100 * own['top1_worst5']:.2f}",
        f"{own['ece']:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def _personalized(rows: list[dict[str, Any]], algorithm: Any) -> dict[str, Any]:
    if algorithm.sweep is not None:
        return next(row for row in rows if row["selected_on"] == "validation")
    return next(row for row in rows if row["model"] == algorithm.personalized)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
