"""Compares methods without backpropagation with federated averaging over adapters of a small language model.

    rayfl model make tiny-lm --out BASE
    OMP_NUM_THREADS=1 python scripts/bench/without_backpropagation.py BASE [--only METHOD,...]

Each run is the preset quickstart-lm with the settings of ``RUNS``. Prints a Markdown table: perplexity and share of
right tokens on the clients' test data, and what all clients have been sent, and have sent, up to then.
"""

from __future__ import annotations

import argparse
import tempfile

import rayfl
from rayfl.runs.rows import final_rows

ROUNDS = 100
SHOWN = (20, ROUNDS)
_SGD = "train.optimizer=sgd"
RUNS = {
    "fedavg": "",
    "fedzo": f"algorithm.distribution=gaussian algorithm.directions=10 {_SGD} train.lr=0.003",
    "fedkseed": f"{_SGD} train.lr=0.001",
    "fedkseed-pro": f"algorithm.sampling=amplitude {_SGD} train.lr=0.001",
    "decomfl": f"algorithm.local_steps=10 {_SGD} train.lr=0.002",
    "feedsign": f"{_SGD} train.lr=0.003",
}
"""What follows ``rayfl run quickstart-lm algorithm=NAME``."""
ALIKE = {
    "train.rounds": ROUNDS,
    "evaluation.every": SHOWN[0],
    "cluster.backend": "inline",
    "tracking.tensorboard": False,
}


def main(base: str, names: list[str]) -> None:
    """Runs the methods one after the other, and prints their rows."""
    print("| method | rounds | perplexity | tokens right | sent to clients | sent by clients |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in names:
        given = dict(setting.split("=", 1) for setting in RUNS[name].split())
        with tempfile.TemporaryDirectory() as folder:
            own = {"name": name, "storage_path": folder, "model.folder": base, "algorithm": name.removesuffix("-pro")}
            rounds = rayfl.run("quickstart-lm", **{**own, **given, **ALIKE}).rounds
        for after in SHOWN:
            (row,) = final_rows(rounds.filter(rounds["round"].to_numpy() <= after))
            sent = [f"{row[way] / 1e6:,.3f} MB" for way in ("bytes_down", "bytes_up")]
            scores = f"{row['perplexity']:.2f} | {100 * row['token_accuracy']:.0f} %"
            print(f"| {name} | {after} | {scores} | {' | '.join(sent)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE")
    parser.add_argument("--only", default=",".join(RUNS), help="names, separated by commas")
    chosen = parser.parse_args()
    main(chosen.base, chosen.only.split(","))
