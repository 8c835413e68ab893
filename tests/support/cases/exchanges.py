"""Methods in which clients get models made for each of them, or messages that are no models."""

from __future__ import annotations

from algorithms.adcol import ADCOL
from algorithms.apple import APPLE
from algorithms.fedamp import FedAMP
from algorithms.fedap import FedAP
from algorithms.feddistill import FedDistill
from algorithms.feddwa import FedDWA
from algorithms.fedfomo import FedFomo
from algorithms.fedhp import FedHP
from algorithms.fedmd import FedMD
from algorithms.fedpcl import FedPCL
from algorithms.fedproto import FedProto
from algorithms.fedtgp import FedTGP
from algorithms.metafed import MetaFed
from algorithms.pefll import PeFLL
from algorithms.pfedgraph import PFedGraph
from algorithms.pfedhn import PFedHN
from algorithms.pfedla import PFedLA
from algorithms.pfedsim import PFedSim
from tests.support.cases.base import SIZES, Case
from tests.support.cases.expected import classes, describing, describing_names, prototypes, twice, whole

EXCHANGES = {
    "feddistill": Case(
        FedDistill(),
        down=lambda network: classes(network) * (classes(network) + 1),
        up=lambda network: classes(network) * (classes(network) + 1),
        uploads=lambda network: ("means", "exist"),
        private=frozenset({"local"}),
        averages=False,
        relabels=False,
    ),
    "fedmd": Case(
        FedMD(digest_loss="mse", digest_batch_size=4),
        down=lambda network: 6 * classes(network),
        up=lambda network: 6 * classes(network),
        uploads=lambda network: ("logits",),
        private=frozenset({"local"}),
        averages=False,
        public=True,
    ),
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
    "fedtgp": Case(
        FedTGP(server_epochs=3),
        down=prototypes,
        up=lambda network: prototypes(network) + classes(network),
        uploads=lambda network: ("means", "exist"),
        private=frozenset({"local"}),
        averages=False,
        relabels=False,
    ),
    "fedhp": Case(
        FedHP(spread_steps=20),
        down=lambda network: 2 * prototypes(network),
        up=lambda network: prototypes(network) + classes(network),
        uploads=lambda network: ("sums", "weights"),
        private=frozenset({"local", "prototypes"}),
        averages=False,
        one_layer=False,
    ),
    "fedpcl": Case(
        # prototypes of all clients that have sent any go down: more from round to round
        FedPCL(),
        uploads=lambda network: ("means", "exist"),
        private=frozenset({"local", "prototypes"}),
        averages=False,
        relabels=False,
        steady=False,
        one_layer=False,
    ),
    "adcol": Case(
        # features of each sample are sent: how many is a client's own
        ADCOL(adversarial_weight=2.0, discriminator_hidden=4, server_lr=0.1),
        uploads=lambda network: ("features",),
        private=frozenset({"local"}),
        averages=False,
        relabels=False,
        steady=False,
    ),
    "metafed": Case(
        # the first client of all gets nothing, and each another model
        MetaFed(warmup_epochs=1, ready_above=0.5, select_on="train"),
        private=frozenset({"model", "ready"}),
        averages=False,
        relabels=False,
        steady=False,
        alike=False,
        distinct=True,
    ),
    "fedap": Case(FedAP(warmup=0.5), averages=False, relabels=False, steady=False, train={"private_norm": "all"}),
    "pfedsim": Case(PFedSim(), relabels=False),
    "fedamp": Case(
        FedAMP(heuristic=False, sigma=2.0, alpha=0.5), private=frozenset({"personal"}), averages=False, relabels=False
    ),
    "fedamp-heuristic": Case(FedAMP(alpha=2.0, start="cloud"), averages=False, relabels=False),
    "feddwa": Case(FedDWA(top_k=2), up=twice, averages=False, relabels=False),
    "feddwa-all": Case(FedDWA(top_k=None, guidance_steps=None), up=twice, averages=False, relabels=False),
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
    "pfedhn": Case(PFedHN(inner_steps=None, hidden=8, trunk_layers=2), averages=False, relabels=False, distinct=True),
    "pfedla": Case(PFedLA(hidden=8, embedding_dim=4, server_lr=0.1), averages=False, relabels=False),
    "pfedla-retained": Case(
        PFedLA(hidden=8, embedding_dim=4, server_lr=0.1, retained_layers=1),
        private=frozenset({"own"}),
        averages=False,
        relabels=False,
        steady=False,
    ),
    "pefll": Case(
        PeFLL(inner_steps=None, hidden=8, trunk_layers=2, server_lr=0.003),
        down=lambda network: 2 * describing(network) + whole(network) + 2,
        up=lambda network: describing(network) + whole(network) + 2,
        uploads=describing_names,
        averages=False,
        relabels=False,
    ),
}
