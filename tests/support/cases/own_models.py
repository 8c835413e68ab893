"""Methods in which a client has a whole model of its own, or a way to make one of the global model."""

from __future__ import annotations

from algorithms.apfl import APFL
from algorithms.dfedavgm import DFedAvgM
from algorithms.dfedsam import DFedSAM
from algorithms.dispfl import DisPFL
from algorithms.ditto import Ditto
from algorithms.fedah import FedAH
from algorithms.fedala import FedALA
from algorithms.fedapen import FedAPEN
from algorithms.fedem import FedEM
from algorithms.fedhkd import FedHKD
from algorithms.fedkd import FedKD
from algorithms.fedme import FedMe
from algorithms.fedmrl import FedMRL
from algorithms.fedmtl import FedMTL
from algorithms.fedphp import FedPHP
from algorithms.fedsoft import FedSoft
from algorithms.flda import FLDA
from algorithms.floco import Floco
from algorithms.floco_plus import FlocoPlus
from algorithms.fml import FML
from algorithms.knn_per import KnnPer
from algorithms.l2gd import L2GD
from algorithms.mapper import Mapper
from algorithms.per_fedavg import PerFedAvg
from algorithms.perada import PerAda
from algorithms.pfedbayes import PFedBayes
from algorithms.pfedme import PFedMe
from algorithms.sgp import SGP
from algorithms.superfed import SuPerFed
from tests.support.cases.base import Case
from tests.support.cases.expected import (
    all_names_and_choice,
    classes,
    no_names,
    prototypes,
    triangle,
    triangle_names,
    twice,
)

