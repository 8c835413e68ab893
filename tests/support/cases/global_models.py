"""Methods that train one global model, from federated averaging to other steps of the server and of clients."""

from __future__ import annotations

from algorithms.adaptive_fedavg import AdaptiveFedAvg
from algorithms.ca2fl import CA2FL
from algorithms.drfa import DRFA
from algorithms.elastic import Elastic
from algorithms.fairfed import FairFed
from algorithms.fedacg import FedACG
from algorithms.fedasync import FedAsync
from algorithms.fedavg import FedAvg
from algorithms.fedawa import FedAWA
from algorithms.fedbn import FedBN
from algorithms.fedbuff import FedBuff
from algorithms.fedcm import FedCM
from algorithms.fedcurv import FedCurv
from algorithms.feddecorr import FedDecorr
from algorithms.feddisco import FedDisco
from algorithms.fedexp import FedExP
from algorithms.fedfb import FedFB
from algorithms.fedgkd import FedGKD
from algorithms.fedinit import FedInit
from algorithms.fedlaw import FedLAW
from algorithms.fedlc import FedLC
from algorithms.fedlesam import FedLESAM
from algorithms.fednar import FedNAR
from algorithms.fednova import FedNova
from algorithms.fedntd import FedNTD
from algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from algorithms.fedprox import FedProx
from algorithms.fedrcl import FedRCL
from algorithms.fedrs import FedRS
from algorithms.fedsam import FedSAM
from algorithms.fedsol import FedSOL
from algorithms.feduv import FedUV
from algorithms.flash import Flash
from algorithms.kafe import Kafe
from algorithms.mime import Mime, MimeLite
from algorithms.qfedavg import QFedAvg
from algorithms.scaffnew import Scaffnew
from algorithms.tamuna import Tamuna
from algorithms.term import TERM
from algorithms.turbosvm import TurboSVM
from tests.support.cases.base import Case
from tests.support.cases.expected import (
    twice,
    whole,
)

