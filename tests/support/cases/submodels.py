"""Methods whose clients train a submodel of the shared model, or a mask of it."""

from __future__ import annotations

from algorithms.depthfl import DepthFL
from algorithms.fedmlb import FedMLB
from algorithms.fedpm import FedPM
from algorithms.fedrolex import FedRolex
from algorithms.fjord import FjORD
from algorithms.heterofl import HeteroFL
from algorithms.inclusivefl import InclusiveFL
from algorithms.scalefl import ScaleFL
from rayfl.models.base import Network
from tests.support.cases.base import Case
from tests.support.cases.expected import head


def half(network: Network) -> int:
    """Scalars of two layers with half of the hidden units, rounded up."""
    units = -(-network.head_shape[1] // 2)
    classes, inputs = network.head_shape[0], (network.num_parameters - head(network)) // network.head_shape[1]
    return units * (inputs + classes) + classes


SUBMODELS = {
    "depthfl": Case(DepthFL(), private=frozenset({"displacement"}), averages=False, one_layer=False, any_layers=False),
    "fedpm": Case(FedPM(reset_every=2), averages=False, steady=False),
    "inclusivefl": Case(InclusiveFL(), averages=False, one_layer=False, any_layers=False),
    "scalefl": Case(
        ScaleFL(widths=(1.0, 0.5, 0.25)),
        averages=False,
        relabels=False,
        distinct=True,
        one_layer=False,
        any_layers=False,
        steady=False,
    ),
    # clients have the whole model, which is cut for their losses
    "fedmlb": Case(FedMLB(temperature=2.0, finetune_epochs=1), one_layer=False, any_layers=False),
    "heterofl": Case(
        HeteroFL(widths=(1.0, 0.5, 0.25)),
        averages=False,
        relabels=False,
        distinct=True,
        one_layer=False,
        any_layers=False,
        steady=False,
    ),
    "heterofl-half": Case(
        HeteroFL(widths=(0.5,), scaler=False),
        down=half,
        up=half,
        averages=False,
        one_layer=False,
        any_layers=False,
    ),
    "heterofl-random": Case(
        HeteroFL(widths=(0.5, 0.25), units="random", width_choice="each_round", masked_loss=True),
        averages=False,
        distinct=True,
        one_layer=False,
        any_layers=False,
        steady=False,
    ),
    "fedrolex": Case(
        FedRolex(widths=(0.5,)),
        down=half,
        up=half,
        averages=False,
        one_layer=False,
        any_layers=False,
    ),
    "fjord": Case(
        FjORD(self_distillation=True, width_choice="drawn"),
        averages=False,
        distinct=True,
        one_layer=False,
        any_layers=False,
        steady=False,
    ),
}
