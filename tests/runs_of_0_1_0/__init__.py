"""Two runs that rayfl 0.1.0 (commit c587443) made and that were stopped after two of four rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SUPERFED = "superfed-digits-ec864631"
OWN = "Remembering-digits-270e395b"
"""Of the method of one's own in ``remembering.py``."""

METHODS: dict[str, dict[str, Any]] = {
    SUPERFED: {"name": "superfed", "mode": "mm", "start": 0.25},
    OWN: {"name": "tests.runs_of_0_1_0.remembering:Remembering", "pull": 0.1},
}


def experiment(storage_path: Path, run: str) -> dict[str, Any]:
    """What was given to ``rayfl.run``, but for the place."""
    return {
        "storage_path": str(storage_path),
        "dataset": "digits",
        "partition": {"name": "classes", "num_clients": 4, "classes_per_client": 3},
        "holdout": {"test": 0.3, "validation": 0.2},
        "model": {"name": "two_nn", "hidden": [8]},
        "algorithm": METHODS[run],
        "train": {
            "rounds": 4,
            "clients_per_round": 3,
            "local_epochs": 1,
            "batch_size": 32,
            "lr": 0.1,
            "momentum": 0.5,
        },
        "evaluation": {"every": 2},
        "cluster": {"backend": "inline"},
        "tracking": {"tensorboard": False},
    }
