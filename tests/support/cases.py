"""The methods that the framework's invariants are tested with, and what the framework may expect of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from algorithms.apfl import APFL
from algorithms.apple import APPLE
from algorithms.base import Algorithm
from algorithms.centralized import Centralized
from algorithms.cfl import CFL
from algorithms.ditto import Ditto
from algorithms.fedala import FedALA
from algorithms.fedamp import FedAMP
from algorithms.fedas import FedAS
from algorithms.fedavg import FedAvg
from algorithms.fedbabu import FedBABU
from algorithms.fedbn import FedBN
from algorithms.fedbuff import FedBuff
from algorithms.fedcac import FedCAC
from algorithms.fedcp import FedCP
from algorithms.feddbe import FedDBE
from algorithms.feddf import FedDF
from algorithms.feddistill import FedDistill
from algorithms.feddyn import FedDyn
from algorithms.fedem import FedEM
from algorithms.fedfomo import FedFomo
from algorithms.fedfusion import FedFusion
from algorithms.fedgen import FedGen
from algorithms.fedgh import FedGH
from algorithms.fedkd import FedKD
from algorithms.fedmd import FedMD
from algorithms.fedme import FedMe
from algorithms.fedmmd import FedMMD
from algorithms.fednova import FedNova
from algorithms.fedntd import FedNTD
from algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from algorithms.fedpac import FedPAC
from algorithms.fedper import FedPer
from algorithms.fedphp import FedPHP
from algorithms.fedproto import FedProto
from algorithms.fedprox import FedProx
from algorithms.fedrep import FedRep
from algorithms.fedrod import FedRoD
from algorithms.flda import FLDA
from algorithms.floco import Floco
from algorithms.floco_plus import FlocoPlus
from algorithms.fml import FML
from algorithms.gpfl import GPFL
from algorithms.hypcluster import HypCluster
from algorithms.knn_per import KnnPer
from algorithms.l2gd import L2GD
from algorithms.lg_fedavg import LGFedAvg
from algorithms.local import Local
from algorithms.mapper import Mapper
from algorithms.moon import MOON
from algorithms.per_fedavg import PerFedAvg
from algorithms.pfedgraph import PFedGraph
from algorithms.pfedhn import PFedHN
from algorithms.pfedme import PFedMe
from algorithms.pfedsim import PFedSim
from algorithms.scaffold import Scaffold
from algorithms.superfed import SuPerFed
from rayfl.engine.settings import TrainConfig
from rayfl.models.base import Network
from tests.support.experiments import KINDS
from tests.support.toys import Toy, random_clients, two_layers


def whole(network: Network) -> int:
    """Scalars of one model."""
    return network.num_parameters


def twice(network: Network) -> int:
    """Scalars of two models."""
    return 2 * network.num_parameters


def nothing(network: Network) -> int:
    """Scalars of no message."""
    return 0


def no_names(network: Network) -> Iterable[str]:
    """Names of nothing."""
    return ()


def all_names(network: Network) -> Iterable[str]:
    """Names of all parameters."""
    return network.parameter_names


def all_names_and_choice(network: Network) -> Iterable[str]:
    """Names of all parameters, and the number that says whether the exchanged model replaces the client's own."""
    return {*network.parameter_names, "replaces"}


def triangle(network: Network) -> int:
    """Scalars of a model whose head weight is replaced by three endpoints."""
    return network.num_parameters + 2 * network.initialize(0)[network.head_weight].numel()


def triangle_names(network: Network) -> Iterable[str]:
    """Names of the tensors of such a model."""
    return {*network.parameter_names, "endpoints"} - {network.head_weight}


def convolved(network: Network) -> int:
    """Scalars of a model and a convolution that fuses two sets of its features (flat, as wide as the head's inputs)."""
    width = network.initialize(0)[network.head_weight].shape[1]
    return network.num_parameters + width * (2 * width + 1)


def convolved_names(network: Network) -> Iterable[str]:
    """Names of the tensors of such a model."""
    return {*network.parameter_names, "weight", "bias"}


def gated(network: Network) -> int:
    """Scalars of a model and a gate for each of its features."""
    return network.num_parameters + network.initialize(0)[network.head_weight].shape[1]


def gated_names(network: Network) -> Iterable[str]:
    """Names of the tensors of such a model."""
    return {*network.parameter_names, "gate"}


def body(network: Network) -> int:
    """Scalars of all parameters but the head's."""
    return network.num_parameters - head(network)


def head(network: Network) -> int:
    """Scalars of the head."""
    model = network.initialize(0)
    return sum(model[name].numel() for name in network.head_names)


def prototypes(network: Network) -> int:
    """Scalars of one mean feature a class."""
    return network.initialize(0)[network.head_weight].numel()


