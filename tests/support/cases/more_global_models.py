"""Further methods that train one global model or one a cluster, and the baselines: local and centralized training."""

from __future__ import annotations

from algorithms.calfat import CalFAT
from algorithms.ccvr import CCVR
from algorithms.centralized import Centralized
from algorithms.cfl import CFL
from algorithms.creff import CReFF
from algorithms.dense import DENSE
from algorithms.fat import FAT
from algorithms.fedadmm import FedADMM
from algorithms.fedcross import FedCross
from algorithms.feddc import FedDC
from algorithms.feddf import FedDF
from algorithms.feddrift import FedDrift
from algorithms.feddyn import FedDyn
from algorithms.fedema import FedEMA
from algorithms.fedfed import FedFed
from algorithms.fedfusion import FedFusion
from algorithms.fedgen import FedGen
from algorithms.fedheal import FedHEAL
from algorithms.fediir import FedIIR
from algorithms.fedld import FedLD
from algorithms.fedmgda import FedMGDA
from algorithms.fedmmd import FedMMD
from algorithms.fednoro import FedNoRo
from algorithms.fedpft import FedPFT
from algorithms.fedsmoo import FedSMOO
from algorithms.fedspeed import FedSpeed
from algorithms.fedsr import FedSR
from algorithms.fedu import FedU
from algorithms.fedvarp import FedVARP
from algorithms.fesem import FeSEM
from algorithms.fixmatch import FixMatch
from algorithms.fltrust import FLTrust
from algorithms.fpl import FPL
from algorithms.gcfl import GCFL
from algorithms.gear import GEAR
from algorithms.hierfavg import HierFAVG
from algorithms.hypcluster import HypCluster
from algorithms.local import Local
from algorithms.moon import MOON
from algorithms.pacfl import PACFL
from algorithms.scaffold import Scaffold
from algorithms.semifl import SemiFL
from tests.support.cases.base import Case
from tests.support.cases.expected import (
    classes,
    convolved,
    convolved_names,
    features,
    gated,
    gated_names,
    head,
    no_names,
    nothing,
    prototypes,
    represented,
    represented_names,
    twice,
)

