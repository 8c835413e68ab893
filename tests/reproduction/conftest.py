"""A paper that never was: one setting on scikit-learn's digits, three methods, and what it prints."""

from __future__ import annotations

from typing import Any

import pytest

from rayfl.config import paper_presets
from rayfl.config.paper_presets import expanded
from rayfl.reproduction import tables
from rayfl.reproduction.reference import ReferenceTable, parsed_reference

SETTINGS: dict[str, Any] = {
    "papers": {"tiny": {"short": "Tiny", "title": "Tiny", "authors": "Nobody"}},
    "bases": {},
    "families": [
        {
            "name": "tiny-table1-digits",
            "paper": "tiny",
            "table": "Table 1",
            "about": "digits",
            "own": "superfed_mm",
            "config": {
                "dataset": "digits",
                "partition": {"name": "pathological", "num_clients": 4},
                "holdout": {"test": 0.2, "validation": 0.0},
                "model": {"name": "two_nn", "hidden": [8]},
                "train": {"rounds": 4, "clients_per_round": 2, "local_epochs": 2, "batch_size": 20},
                "evaluation": {"every": 2, "cohort_every": 2, "splits": ["test"]},
            },
            "methods": {
                "fedavg": {},
                "fedavg_ft": {"algorithm": {"name": "fedavg", "finetune_epochs": 2}, "row": "finetuned"},
                "superfed_mm": {"algorithm": {"name": "superfed", "mode": "mm", "start": 0.0}},
            },
        }
    ],
}
REFERENCE: dict[str, Any] = {
    "protocols": {
        "own": {"row": "personalized", "selected_on": "test", "differs": "in nothing"},
        "late": {"row": "global", "rounds": [3, 4], "over": "pooled", "differs": "in the rounds"},
    },
    "tables": [
        {
            "name": "tiny-table1",
            "paper": "tiny",
            "table": "Table 1",
            "caption": "Accuracy.",
            "metric": "top1",
            "unit": "percent",
            "std_over": "clients",
            "protocol": "own",
            "settings": {
                "tiny-table1-digits": {
                    "fedavg": {"mean": 50.0, "std": 50.0},
                    "fedavg_ft": {"mean": 60.0, "std": 0.0},
                    "superfed_mm": {"mean": 70.0},
                }
            },
            "remarks": [{"status": "caution", "methods": ["fedavg"], "reason": "It oscillates."}],
        },
        {
            "name": "tiny-fig1",
            "paper": "tiny",
            "table": "Figure 1",
            "caption": "Global accuracy.",
            "metric": "top1",
            "unit": "share",
            "protocol": "late",
            "finding": "It rises.",
            "presets": ["tiny-table1-digits"],
        },
    ],
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> tuple[ReferenceTable, ...]:
    """Its tables, in place of the papers'."""
    presets, known = expanded(SETTINGS), parsed_reference(REFERENCE)
    for module in (paper_presets, tables):
        monkeypatch.setattr(module, "paper_presets", lambda: presets)
    monkeypatch.setattr(tables, "reference_tables", lambda: known)
    return known
