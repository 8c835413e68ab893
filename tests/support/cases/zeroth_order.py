"""Methods without backpropagation; of three of them what travels does not depend on the model's size."""

from __future__ import annotations

from algorithms.decomfl import DeComFL
from algorithms.fedkseed import FedKSeed
from algorithms.fedzo import FedZO
from algorithms.feedsign import FeedSign
from tests.support.cases.base import Case

_PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "lr": 0.002}
_TABLE = frozenset({"table"})
_PAIRS = frozenset({"seeds", "slopes"})

ZEROTH_ORDER = {
    "fedzo": Case(FedZO(directions=2), train={"max_grad_norm": 1.0}),
    "fedkseed": Case(
        FedKSeed(candidates=20), uploads=lambda network: _PAIRS, train=_PLAIN, averages=False, steady=False
    ),
    "fedkseed-pro": Case(
        FedKSeed(candidates=20, sampling="amplitude"),
        uploads=lambda network: _PAIRS,
        train=_PLAIN,
        averages=False,
        steady=False,
    ),
    "decomfl": Case(
        DeComFL(directions=2, local_steps=3),
        uploads=lambda network: _TABLE,
        train=_PLAIN,
        averages=False,
        relabels=False,
        steady=False,
    ),
    "feedsign": Case(
        FeedSign(), uploads=lambda network: _TABLE, train=_PLAIN, averages=False, relabels=False, steady=False
    ),
}