GLOBAL_MODELS = {
    "fedavg": Case(FedAvg(finetune_epochs=1)),
    "fedprox": Case(FedProx(proximal_weight=0.1, finetune_epochs=1)),
    "fedbn": Case(FedBN(finetune_epochs=1), averages=False, train={"private_norm": "all"}),
    "fedavgm": Case(FedAvgM(server_momentum=0.5), averages=False),
    "fedadagrad": Case(FedAdagrad(), averages=False),
    "fedyogi": Case(FedYogi(bias_correction=True), averages=False),
    "fedadam": Case(FedAdam(), averages=False),
    "flash": Case(Flash(finetune_epochs=1), averages=False),
    "fedexp": Case(
        FedExP(finetune_epochs=1),
        up=lambda network: network.num_parameters + 1,
        uploads=lambda network: {*network.parameter_names, "square"},
        averages=False,
    ),
    "adaptive_fedavg": Case(AdaptiveFedAvg(finetune_epochs=1), numbers=(1, 0)),
    "adaptive_fedavg-time": Case(AdaptiveFedAvg(decay="time"), numbers=(1, 0)),
    "elastic": Case(Elastic(mu=0.6, sample_share=0.5, finetune_epochs=1), up=twice, averages=False),
    "elastic-model": Case(Elastic(sample_share=1.0, most_of="model"), up=twice, averages=False),
    "fednova": Case(FedNova(), averages=False, numbers=(1, 0)),
    "qfedavg": Case(
        QFedAvg(fairness=2.0, finetune_epochs=1),
        uploads=lambda network: {*network.parameter_names, "step"},
        averages=False,
        numbers=(2, 1),
    ),
    "term": Case(TERM(tilt=2.0, finetune_epochs=1), averages=False, numbers=(1, 0)),
    "term-estimated": Case(TERM(tilt=-3.0, estimate_share=0.5, sample_tilt=1.5), averages=False, numbers=(1, 0)),
    "drfa": Case(
        DRFA(trained="cohort", weight_lr=0.001, finetune_epochs=1),
        down=twice,
        up=twice,
        uploads=lambda network: {*network.parameter_names, "loss"},
        averages=False,
        relabels=False,
        numbers=(2, 1),
    ),
    "fairfed": Case(
        FairFed(beta=0.01, finetune_epochs=1),
        up=lambda network: network.num_parameters + 8,
        uploads=lambda network: {*network.parameter_names, "counts"},
        down=twice,
        averages=False,
        relabels=False,
        numbers=(1, 0),
    ),
    "fairfed-weights": Case(FairFed(beta=0.0, reweighing=False), averages=False, numbers=(1, 0)),
    "fedfb": Case(
        FedFB(criterion="equalized_odds", finetune_epochs=1),
        down=twice,
        up=lambda network: network.num_parameters + 8,
        uploads=lambda network: {*network.parameter_names, "losses", "counts"},
        averages=False,
        numbers=(4, 0),
    ),
    "fedfb-alike": Case(FedFB(alpha=0.0)),
    # in synchronous rounds, of which no update is late, it averages
    "fedasync": Case(FedAsync(proximal_weight=0.5, finetune_epochs=1), averages=False),
    "fedbuff": Case(FedBuff(finetune_epochs=1)),
    "ca2fl": Case(
        CA2FL(finetune_epochs=1),
        private=frozenset({"change"}),
        averages=False,
    ),
    "fedntd": Case(FedNTD(temperature=2.0, finetune_epochs=1)),
    # the teacher goes down beside the model as soon as the server has had two
    "fedgkd": Case(FedGKD(models=2, distillation_weight=1.0, finetune_epochs=1), steady=False),
    "fedlc": Case(FedLC(finetune_epochs=1)),
    "fedrs": Case(FedRS(finetune_epochs=1)),
    "fedrs-counts": Case(FedRS(alpha=0.1, scaling="counts")),
    "feddecorr": Case(FedDecorr(decorrelation_weight=1.0, finetune_epochs=1)),
    "feduv": Case(FedUV(finetune_epochs=1)),
    "fednar": Case(FedNAR(weight_decay=0.2, annealing=0.8, max_norm=1.0, finetune_epochs=1)),
    "fedrcl": Case(FedRCL(finetune_epochs=1)),
    "fedrcl-several": Case(FedRCL(positives=2, threshold=0.3, temperature=0.5)),
    "fedsol": Case(FedSOL(radius=0.5, finetune_epochs=1)),
    "fedsol-fixed": Case(FedSOL(radius=0.2, adaptive=False)),
    # sums of the last round go down beside the model as soon as there are some
    "fedcurv": Case(
        FedCurv(finetune_epochs=1),
        uploads=lambda network: network.parameter_names,
        private=frozenset({"curvature"}),
        averages=False,
        steady=False,
    ),
    # a client says its discrepancy when it first takes part
    "feddisco": Case(
        FedDisco(discrepancy_weight=0.3, offset=0.3, finetune_epochs=1),
        uploads=lambda network: {*network.parameter_names, "discrepancy"},
        averages=False,
        relabels=False,
        steady=False,
    ),
    "fedawa": Case(FedAWA(server_steps=2, server_lr=0.2, finetune_epochs=1), averages=False, relabels=False),
    "fedlaw": Case(FedLAW(server_epochs=2, finetune_epochs=1), averages=False, public=True),
    "kafe": Case(Kafe(bandwidth=0.1, finetune_epochs=1), averages=False, relabels=False),
    "turbosvm": Case(TurboSVM(finetune_epochs=1), averages=False, relabels=False),
    "fedsam": Case(FedSAM(radius=0.2, adaptive=True, finetune_epochs=1)),
    "fedlesam": Case(FedLESAM(radius=0.2, finetune_epochs=1), private=frozenset({"previous"})),
    "fedlesam-server": Case(FedLESAM(radius=0.2, previous="server"), down=twice),
    "fedacg": Case(FedACG(server_momentum=0.6, proximal_weight=0.1, finetune_epochs=1), averages=False),
    "fedinit": Case(
        FedInit(beta=0.2, aggregation="samples", finetune_epochs=1), private=frozenset({"last"}), averages=False
    ),
    "fedinit-model": Case(FedInit(message="model"), private=frozenset({"last"})),
    "fedcm": Case(FedCM(alpha=0.4, finetune_epochs=1), down=twice, train={"momentum": 0.0}),
    "mime": Case(
        Mime(momentum=0.5, finetune_epochs=1),
        down=lambda network: 3 * whole(network),
        up=twice,
        averages=False,
        train={"momentum": 0.0},
    ),
    "mime-adam": Case(
        Mime(base="adam", momentum=0.5, adaptivity=0.1),
        down=lambda network: 4 * whole(network),
        up=twice,
        averages=False,
        train={"momentum": 0.0},
    ),
    "mimelite": Case(
        MimeLite(momentum=0.5, finetune_epochs=1), down=twice, up=twice, averages=False, train={"momentum": 0.0}
    ),
    "scaffnew": Case(
        Scaffnew(communication_probability=0.4, aggregation="samples", finetune_epochs=1),
        private=frozenset({"control", "trained", "factor"}),
        averages=False,
        everyone=True,
        train={"momentum": 0.0},
    ),
    "tamuna": Case(
        Tamuna(communication_probability=0.4, finetune_epochs=1),
        private=frozenset({"control"}),
        averages=False,
        relabels=False,
        train={"momentum": 0.0},
        distinct=True,
        steady=False,
    ),
}
