"""Runs Ditto under every attack with every aggregator, and prints the tables of the page on malicious clients.

    python scripts/docs/attacks.py               prints both tables; about a quarter of an hour of a core
    python scripts/docs/attacks.py --iid         with clients that have all classes
    python scripts/docs/attacks.py --backdoor    of backdoors, with their success; about three minutes of a core
    python scripts/docs/attacks.py --rounds 2    a short trial

Each run is ``rayfl run quickstart algorithm=ditto train.clients_per_round=all`` with 4 of 20 clients malicious; with
``--iid`` also ``partition={name: iid, num_clients: 20}``. One run gives the numbers of both models: Ditto's global one
is trained as FedAvg's.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import rayfl

ALIKE = {
    "algorithm": "ditto",
    "train.clients_per_round": "all",
    "evaluation.every": 30,
    "engine.mode": "vectorized",
    "storage.commit_every": 30,
    "tracking.tensorboard": False,
    "cluster.backend": "inline",
}
ATTACKS: dict[str, dict[str, Any]] = {
    "none": {},
    "labels=random": {"labels": "random"},
    "labels=flipped": {"labels": "flipped"},
    "sign_flip": {"message": "sign_flip"},
    "gaussian, 1": {"message": "gaussian", "strength": 1},
    "scaled, 10, labels=random": {"message": "scaled", "strength": 10, "labels": "random"},
    "alie": {"message": "alie"},
    "ipm, 2": {"message": "ipm", "strength": 2},
}
_BACKDOOR = {"target": 0, "poisoned": 0.5, "patch": 3}
BACKDOORS: dict[str, dict[str, Any]] = {
    "backdoor": {"backdoor": _BACKDOOR},
    "backdoor, scaled, 5": {"backdoor": _BACKDOOR, "message": "scaled", "strength": 5},
    "backdoor in 4 parts, scaled, 5": {"backdoor": {**_BACKDOOR, "parts": 4}, "message": "scaled", "strength": 5},
}
AGGREGATORS: dict[str, dict[str, Any]] = {
    "mean": {"name": "mean"},
    "median": {"name": "median"},
    "trimmed_mean": {"name": "trimmed_mean", "malicious": 4},
    "krum": {"name": "krum", "malicious": 4},
    "krum, kept=12": {"name": "krum", "malicious": 4, "kept": 12},
    "bulyan": {"name": "bulyan", "malicious": 4},
    "geometric_median": {"name": "geometric_median"},
    "norm_bounding": {"name": "norm_bounding"},
}


MODELS = {"global": "the global model", "personalized": "Ditto's personalized models"}


def measured(
    attack: dict[str, Any], aggregator: dict[str, Any], rounds: int, partition: dict[str, Any]
) -> dict[tuple[str, str], float]:
    """Returns by metric and model means over the honest clients, in percent: accuracy, with a backdoor its success.

    Args:
        attack: the section ``attack``, without who is malicious; empty: all clients are honest, and those that are
            malicious otherwise are scored, too.
        aggregator: the section ``aggregator``.
        rounds: how many.
        partition: the section ``partition``; empty: that of the preset.
    """
    malicious = {"share": 0.2, **attack} if attack else {}
    with tempfile.TemporaryDirectory() as folder:
        given = {"train.rounds": rounds, "attack": malicious, "aggregator": aggregator, "storage_path": folder}
        result = rayfl.run("quickstart", **ALIKE, **given, **({"partition": partition} if partition else {}))
    return {
        (metric, row["model"]): 100 * row[metric]
        for row in result.rounds.to_pylist()
        if (row["round"], row["split"], row["cohort"], row["phase"]) == (rounds, "test", "all", "received")
        for metric in ("top1", "asr")
        if metric in row
    }


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--iid", action="store_true")
    parser.add_argument("--backdoor", action="store_true")
    arguments = parser.parse_args()
    rounds, partition = arguments.rounds, {"name": "iid", "num_clients": 20} if arguments.iid else {}
    attacks = BACKDOORS if arguments.backdoor else ATTACKS
    found = {
        (attack, rule): measured(attacks[attack], AGGREGATORS[rule], rounds, partition)
        for attack in attacks
        for rule in AGGREGATORS
    }
    for metric, what in (("top1", "Accuracy"), ("asr", "Attack success"))[: 1 + arguments.backdoor]:
        for model, whose in MODELS.items():
            print(f"\n{what} of {whose}, %\n\n| attack | {' | '.join(AGGREGATORS)} |\n|---|{'--:|' * len(AGGREGATORS)}")
            for attack in attacks:
                numbers = [f"{found[attack, rule][metric, model]:.1f}" for rule in AGGREGATORS]
                print(f"| {attack} | {' | '.join(numbers)} |")


if __name__ == "__main__":
    main()
