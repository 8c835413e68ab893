"""A row that every table of personalized models gets: FedAvg whose final model each client fine-tunes for itself.

It is what personalized methods must beat, and few papers print it.
"""

from __future__ import annotations

from typing import Any

from rayfl.config.paper_presets import method_row, method_settings, paper_preset
from rayfl.reproduction.reference import ReferenceTable
from rayfl.results.personalized import FINETUNED_ROW

FINETUNED = "fedavg_finetuned"
"""The name of the row."""

_FEDAVG = "fedavg"
REMARK = (
    "no row of the paper: FedAvg, whose final model each client fine-tunes for as many epochs as a local update has"
)


def has_baseline(table: ReferenceTable, setting: str) -> bool:
    """Returns whether a table gets the row in a setting.

    It does where it prints numbers of personalized models, FedAvg among them, and no FedAvg that is fine-tuned.
    """
    if table.protocol is None or table.protocol.row != "personalized" or table.protocol.cohort != "all":
        return False
    if _FEDAVG not in table.settings.get(setting, {}):
        return False
    tuned = [method for method in paper_preset(setting).methods if method_row(setting, method) == FINETUNED_ROW]
    return not any(method_settings(setting, method)["algorithm"]["name"] == _FEDAVG for method in tuned)


def settings_of(setting: str, method: str) -> dict[str, Any]:
    """Returns what runs a row in a setting, the further one too; see ``rayfl.config.paper_presets.method_settings``."""
    if method != FINETUNED:
        return method_settings(setting, method)
    settings = method_settings(setting, _FEDAVG)
    epochs = paper_preset(setting).content["train"]["local_epochs"]
    return {**settings, "algorithm": {**settings.get("algorithm", {}), "name": _FEDAVG, "finetune_epochs": epochs}}


def row_of(setting: str, method: str) -> str | None:
    """The row of the results that counts; see ``rayfl.config.paper_presets.method_row``."""
    return FINETUNED_ROW if method == FINETUNED else method_row(setting, method)
