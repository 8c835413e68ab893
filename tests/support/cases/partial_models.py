"""Methods in which a part of the model, or a module next to it, stays with its client."""

from __future__ import annotations

from algorithms.fedas import FedAS
from algorithms.fedaws import FedAwS
from algorithms.fedbabu import FedBABU
from algorithms.fedcac import FedCAC
from algorithms.fedcp import FedCP
from algorithms.fedcr import FedCR
from algorithms.feddbe import FedDBE
from algorithms.fedetf import FedETF
from algorithms.fedgc import FedGC
from algorithms.fedgh import FedGH
from algorithms.fedloge import FedLoGe
from algorithms.fednh import FedNH
from algorithms.fedpac import FedPAC
from algorithms.fedper import FedPer
from algorithms.fedpub import FedPub
from algorithms.fedrap import FedRAP
from algorithms.fedrecon import FedRecon
from algorithms.fedrep import FedRep
from algorithms.fedrod import FedRoD
from algorithms.fedselect import FedSelect
from algorithms.fedthe import FedTHE
from algorithms.flute import FLUTE
from algorithms.gpfedrec import GPFedRec
from algorithms.gpfl import GPFL
from algorithms.lg_fedavg import LGFedAvg
from algorithms.lotteryfl import LotteryFL
from algorithms.pfedfda import PFedFDA
from algorithms.pfedgp import PFedGP
from algorithms.pfedhn import PFedHN
from algorithms.pfedpara import PFedPara
from algorithms.pfedvem import PFedVEM
from algorithms.pfl_da import PFLDA
from algorithms.subfedavg import SubFedAvg
from tests.support.cases.base import Case
from tests.support.cases.expected import (
    body,
    body_names,
    classes,
    described,
    described_names,
    encoded,
    features,
    framed,
    framed_names,
    gaussian,
    head,
    head_names,
    names_and_statistics,
    policed,
    policed_names,
    prototyped,
    prototypes,
    valved,
    valved_names,
    whole,
)