def classes(network: Network) -> int:
    """How many classes there are."""
    return len(network.initialize(0)[network.head_weight])


def features(network: Network) -> int:
    """How many features the head reads."""
    return network.initialize(0)[network.head_weight].shape[1]


LAYER = frozenset({"matrix", "offset", "norm_gain", "norm_offset"})
"""Names of the tensors of a layer that a method puts next to a network, and of its normalization."""


def valved(network: Network) -> int:
    """Scalars of a body, of a valve for its features, and of an embedding of every class."""
    width = features(network)
    return body(network) + 2 * (width**2 + 3 * width) + classes(network) * width


def valved_names(network: Network) -> Iterable[str]:
    """Names of the tensors of these."""
    return {*network.body_names, *LAYER, "embedding"}


def policed(network: Network) -> int:
    """Scalars of a model, and of a policy for its features."""
    return network.num_parameters + 2 * features(network) ** 2 + 6 * features(network)


def policed_names(network: Network) -> Iterable[str]:
    """Names of the tensors of these."""
    return {*network.parameter_names, *LAYER}


def names_and_statistics(network: Network) -> Iterable[str]:
    """Names of all parameters, and of statistics by class."""
    return {*network.parameter_names, "sums", "counts", "mean", "variance"}


def body_names(network: Network) -> Iterable[str]:
    """Names of all parameters but the head's."""
    return network.body_names


def head_names(network: Network) -> Iterable[str]:
    """Names of the head's parameters."""
    return network.head_names


@dataclass(frozen=True)
class Case:
    """A method, and what the framework may expect of it.

    Attributes:
        algorithm: the method.
        down: scalars that the server sends to a client of the cohort in a round (any round).
        up: scalars that a client uploads.
        uploads: last components of the paths of what a client uploads.
        private: top-level keys of a client's state.
        averages: whether the server has a ``model``, which is an average of the clients' models and a row of the
            results named ``global``.
        everyone: whether all clients take part in every round, not only those that are sampled.
        pooled: whether the client that owns everybody's samples takes part in place of those sampled.
        quiet: rounds (0-indexed) in which nothing travels, and clients reply with nothing.
        relabels: whether results follow the clients when these are given other ids (not if the server draws or keeps
            anything by id or the samples are pooled in the order of the ids).
        train: changes of the training section the method needs.
        public: whether the method needs public samples.
        distinct: whether the server sends clients that are alike in all but their number models that differ.
        one_layer: whether the method takes a model of one layer.
        numbers: plain numbers (of 8 bytes) that travel down and up in addition to the scalars of tensors.
        opening: scalars that in round 0 travel down to and up from every client, sampled or not, before all else.
        steady: whether equally much travels in every round (if not, the method's own tests count it).
        alike: whether clients of equal samples and random numbers reply the same to the bit (not if each has a place of
            its own in a sum over all clients).
    """

    algorithm: Algorithm
    down: Callable[[Network], int] = whole
    up: Callable[[Network], int] = whole
    uploads: Callable[[Network], Iterable[str]] = all_names
    private: frozenset[str] = frozenset()
    averages: bool = True
    everyone: bool = False
    pooled: bool = False
    quiet: frozenset[int] = frozenset()
    relabels: bool = True
    train: dict[str, Any] = field(default_factory=dict)
    public: bool = False
    distinct: bool = False
    one_layer: bool = True
    numbers: tuple[int, int] = (0, 0)
    opening: tuple[Callable[[Network], int], Callable[[Network], int]] = (nothing, nothing)
    steady: bool = True
    alike: bool = True

    def contacted(self, cohort: Sequence[int]) -> list[int]:
        """The clients that the server contacts in a round."""
        return [len(SIZES)] if self.pooled else list(cohort)

    def cohorts(self) -> list[list[int]]:
        """The cohorts of the rounds."""
        return [list(range(len(SIZES)))] * len(COHORTS) if self.everyone else [list(cohort) for cohort in COHORTS]


