"""Methods for data that change over rounds, on clients whose labels do so that they keep as many samples."""

from __future__ import annotations

from algorithms.flwf import FLwF
from rayfl.data.partitions.stages import LabelStages
from tests.support.cases.base import Case

_STAGES = LabelStages(count=2, rounds=2)

STAGED_MODELS = {
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
