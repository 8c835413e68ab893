"""An experiment over adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.bases import (
    base,
)

ADAPTERS = {"r": 2, "alpha": 4}


def experiment(folder: Path, name: str, method: Any, **sections: Any) -> dict[str, Any]:
    """Five clients of scikit-learn's digits, two rounds of three, in this process."""
    return {
        "name": name,
        "storage_path": str(folder),
        "dataset": {"name": "digits"},
        "partition": {"name": "classes", "num_clients": 5, "classes_per_client": 2},
        "model": {"name": "pretrained", "folder": str(base("vit")), "adapter": ADAPTERS, **sections.pop("model", {})},
        "algorithm": method,
        "train": {
            "rounds": 2, "clients_per_round": 3, "local_epochs": 1, "batch_size": 64, "lr": 0.01, "optimizer": "adamw",
            **sections.pop("train", {}),
        },
        "evaluation": {"every": 2},
        "tracking": {"tensorboard": False},
        "cluster": {"backend": "inline"},
        **sections,
    }  # fmt: skip
