"""Methods for wrong labels that train one global model."""

from __future__ import annotations

from algorithms.fedcorr import FedCorr
from tests.support.cases.base import Case

NOISY_LABELS = {
    # in round 0 all clients train, one after the other
    "fedcorr": Case(
        FedCorr(iterations=1, clean_rounds=1, neighbours=3, confidence=0.4),
        uploads=lambda network: {*network.parameter_names, "dimension", "level"},
        averages=False,
        relabels=False,
        steady=False,
        private=frozenset({"dimension", "labels", "losses"}),
    ),
}