SIZES = (9, 12, 6, 10, 7)
ALGORITHMS = {
    "fedavg": Case(FedAvg(finetune_epochs=1)),
    "fedprox": Case(FedProx(proximal_weight=0.1, finetune_epochs=1)),
    "fedbn": Case(FedBN(finetune_epochs=1), averages=False, train={"private_norm": "all"}),
    "fedavgm": Case(FedAvgM(server_momentum=0.5), averages=False),
    "fedadagrad": Case(FedAdagrad(), averages=False),
    "fedyogi": Case(FedYogi(bias_correction=True), averages=False),
    "fedadam": Case(FedAdam(), averages=False),
    "fednova": Case(FedNova(), averages=False, numbers=(1, 0)),
    # in synchronous rounds, of which no update is late, it averages
    "fedbuff": Case(FedBuff(finetune_epochs=1)),
    "fedntd": Case(FedNTD(temperature=2.0, finetune_epochs=1)),
    "fedgh": Case(
        FedGH(),
        down=head,
        up=lambda network: prototypes(network) + classes(network),
        uploads=lambda network: ("means", "exist"),
        private=frozenset({"personal"}),
        averages=False,
        relabels=False,
    ),
    "feddistill": Case(
        FedDistill(),
        down=lambda network: classes(network) * (classes(network) + 1),
        up=lambda network: classes(network) * (classes(network) + 1),
        uploads=lambda network: ("means", "exist"),
        private=frozenset({"local"}),
        averages=False,
        relabels=False,
    ),
    "feddf": Case(FedDF(distill_steps=5, server_lr=0.05, finetune_epochs=1), averages=False, public=True),
    "fedmd": Case(
        FedMD(digest_loss="mse", digest_batch_size=4),
        down=lambda network: 6 * classes(network),
        up=lambda network: 6 * classes(network),
        uploads=lambda network: ("logits",),
        private=frozenset({"local"}),
        averages=False,
        public=True,
    ),
    "fedgen": Case(
        FedGen(label_weight=1, feature_weight=1, noise_dim=4, generator_hidden=8, generator_steps=5, finetune_epochs=1),
        down=lambda network: network.num_parameters + 8 * (4 + classes(network)) + 5 * 8 + 9 * features(network),
        up=lambda network: network.num_parameters + classes(network),
        uploads=lambda network: {*network.parameter_names, "counts"},
    ),
    # with all of the energy nothing is shorter as factors
    "fedkd": Case(FedKD(energy_start=1, energy_end=1), private=frozenset({"mentor", "projection"}), averages=False),
    "fedkd-whole": Case(FedKD(compress="none", mutual="separate"), private=frozenset({"mentor", "projection"})),
    "knn-per": Case(KnnPer(neighbours=3)),
    "fedcac": Case(FedCAC(), averages=False, relabels=False),
    "cfl": Case(CFL(mean_norm=1e9, max_norm=0, split_from=1), averages=False, everyone=True, relabels=False),
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
    "scaffold": Case(Scaffold(momentum_on_corrected=True), down=twice, up=twice, private=frozenset({"control"})),
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
    "fedper": Case(FedPer(), down=body, up=body, uploads=body_names, private=frozenset({"personal"}), averages=False),
    "lg-fedavg": Case(
        LGFedAvg(), down=head, up=head, uploads=head_names, private=frozenset({"personal"}), averages=False
    ),
    "fedrep": Case(
        FedRep(head_epochs=2, finetune_epochs=1),
        down=body,
        up=body,
        uploads=body_names,
        private=frozenset({"personal"}),
        averages=False,
    ),
    "fedbabu": Case(FedBABU(finetune_epochs=2), down=body, up=body, uploads=body_names, averages=False),
    "ditto": Case(Ditto(proximal_weight=0.5, personal_epochs=1), private=frozenset({"personal"})),
    "feddyn": Case(FedDyn(alpha=0.1), private=frozenset({"displacement"}), averages=False),
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
    "fedphp": Case(FedPHP(transfer_weight=0.1), private=frozenset({"hpm", "selections"})),
    "fml": Case(FML(), private=frozenset({"private"})),
    "fml-persistent": Case(FML(persist_private_optimizer=True), private=frozenset({"private", "optimizer"})),
    "fedmmd": Case(FedMMD(finetune_epochs=1)),
    "fedfusion": Case(FedFusion(), down=convolved, up=convolved, uploads=convolved_names, averages=False),
    "fedfusion-multi": Case(FedFusion(operator="multi"), down=gated, up=gated, uploads=gated_names),
    "flda": Case(FLDA(), private=frozenset({"private", "gate"})),
    "flda-raw-logits": Case(FLDA(gate_input="raw", mix="logits"), private=frozenset({"private", "gate"})),
    "apfl": Case(APFL(), private=frozenset({"local"})),
    "apfl-adaptive": Case(APFL(adaptive=True, alpha=0.5, mix="logits"), private=frozenset({"local", "alpha"})),
    "pfedme": Case(
        PFedMe(proximal_weight=2.0, inner_steps=3, personal_lr=0.05),
        private=frozenset({"personal"}),
        train={"momentum": 0.0, "weight_decay": 0.0},
    ),
    "pfedhn": Case(PFedHN(inner_steps=None, hidden=8, trunk_layers=2), averages=False, relabels=False, distinct=True),
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
    "per-fedavg-fo": Case(PerFedAvg(alpha=0.1)),
    "per-fedavg-hf": Case(PerFedAvg(version="hf", alpha=0.1, adapt_batch="batch")),
    "per-fedavg-exact": Case(PerFedAvg(version="exact", alpha=0.1)),
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
    "fedpac": Case(
        FedPAC(head_lr=0.05),
        down=lambda network: network.num_parameters + prototypes(network) + classes(network),
        up=lambda network: network.num_parameters + 2 * prototypes(network) + classes(network) + 1,
        uploads=names_and_statistics,
        private=frozenset({"personal"}),
        averages=False,
    ),
    "pfedsim": Case(PFedSim(), relabels=False),
    "fedamp": Case(
        FedAMP(heuristic=False, sigma=2.0, alpha=0.5), private=frozenset({"personal"}), averages=False, relabels=False
    ),
    "fedamp-heuristic": Case(FedAMP(alpha=2.0, start="cloud"), averages=False, relabels=False),
    "pfedgraph": Case(PFedGraph(alignment_weight=0), averages=False, relabels=False),
    "pfedgraph-aligned": Case(
        PFedGraph(alignment_weight=0.5, evaluate="mixed", snap_above=None),
        averages=False,
        relabels=False,
        steady=False,
    ),
    "fedfomo": Case(
        FedFomo(peers=2, select_on="train", evaluate="federated"),
        uploads=lambda network: {*network.parameter_names, "merits"},
        private=frozenset({"personal", "base"}),
        averages=False,
        relabels=False,
        steady=False,
    ),
    "apple": Case(
        APPLE(relation_lr=0.05, relation_share=0.5),
        down=lambda network: len(SIZES) * network.num_parameters,
        private=frozenset({"relation", "personal"}),
        averages=False,
        relabels=False,
        numbers=(len(SIZES), 0),
        alike=False,
    ),
    "apple-limited": Case(
        APPLE(relation_lr=0.05, peers=2, relation_schedule="cosine", fresh_peers=True),
        uploads=lambda network: {*network.parameter_names, "wanted"},
        private=frozenset({"relation", "copies", "downloaded"}),
        averages=False,
        relabels=False,
        steady=False,
        alike=False,
    ),
    "fedrod": Case(FedRoD(), private=frozenset({"personal"})),
    "fedproto": Case(
        FedProto(),
        down=lambda network: prototypes(network) + classes(network),
        up=lambda network: prototypes(network) + classes(network),
        uploads=lambda network: ("sums", "counts"),
        private=frozenset({"local"}),
        averages=False,
    ),
    "fedproto-during": Case(
        FedProto(prototypes_at="during", prototype_weights="samples", initial="own", inference="head"),
        down=lambda network: prototypes(network) + classes(network),
        up=lambda network: prototypes(network) + classes(network),
        uploads=lambda network: ("sums", "counts"),
        private=frozenset({"local"}),
        averages=False,
    ),
    "moon": Case(MOON(finetune_epochs=1), private=frozenset({"previous"})),
    "feddbe": Case(FedDBE(mean_weight=0), private=frozenset({"vector"})),
    "feddbe-pulled": Case(
        FedDBE(mean_weight=5, mean_momentum=0.4),
        down=lambda network: network.num_parameters + features(network),
        private=frozenset({"vector"}),
        averages=False,
        opening=(whole, features),
    ),
    "fedala": Case(FedALA(start_threshold=None, start_passes=2), private=frozenset({"upper", "weights"})),
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
    "fedas": Case(
        FedAS(), down=body, up=body, uploads=body_names, private=frozenset({"personal", "body"}), averages=False
    ),
    "hypcluster": Case(HypCluster(finetune_epochs=1), down=twice, averages=False),
    "fedem": Case(FedEM(components=2), down=twice, up=twice, private=frozenset({"mixture"}), averages=False),
}

CASES = pytest.mark.parametrize("case", ALGORITHMS.values(), ids=ALGORITHMS.keys())
CASES_OF_KINDS = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if name in KINDS else pytest.mark.slow) for name, case in ALGORITHMS.items()],
)
"""The same, of which those that do not stand for a kind are slow."""
COHORTS = ([0, 2], [1, 2, 4], [0, 4], [2, 3])
TRAIN = TrainConfig(
    rounds=len(COHORTS), clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)


def toy_of(case: Case, double: bool = True, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    """The method on small random clients."""
    dtype = torch.float64 if double else torch.float32
    public = 6 if case.public else 0
    settings = {
        "dataset": random_clients(SIZES, dtype=dtype, public=public),
        "task": two_layers(double=double),
        **options,
    }
    fitting = train.model_copy(update=case.train)
    if case.everyone:
        fitting = fitting.model_copy(update={"clients_per_round": "all"})
    return Toy(case.algorithm, train=fitting, **settings)
