"""Methods for wrong labels that train one global model."""

from __future__ import annotations

from algorithms.fedcorr import FedCorr
from algorithms.fedlsr import FedLSR
from algorithms.rofl import RoFL
from rayfl.models.base import Network
from tests.support.cases.base import Case
from tests.support.cases.expected import classes, prototypes


def with_centroids(network: Network) -> int:
    """Scalars of a model, of a centroid for each class, and of whether there is one."""
    return network.num_parameters + prototypes(network) + classes(network)


NOISY_LABELS = {
    # of vectors, which have one view: its own tests have images
    "fedlsr": Case(FedLSR(finetune_epochs=1)),
    # in round 0 all clients train, one after the other
    "fedcorr": Case(
        FedCorr(iterations=1, clean_rounds=1, neighbours=3, confidence=0.4),
        uploads=lambda network: {*network.parameter_names, "dimension", "level"},
        averages=False,
        everyone=True,
        distinct=True,
        relabels=False,
        steady=False,
        private=frozenset({"labels", "losses"}),
    ),
    # centroids, and which there are, go down and up
    "rofl": Case(
        RoFL(forget_rounds=2, pseudo_from=2, finetune_epochs=1),
        down=with_centroids,
        up=with_centroids,
        uploads=lambda network: {*network.parameter_names, "centroids", "exist"},
        averages=False,
    ),
}