MORE_GLOBAL_MODELS = {
    "fat": Case(FAT(radius=0.1, step=0.05, steps=2, attacked_share=0.5, start="ball", finetune_epochs=1)),
    "gear": Case(GEAR(radius=0.1, step=0.05, steps=2, finetune_epochs=1)),
    "calfat": Case(CalFAT(radius=0.1, step=0.05, steps=2, start="ball", finetune_epochs=1)),
    "fedld": Case(FedLD(finetune_epochs=1), averages=False, relabels=False),
    "fedvarp": Case(FedVARP(finetune_epochs=1), averages=False, relabels=False),
    "fedvarp-clusters": Case(FedVARP(clusters=2, server_lr=0.7), averages=False, relabels=False),
    "fedema": Case(FedEMA(), averages=False, private=frozenset({"online", "divergence"})),
    "fedu": Case(FedU(threshold=0.02), averages=False, private=frozenset({"predictor", "divergence"})),
    "fedcross": Case(FedCross(alpha=0.8, finetune_epochs=1), relabels=False, train={"clients_per_round": "all"}),
    "fedcross-in-order": Case(
        FedCross(alpha=0.6, choice="in_order", partners=2, warmup_rounds=1),
        relabels=False,
        train={"clients_per_round": "all"},
    ),
    "fedpft": Case(
        FedPFT(components=2, precision="float32", server_epochs=2, server_lr=0.05),
        uploads=lambda network: {"labels", "counts", "components", "weights", "means", "covariances"},
        averages=False,
        one_layer=False,
        relabels=False,
        trains=False,
        steady=False,
    ),
    "ccvr": Case(
        CCVR(virtual_features=20, calibrate_every=3, finetune_epochs=1),
        uploads=lambda network: {*network.parameter_names, "counts", "sums", "products"},
        one_layer=False,
        steady=False,
    ),
    "ccvr-often": Case(
        CCVR(virtual_features=20, calibrate_every=1),
        uploads=lambda network: {*network.parameter_names, "counts", "sums", "products"},
        averages=False,
        one_layer=False,
        steady=False,
    ),
    "creff": Case(
        CReFF(features_per_class=4, match_steps=3, retrain_epochs=2, finetune_epochs=1),
        down=lambda network: network.num_parameters + head(network),
        up=lambda network: network.num_parameters + classes(network) * (head(network) + 1),
        uploads=lambda network: {*network.parameter_names, "exist"},
        one_layer=False,
    ),
    "scaffold": Case(Scaffold(momentum_on_corrected=True), down=twice, up=twice, private=frozenset({"control"})),
    "feddyn": Case(FedDyn(alpha=0.1), private=frozenset({"displacement"}), averages=False),
    "fedadmm": Case(FedADMM(rho=0.1), private=frozenset({"primal", "dual"}), averages=False),
    "fedadmm-own": Case(
        FedADMM(rho=0.1, server_lr=0.6, start="own"), private=frozenset({"primal", "dual"}), averages=False
    ),
    "feddc": Case(
        FedDC(alpha=0.1),
        down=twice,
        up=twice,
        private=frozenset({"drift", "update"}),
        averages=False,
        train={"momentum": 0.0},
    ),
    "fediir": Case(
        FedIIR(aggregation="samples", penalty_weight=0.2),
        down=lambda network: network.num_parameters + head(network),
        up=lambda network: network.num_parameters + head(network),
        averages=False,
    ),
    # what turns back stays with the client
    "fedheal": Case(
        FedHEAL(threshold=0.6, finetune_epochs=1),
        uploads=lambda network: {*network.parameter_names, "distance"},
        averages=False,
        relabels=False,
        steady=False,
        private=frozenset({"history"}),
    ),
    # in round 2 the losses of all clients travel
    "fednoro": Case(
        FedNoRo(warmup_rounds=2, ramp_rounds=1, mixtures=3, finetune_epochs=1),
        uploads=lambda network: {*network.parameter_names, "losses", "present"},
        averages=False,
        relabels=False,
        steady=False,
    ),
    # the server alone: its own tests have images, of which clients can be sure
    "semifl": Case(
        SemiFL(threshold=1.0, server_epochs=1),
        up=lambda network: 1,
        uploads=lambda network: {"none"},
        averages=False,
        public=True,
    ),
    # without unlabelled samples, which its own tests have
    "fixmatch": Case(FixMatch(proximal_weight=0.1, finetune_epochs=1)),
    "fpl": Case(
        # cluster prototypes go down, as many as there are
        FPL(temperature=0.5),
        uploads=lambda network: {*network.parameter_names, "means", "exist"},
        averages=False,
        steady=False,
    ),
    "fedsr": Case(
        FedSR(length_weight=0.1, information_weight=0.05),
        down=lambda network: represented(network) + 2 * prototypes(network) + 1,
        up=lambda network: represented(network) + 2 * prototypes(network) + 1,
        uploads=lambda network: {*represented_names(network), "mean", "spread", "factor"},
        averages=False,
    ),
    "fedsr-own": Case(
        FedSR(information_weight=0.05, reference="own", evaluation_samples=0),
        down=represented,
        up=represented,
        uploads=represented_names,
        private=frozenset({"reference"}),
        averages=False,
    ),
    "fedspeed": Case(FedSpeed(rho=0.3, alpha=0.6), private=frozenset({"correction"}), averages=False),
    "fedspeed-all": Case(
        FedSpeed(rho=0.3, normalized=False, correction_mean="all"), private=frozenset({"correction"}), averages=False
    ),
    "fedsmoo": Case(
        FedSMOO(radius=0.2), down=twice, up=twice, private=frozenset({"displacement", "dual"}), averages=False
    ),
    "fedsmoo-dual": Case(
        FedSMOO(radius=0.2, message="dual"),
        down=twice,
        up=twice,
        private=frozenset({"displacement", "dual"}),
        averages=False,
    ),
    "dense": Case(
        DENSE(draws=2, made_per_draw=4, generator_steps=2, noise_dim=3, generator_width=2, finetune_epochs=1),
        averages=False,
        uploads=lambda network: {*network.parameter_names, "low", "high"},
        steady=False,
    ),
    "feddf": Case(FedDF(distill_steps=5, server_lr=0.05, finetune_epochs=1), averages=False, public=True),
    "fedmgda": Case(FedMGDA(tolerance=0.3, finetune_epochs=1), averages=False),
    "fedmgda-lengths": Case(FedMGDA(tolerance=1, normalize=False, aggregation="uniform"), averages=False),
    "fltrust": Case(FLTrust(finetune_epochs=1), averages=False, public=True),
    "fltrust-steps": Case(FLTrust(root_steps=3, server_lr=0.5), averages=False, public=True),
    "fedgen": Case(
        FedGen(label_weight=1, feature_weight=1, noise_dim=4, generator_hidden=8, generator_steps=5, finetune_epochs=1),
        down=lambda network: network.num_parameters + 8 * (4 + classes(network)) + 5 * 8 + 9 * features(network),
        up=lambda network: network.num_parameters + classes(network),
        uploads=lambda network: {*network.parameter_names, "counts"},
    ),
    "fedfed": Case(
        FedFed(distillation_rounds=2, noise=0.3, code_dim=2, hidden=6, finetune_epochs=1),
        uploads=lambda network: {*network.parameter_names, "matrix", "offset", "x", "y"},
        averages=False,
        relabels=False,
        steady=False,
    ),
    "fedmmd": Case(FedMMD(finetune_epochs=1)),
    "fedfusion": Case(FedFusion(), down=convolved, up=convolved, uploads=convolved_names, averages=False),
    "fedfusion-multi": Case(FedFusion(operator="multi"), down=gated, up=gated, uploads=gated_names),
    "moon": Case(MOON(finetune_epochs=1), private=frozenset({"previous"})),
    "cfl": Case(CFL(mean_norm=1e9, max_norm=0, split_from=1), averages=False, everyone=True, relabels=False),
    "gcfl": Case(
        GCFL(mean_norm=1e9, max_norm=0, split_from=1, length=2), averages=False, everyone=True, relabels=False
    ),
    "fesem": Case(FeSEM(finetune_epochs=1), averages=False, relabels=False),
    # each step finds clients that have drifted, since in the beginning some losses rise
    "feddrift": Case(
        FedDrift(threshold=0.0, merge_threshold=0.1, step_rounds=1, finetune_epochs=1),
        uploads=lambda network: {*network.parameter_names, "losses"},
        averages=False,
        relabels=False,
        numbers=(1, 0),
        steady=False,
    ),
    "feddrift-eager": Case(
        FedDrift(variant="eager", threshold=0.0, step_rounds=1),
        uploads=lambda network: {*network.parameter_names, "losses"},
        averages=False,
        relabels=False,
        numbers=(1, 0),
        steady=False,
    ),
    "hierfavg": Case(HierFAVG(cloud_every=3, finetune_epochs=1), averages=False, relabels=False),
    "hierfavg-cohort": Case(HierFAVG(assignment="random", cloud_weights="cohort"), averages=False, relabels=False),
    "pacfl": Case(
        PACFL(threshold=28.0, finetune_epochs=1),
        uploads=lambda network: {*network.parameter_names, "vectors", "classes"},
        averages=False,
        relabels=False,
        numbers=(1, 0),
        steady=False,
    ),
    "hypcluster": Case(HypCluster(finetune_epochs=1), down=twice, averages=False),
    "local": Case(Local(), down=nothing, up=nothing, uploads=no_names, private=frozenset({"local"}), averages=False),
    "local-all": Case(
        Local(schedule="all", local_init="own"),
        down=nothing,
        up=nothing,
        uploads=no_names,
        private=frozenset({"local", "optimizer"}),
        averages=False,
        everyone=True,
    ),
    "centralized": Case(
        Centralized(finetune_epochs=2, finetune_select="best_val"),
        private=frozenset({"optimizer"}),
        pooled=True,
        relabels=False,
    ),
}