PARTIAL_MODELS = {
    "fedper": Case(FedPer(), down=body, up=body, uploads=body_names, private=frozenset({"personal"}), averages=False),
    # networks of the tests have no factors, so that a client keeps nothing; with factors: test_pfedpara.py
    "pfedpara": Case(PFedPara(), averages=False),
    "lg-fedavg": Case(
        LGFedAvg(), down=head, up=head, uploads=head_names, private=frozenset({"personal"}), averages=False
    ),
    "pfl-da": Case(
        PFLDA(), down=head, up=head, uploads=head_names, private=frozenset({"personal", "head"}), averages=False
    ),
    "fedrep": Case(
        FedRep(head_epochs=2, finetune_epochs=1),
        down=body,
        up=body,
        uploads=body_names,
        private=frozenset({"personal"}),
        averages=False,
    ),
    "fedrecon": Case(
        FedRecon(reconstruction_epochs=3, server_momentum=0.5), down=body, up=body, uploads=body_names, averages=False
    ),
    "fedbabu": Case(FedBABU(finetune_epochs=2), down=body, up=body, uploads=body_names, averages=False),
    "fedetf": Case(
        FedETF(projection_dim=7, alternations=2, alternation_epochs=1),
        down=lambda network: framed(network, 7) + 7 * classes(network),
        up=lambda network: framed(network, 7),
        uploads=framed_names,
        averages=False,
        one_layer=False,
    ),
    "fedaws": Case(
        FedAwS(spread_margin=1.5),
        down=lambda network: body(network) + features(network) * classes(network),
        up=lambda network: body(network) + (features(network) + 1) * classes(network),
        uploads=lambda network: {*network.body_names, "sums", "weights"},
        averages=False,
        one_layer=False,
    ),
    "fednh": Case(
        FedNH(smoothing=0.5, finetune_epochs=1),
        down=prototyped,
        up=prototyped,
        uploads=lambda network: {*body_names(network), "scale", "sums"},
        averages=False,
        one_layer=False,
    ),
    "fedgh": Case(
        FedGH(),
        down=head,
        up=lambda network: prototypes(network) + classes(network),
        uploads=lambda network: ("means", "exist"),
        private=frozenset({"personal"}),
        averages=False,
        relabels=False,
    ),
    "pfedfda": Case(
        PFedFDA(),
        down=gaussian,
        up=gaussian,
        uploads=lambda network: {*body_names(network), "means", "covariance"},
        averages=False,
        one_layer=False,
    ),
    "pfedgp": Case(
        PFedGP(chains=2, gibbs_steps=1, evaluation_chains=2),
        down=body,
        up=body,
        uploads=body_names,
        averages=False,
        one_layer=False,
    ),
    "fedgc": Case(
        FedGC(),
        down=lambda network: body(network) + prototypes(network),
        up=lambda network: body(network) + prototypes(network) + classes(network),
        uploads=lambda network: {*body_names(network), "weight", "exist"},
        private=frozenset({"personal"}),
        averages=False,
        relabels=False,
        one_layer=False,
    ),
    "fedpac": Case(
        FedPAC(head_lr=0.05),
        down=lambda network: network.num_parameters + prototypes(network) + classes(network),
        up=lambda network: network.num_parameters + 2 * prototypes(network) + classes(network) + 1,
        uploads=names_and_statistics,
        private=frozenset({"personal"}),
        averages=False,
    ),
    "pfedvem": Case(
        PFedVEM(head_epochs=2, weight_samples=2),
        up=lambda network: network.num_parameters + 1,
        uploads=lambda network: {*network.parameter_names, "confidence"},
        private=frozenset({"posterior"}),
        averages=False,
        one_layer=False,
    ),
    "flute": Case(
        FLUTE(head_epochs=1),
        down=lambda network: body(network) + prototypes(network),
        up=lambda network: body(network) + prototypes(network) + classes(network),
        uploads=lambda network: {*body_names(network), "weight", "seen"},
        private=frozenset({"personal"}),
        averages=False,
    ),
    "fedloge": Case(
        FedLoGe(classifier_steps=10),
        down=lambda network: network.num_parameters + prototypes(network),
        private=frozenset({"personal"}),
        averages=False,
        one_layer=False,
    ),
    "fedrod": Case(FedRoD(), private=frozenset({"personal"})),
    "gpfl": Case(
        GPFL(),
        down=valved,
        up=valved,
        uploads=valved_names,
        private=frozenset({"personal"}),
        averages=False,
    ),
    "gpfl-own": Case(
        GPFL(conditional_from="own"),
        down=valved,
        up=valved,
        uploads=valved_names,
        private=frozenset({"personal", "embedding"}),
        averages=False,
    ),
    "fedcp": Case(
        FedCP(),
        down=policed,
        up=policed,
        uploads=policed_names,
        private=frozenset({"personal"}),
        averages=False,
    ),
    "fedcp-noisy": Case(
        FedCP(policy_noise="always", alignment_weight=0.5),
        down=policed,
        up=policed,
        uploads=policed_names,
        private=frozenset({"personal"}),
        averages=False,
    ),
    "fedcr": Case(
        FedCR(information_weight=0.01, train_samples=2),
        down=lambda network: encoded(network) + 2 * prototypes(network),
        up=lambda network: encoded(network) + 2 * prototypes(network),
        uploads=lambda network: {*network.body_names, "matrix", "offset", "means", "precisions"},
        private=frozenset({"personal"}),
        averages=False,
        one_layer=False,
    ),
    "fedas": Case(
        FedAS(), down=body, up=body, uploads=body_names, private=frozenset({"personal", "body"}), averages=False
    ),
    "fedcac": Case(FedCAC(), averages=False, relabels=False),
    "fedthe": Case(
        FedTHE(),
        down=described,
        up=described,
        uploads=described_names,
        private=frozenset({"head", "features"}),
    ),
    "fedselect": Case(FedSelect(), averages=False, steady=False, private=frozenset({"model", "trained", "mask"})),
    "fedselect-own": Case(
        FedSelect(rate=0.5, limit=0.6, biases=True, first_value="own", turns="once"),
        averages=False,
        steady=False,
        private=frozenset({"model", "trained", "mask"}),
    ),
    "lotteryfl": Case(
        LotteryFL(prune_share=0.4, target=0.6, accuracy_threshold=0.0, select_on="train"),
        averages=False,
        steady=False,
        private=frozenset({"mask"}),
    ),
    "subfedavg": Case(
        SubFedAvg(prune_share=0.4, target=0.6, accuracy_threshold=0.0, distance_threshold=None, select_on="train"),
        averages=False,
        steady=False,
        private=frozenset({"mask"}),
    ),
    "fedpub": Case(
        FedPub(),
        up=lambda network: network.num_parameters + features(network),
        uploads=lambda network: {*network.parameter_names, "embedding"},
        averages=False,
        relabels=False,
        private=frozenset({"model", "masks"}),
    ),
    "fedrap": Case(
        FedRAP(ramp=2.0),
        down=body,
        up=body,
        uploads=body_names,
        private=frozenset({"personal", "own"}),
        averages=False,
        one_layer=False,
    ),
    "gpfedrec": Case(
        # a client that has taken part is sent a mixture, too: more than in its first round
        GPFedRec(neighbours=1, hops=2),
        up=body,
        uploads=body_names,
        private=frozenset({"personal", "body"}),
        averages=False,
        relabels=False,
        steady=False,
        one_layer=False,
    ),
    "feddbe": Case(FedDBE(mean_weight=0), private=frozenset({"vector"})),
    "feddbe-pulled": Case(
        FedDBE(mean_weight=5, mean_momentum=0.4),
        down=lambda network: network.num_parameters + features(network),
        private=frozenset({"vector"}),
        averages=False,
        opening=(whole, features),
    ),
    "pfedhn-pc": Case(
        PFedHN(private_head=True, inner_steps=3, hidden=8, embedding_update="selected"),
        down=body,
        up=body,
        uploads=body_names,
        private=frozenset({"personal", "optimizer"}),
        averages=False,
        relabels=False,
        distinct=True,
        one_layer=False,
    ),
}
