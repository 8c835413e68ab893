"""Methods for data that change over rounds, on clients whose labels do so that they keep as many samples."""

from __future__ import annotations

from algorithms.federaser import FedEraser
from algorithms.fedewc import FedEWC
from algorithms.fedweit import FedWeIT
from algorithms.flwf import FLwF
from algorithms.target import TARGET
from rayfl.data.partitions.drifting import LabelStages
from tests.support.cases.base import Case
from tests.support.cases.expected import classes

_STAGES = LabelStages(count=9, rounds=1)
"""More than there are rounds: nothing is kept in the last one that a next one would need."""

STAGED_MODELS = {
    "federaser": Case(FedEraser(finetune_epochs=1), averages=False, relabels=False),
    "fedewc": Case(FedEWC(finetune_epochs=1), private=frozenset({"stage", "last", "held"}), stages=_STAGES),
    "fedweit": Case(
        FedWeIT(sparsity_weight=0.01),
        uploads=lambda network: {name for name in network.body_names if name.endswith("weight")},
        private=frozenset({"shared", "own", "past", "others", "stage", "seen"}),
        averages=False,
        relabels=False,
        stages=_STAGES,
        steady=False,
        one_layer=False,
    ),
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
    "target": Case(
        TARGET(
            draws=3,
            made_per_draw=4,
            generator_steps=2,
            first_draws=0,
            student_steps=2,
            noise_dim=3,
            generator_width=2,
            distillation_weight=1,
            finetune_epochs=1,
        ),
        up=lambda network: network.num_parameters + classes(network),
        uploads=lambda network: {*network.parameter_names, "classes", "low", "high"},
        stages=_STAGES,
        steady=False,
    ),
}
