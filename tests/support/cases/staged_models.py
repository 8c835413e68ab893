"""Methods for data that change over rounds, on clients whose labels do so that they keep as many samples."""

from __future__ import annotations

from algorithms.federaser import FedEraser
from algorithms.fedewc import FedEWC
from algorithms.flwf import FLwF
from rayfl.data.partitions.drifting import LabelStages
from tests.support.cases.base import Case

_STAGES = LabelStages(count=9, rounds=1)
"""More than there are rounds: nothing is kept in the last one that a next one would need."""

STAGED_MODELS = {
    "federaser": Case(FedEraser(finetune_epochs=1), averages=False, relabels=False),
    "fedewc": Case(FedEWC(finetune_epochs=1), private=frozenset({"stage", "last", "held"}), stages=_STAGES),
    "flwf": Case(
        FLwF(finetune_epochs=1),
        private=frozenset({"past", "last", "earlier", "present", "stage"}),
        stages=_STAGES,
    ),
    "flwf-separate": Case(
        FLwF(teachers="server", outputs="separate"),
        private=frozenset({"earlier", "present", "stage"}),
        stages=_STAGES,
    ),
}