OWN_MODELS = {
    "fedmtl": Case(FedMTL(), private=frozenset({"personal"}), averages=False, relabels=False, numbers=(1, 0)),
    "fedmtl-learned": Case(
        FedMTL(relationship="learned", damping=0.2),
        private=frozenset({"personal"}),
        averages=False,
        relabels=False,
        numbers=(1, 0),
    ),
    "ditto": Case(Ditto(proximal_weight=0.5, personal_epochs=1), private=frozenset({"personal"})),
    "perada": Case(
        PerAda(distill_steps=5, server_optimizer="sgd", server_lr=0.05, proximal_weight=0.5),
        averages=False,
        public=True,
        private=frozenset({"personal"}),
    ),
    "dfedavgm": Case(DFedAvgM(), private=frozenset({"model"}), averages=False, relabels=False, steady=False),
    "dfedavgm-started": Case(
        DFedAvgM(topology="ring", mixes="started"),
        private=frozenset({"model"}),
        averages=False,
        relabels=False,
        steady=False,
    ),
    "dfedsam": Case(
        DFedSAM(radius=0.2, topology="exponential"),
        private=frozenset({"model"}),
        averages=False,
        relabels=False,
        steady=False,
    ),
    "sgp": Case(SGP(), private=frozenset({"push"}), averages=False, relabels=False, steady=False),
    "sgp-random": Case(
        SGP(links="random", receivers=2),
        distinct=True,
        private=frozenset({"push"}),
        averages=False,
        relabels=False,
        steady=False,
    ),
    "dispfl": Case(
        DisPFL(neighbours=1, density=0.8),
        uploads=no_names,
        private=frozenset({"model", "trained", "mask"}),
        averages=False,
        relabels=False,
        steady=False,
    ),
    "superfed-mm": Case(SuPerFed(mode="mm", start=0.25), private=frozenset({"local"})),
    "superfed-lm": Case(SuPerFed(mode="lm", start=0.25), private=frozenset({"local"})),
    "floco": Case(
        Floco(simplex_dimension=2, assignment_round=99),
        down=triangle,
        up=triangle,
        uploads=triangle_names,
        averages=False,
    ),
    "floco-plus": Case(
        FlocoPlus(simplex_dimension=2, assignment_round=99, unseen="init"),
        down=triangle,
        up=triangle,
        uploads=triangle_names,
        private=frozenset({"personal"}),
        averages=False,
    ),
    "floco-plus-posthoc": Case(
        FlocoPlus(simplex_dimension=2, assignment_round=99, posthoc=True),
        down=triangle,
        up=triangle,
        uploads=triangle_names,
        averages=False,
    ),
    "fedphp": Case(FedPHP(transfer_weight=0.1), private=frozenset({"hpm", "selections"})),
    "fedapen": Case(
        FedAPEN(weight_lr=0.1, weight_epochs=2, tuning_data="train"), private=frozenset({"private", "share"})
    ),
    "fedhkd": Case(
        FedHKD(prediction_weight=0.5, feature_weight=0.3),
        down=lambda network: network.num_parameters + prototypes(network) + classes(network) * (classes(network) + 1),
        up=lambda network: network.num_parameters + prototypes(network) + classes(network) * (classes(network) + 1),
        uploads=lambda network: {*network.parameter_names, "features", "predictions", "counts"},
        private=frozenset({"personal"}),
    ),
    "fml": Case(FML(), private=frozenset({"private"})),
    "fml-persistent": Case(FML(persist_private_optimizer=True), private=frozenset({"private", "optimizer"})),
    "flda": Case(FLDA(), private=frozenset({"private", "gate"})),
    "flda-raw-logits": Case(FLDA(gate_input="raw", mix="logits"), private=frozenset({"private", "gate"})),
    "apfl": Case(APFL(), private=frozenset({"local"})),
    "apfl-adaptive": Case(APFL(adaptive=True, alpha=0.5, mix="logits"), private=frozenset({"local", "alpha"})),
    "pfedme": Case(
        PFedMe(proximal_weight=2.0, inner_steps=3, personal_lr=0.05),
        private=frozenset({"personal"}),
        train={"momentum": 0.0, "weight_decay": 0.0},
    ),
    "pfedbayes-together": Case(
        PFedBayes(kl_weight=0.01, order="together", weight_samples=2),
        down=twice,
        up=twice,
        private=frozenset({"posterior"}),
        train={"weight_decay": 0.0},
    ),
    "pfedbayes": Case(
        PFedBayes(kl_weight=0.01),
        down=twice,
        up=twice,
        private=frozenset({"posterior"}),
        train={"momentum": 0.0, "weight_decay": 0.0},
    ),
    "mapper": Case(Mapper(grid=(0.25, 0.75)), private=frozenset({"local", "coefficient"})),
    "mapper-outputs": Case(
        Mapper(grid=(0.0, 0.5), space="outputs", unseen="global"), private=frozenset({"local", "coefficient"})
    ),
    "l2gd": Case(
        # its coins are: local, aggregation, aggregation, local
        L2GD(penalty_weight=5.0),
        private=frozenset({"personal"}),
        averages=False,
        everyone=True,
        quiet=frozenset({0, 2, 3}),
        train={"momentum": 0.0, "weight_decay": 0.0},
    ),
    "fedme": Case(
        FedMe(cluster_rounds=(1, 2), tuning_data="train", finetune_epochs=1),
        down=twice,
        up=twice,
        uploads=all_names_and_choice,
        averages=False,
        everyone=True,
        relabels=False,
        public=True,
        numbers=(2, 1),
    ),
    # with all of the energy nothing is shorter as factors
    "fedkd": Case(FedKD(energy_start=1, energy_end=1), private=frozenset({"mentor", "projection"}), averages=False),
    "fedkd-whole": Case(FedKD(compress="none", mutual="separate"), private=frozenset({"mentor", "projection"})),
    "fedmrl": Case(FedMRL(), private=frozenset({"own", "projection"}), averages=False),
    "per-fedavg-fo": Case(PerFedAvg(alpha=0.1)),
    "per-fedavg-hf": Case(PerFedAvg(version="hf", alpha=0.1, adapt_batch="batch")),
    "per-fedavg-exact": Case(PerFedAvg(version="exact", alpha=0.1)),
    "knn-per": Case(KnnPer(neighbours=3)),
    "fedah": Case(FedAH(head_epochs=None), one_layer=False, private=frozenset({"head", "weights"})),
    "fedala": Case(FedALA(start_threshold=None, start_passes=2), private=frozenset({"upper", "weights"})),
    "fedsoft": Case(
        FedSoft(clusters=2, proximal_weight=0.5),
        down=twice,
        uploads=lambda network: {*network.parameter_names, "shares"},
        private=frozenset({"model", "shares"}),
        averages=False,
        numbers=(0, 2),
    ),
    "fedem": Case(FedEM(components=2), down=twice, up=twice, private=frozenset({"mixture"}), averages=False),
}
