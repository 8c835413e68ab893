"""Global and personalized accuracy of methods on one preset, as a Markdown table.

    python scripts/bench/compare_methods.py PRESET [--methods NAME,NAME,...] [--jobs N] [OVERRIDE ...]

Does ``rayfl run PRESET algorithm=NAME OVERRIDE ...`` once per method (all methods if none are named), with what a
method cannot do without (``NEEDS``); finished runs are only read again. A star marks a choice that has seen test data,
where there is no validation split. ``--jobs 2`` runs two at a time, which goes
well with ``cluster.backend=inline``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from algorithms.registry import METHODS, Experiment
from rayfl.config.loading import load_config
from rayfl.experiment.parts import Parts
from rayfl.experiment.result import Result
from rayfl.runs.rows import final_rows
from rayfl.storage.tables import from_parquet

_PLAIN_SGD = ["train.momentum=0", "train.weight_decay=0"]
_EVERYBODY = ["train.clients_per_round=all"]
NEEDS = {
    "scaffold": ["train.momentum=0"],
    "tamuna": ["train.momentum=0"],
    "pfedme": _PLAIN_SGD,
    **dict.fromkeys(("fedkseed", "decomfl", "feedsign"), _PLAIN_SGD),
    "l2gd": [*_PLAIN_SGD, *_EVERYBODY],
    "fedme": [*_EVERYBODY, "holdout.public=1000"],
    "feddf": ["holdout.public=1000"],
    "perada": ["holdout.public=1000"],
    "fedlaw": ["holdout.public=1000"],
    "fedmd": ["holdout.public=1000"],
    "fedasync": ["system=sampled", "system.mode=buffered"],
    "fixmatch": ["labelled.share=0.1"],
    "semifl": ["labelled.at=server", "holdout.public=1000"],
    "ca2fl": ["system=sampled", "system.mode=buffered"],
    "fedbuff": ["system=sampled", "system.mode=buffered"],
}
"""Settings without which a method does not run: it has no momentum, all clients take part in every round, none waits
for another, or some samples have no labels."""


def main() -> None:
    """Runs what is missing, then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    parser.add_argument("--methods", default=",".join(sorted(METHODS)), help="names, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    chosen = parser.parse_intermixed_args()
    settings = [_settings(method, chosen.overrides) for method in chosen.methods.split(",")]
    print("| method | personalized model | global accuracy | personalized accuracy | worst 5 % | ECE |")
    print("|---|---|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for row in pool.map(lambda own: _run(chosen.preset, own), settings):
            print(row, flush=True)


def _settings(method: str, overrides: list[str]) -> list[str]:
    """The overrides of one method: those of its own (``floco:algorithm.radius=0.2``) only for it."""
    own = [text.partition(":")[2] for text in overrides if text.startswith(f"{method}:")]
    common = [text for text in overrides if text.partition("=")[0].count(":") == 0]
    return [f"algorithm={method}", *common, *NEEDS.get(method, []), *own]


def _run(preset: str, settings: list[str]) -> str:
    command = [sys.executable, "-m", "rayfl", "run", preset, *settings]
    # The message is on standard error; the other methods go on.
    if subprocess.run(command, stdout=sys.stderr).returncode:
        return f"| {settings[0].partition('=')[2]} | failed | - | - | - | - |"
    config = load_config(Experiment, preset, settings)
    storage = Parts(config).storage
    tables = {name: from_parquet(storage.read(f"{name}.parquet")) for name in ("rounds", "clients")}
    return _row(Result(storage.uri, config, tables["rounds"], tables["clients"], config.train.rounds))


def _row(result: Result) -> str:
    rows = final_rows(result.rounds)
    algorithm = result.config.algorithm
    overall = next((row for row in rows if row["model"] == "global"), None)
    own = _personalized(rows, algorithm)
    cells = [
        algorithm.name,
        (own["choice"] or own["model"]) + (" *" if own["selected_on"] == "test" else ""),
        f"{100 * overall['top1']:.2f} +- {100 * overall['top1_std']:.2f}" if overall else "-",
        f"{100 * own['top1']:.2f} +- {100 * own['top1_std']:.2f}",
        f"{100 * own['top1_worst5']:.2f}",
        f"{own['ece']:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def _personalized(rows: list[dict[str, Any]], algorithm: Any) -> dict[str, Any]:
    if algorithm.sweep is not None:
        return min(
            (row for row in rows if row["selected_on"] in ("validation", "test")),
            key=lambda row: row["selected_on"] == "test",
        )
    return next(row for row in rows if row["model"] == algorithm.personalized)


if __name__ == "__main__":
    main()
