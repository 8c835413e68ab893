"""Runs Ditto under every attack with every aggregator, and prints the tables of the page on malicious clients.

    python scripts/docs/attacks.py               prints both tables; about half an hour of a core
    python scripts/docs/attacks.py --iid         with clients that have all classes
    python scripts/docs/attacks.py --backdoor    of backdoors, with their success; about three minutes of a core
    python scripts/docs/attacks.py --rounds 2    a short trial
    python scripts/docs/attacks.py --attacks "min_max;min_sum" --rules "mean;dnc"    some rows and columns

Each run is ``rayfl run quickstart algorithm=ditto train.clients_per_round=all`` with 4 of 20 clients malicious; with
``--iid`` also ``partition={name: iid, num_clients: 20}``. One run gives the numbers of both models: Ditto's global one
is trained as FedAvg's, so that ``--method fedavg`` gives the same numbers of it in half the time.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import rayfl

ALIKE = {
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
    "min_max": {"message": "min_max"},
    "min_sum": {"message": "min_sum"},
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
    "centered_clipping": {"name": "centered_clipping"},
    "dnc": {"name": "dnc", "malicious": 4},
    "foolsgold": {"name": "foolsgold"},
    "flame": {"name": "flame"},
    "flame, changes": {"name": "flame", "compare": "changes"},
    "bucketing, median": {"name": "bucketing", "then": "median"},
    "bucketing, krum": {"name": "bucketing", "then": {"name": "krum", "malicious": 3}},
    "nnm, median": {"name": "nnm", "malicious": 4, "then": "median"},
    "nnm, trimmed_mean": {"name": "nnm", "malicious": 4, "then": {"name": "trimmed_mean", "malicious": 4}},
    "flanders, mean": {"name": "flanders", "kept": 16},
    "flanders, krum": {"name": "flanders", "kept": 16, "then": {"name": "krum", "malicious": 4}},
    "flanders, changes": {"name": "flanders", "kept": 16, "series": "changes"},
    "nnm, krum": {"name": "nnm", "malicious": 4, "then": {"name": "krum", "malicious": 4}},
}


MODELS = {"global": "the global model", "personalized": "Ditto's personalized models"}


def measured(
    attack: dict[str, Any], aggregator: dict[str, Any], rounds: int, partition: dict[str, Any], method: str
) -> dict[tuple[str, str], float]:
    """Returns by metric and model means over the honest clients, in percent: accuracy, with a backdoor its success.

    Args:
        attack: the section ``attack``, without who is malicious; empty: all clients are honest, and those that are
            malicious otherwise are scored, too.
        aggregator: the section ``aggregator``.
        rounds: how many.
        partition: the section ``partition``; empty: that of the preset.
        method: its name.
    """
    malicious = {"share": 0.2, **attack} if attack else {}
    with tempfile.TemporaryDirectory() as folder:
        given = {"train.rounds": rounds, "attack": malicious, "aggregator": aggregator, "storage_path": folder}
        result = rayfl.run(
            "quickstart", **ALIKE, **given, algorithm=method, **({"partition": partition} if partition else {})
        )
    return {
        (metric, row["model"]): 100 * row[metric]
        for row in result.rounds.to_pylist()
        if (row["round"], row["split"], row["cohort"], row["phase"]) == (rounds, "test", "all", "received")
        for metric in ("top1", "asr")
        if metric in row
    }


def _chosen(known: dict[str, dict[str, Any]], names: str | None) -> dict[str, dict[str, Any]]:
    return known if names is None else {name: known[name] for name in names.split(";")}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--iid", action="store_true")
    parser.add_argument("--method", default="ditto", choices=["ditto", "fedavg"], help="fedavg: no personalized model")
    parser.add_argument("--backdoor", action="store_true")
    parser.add_argument("--attacks", help="names of rows, separated by a semicolon; all if left out")
    parser.add_argument("--rules", help="names of columns, separated by a semicolon; all if left out")
    arguments = parser.parse_args()
    rounds, partition = arguments.rounds, {"name": "iid", "num_clients": 20} if arguments.iid else {}
    attacks = _chosen(BACKDOORS if arguments.backdoor else ATTACKS, arguments.attacks)
    rules = _chosen(AGGREGATORS, arguments.rules)
    found = {
        (attack, rule): measured(attacks[attack], rules[rule], rounds, partition, arguments.method)
        for attack in attacks
        for rule in rules
    }
    for metric, what in (("top1", "Accuracy"), ("asr", "Attack success"))[: 1 + arguments.backdoor]:
        for model, whose in list(MODELS.items())[: 1 + (arguments.method == "ditto")]:
            print(f"\n{what} of {whose}, %\n\n| attack | {' | '.join(rules)} |\n|---|{'--:|' * len(rules)}")
            for attack in attacks:
                numbers = [f"{found[attack, rule][metric, model]:.1f}" for rule in rules]
                print(f"| {attack} | {' | '.join(numbers)} |")


if __name__ == "__main__":
    main()
