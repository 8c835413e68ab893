"""Every method's local updates, with SGD, are those of autograd on the whole objective and of ``torch.optim``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rayfl.engine.steps import looped
from rayfl.examples import InputSpec
from rayfl.models.zoo import Architecture, CharLSTM, TwoCNN, TwoNN
from rayfl.params import Tree, from_numpy
from rayfl.tasks.classification import Classification
from tests.support import plain
from tests.support.cases import ALGORITHMS, toy_of
from tests.support.cases.base import SIZES
from tests.support.experiments import KINDS
from tests.support.problems import examples
from tests.support.toy_networks import DoubleNetwork
from tests.support.toys import ListDataset, assert_close


@dataclass(frozen=True)
class Problem:
    """A model and the inputs that it takes."""

    architecture: Architecture
    spec: InputSpec

    def toy(self, method: str, double: bool) -> Any:
        """The method on small random clients of several sizes; some mini-batches have one sample."""
        dtype = torch.float64 if double else torch.float32
        network = (DoubleNetwork if double else type(self.architecture.network(self.spec)))(
            lambda: self.architecture.build(self.spec)
        )
        clients = [examples(size, self.spec, k, dtype) for k, size in enumerate(SIZES)]
        case = ALGORITHMS[method]
        public = examples(6, self.spec, 9, dtype).x if case.public else None
        data = ListDataset([(one.x, one.y) for one in clients], self.spec.num_classes, public)
        data.spec = self.spec
        spec = self.spec if case.algorithm.name == "fedpub" else None  # it draws inputs; others ask what units are
        return toy_of(case, double, dataset=data, task=Classification(network, spec=spec))


WITHOUT_TOKENS = (
    *(
        "calfat",
        "dense",
        "fat",
        "gear",
        "fedcorr",
        "fedfed",
        "target",
        "fedloge",
        "heterofl",
        "fedrolex",
        "fjord",
        "depthfl",
        "inclusivefl",
        "scalefl",
        "fedmlb",
    ),
)
"""Methods that refuse tokens, mix inputs, cannot cut embeddings, or need as many features as classes."""

PROBLEMS = {
    "perceptron": Problem(TwoNN(hidden=(7, 6)), InputSpec("image", (5,), 3)),
    "cnn": Problem(TwoCNN(), InputSpec("image", (3, 4, 4), 3)),
    "lstm": Problem(CharLSTM(hidden=5), InputSpec("tokens", (4,), 6, vocabulary=6)),
}
QUICK = ("fedavg", "superfed-mm", "scaffold")


def trees(toy: Any) -> tuple[Tree, Mapping[str, Tree]]:
    """What the server and the clients have after all rounds."""
    server = toy.run()
    return server, {str(client): from_numpy(state) for client, state in toy.states().items()}


@pytest.mark.parametrize("double", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["float64", "float32"])
@pytest.mark.parametrize(
    ("method", "problem"),
    [
        pytest.param(
            method, problem, marks=[] if method in (KINDS if problem == "perceptron" else QUICK) else pytest.mark.slow
        )
        for problem in PROBLEMS
        for method in ALGORITHMS
        if problem != "lstm" or ALGORITHMS[method].algorithm.name not in WITHOUT_TOKENS
    ],
)
def test_local_updates_are_those_of_autograd(
    method: str, problem: str, double: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trees(PROBLEMS[problem].toy(method, double))
    monkeypatch.setattr(looped, "train", plain.train)
    expected = trees(PROBLEMS[problem].toy(method, double))
    for one, other in zip(found, expected, strict=True):
        # FedDF's server distils with Adam, which scales round-off up to a part of its learning rate.
        assert_close(one, other, 1e-12 if double else 1e-4 if method == "feddf" else 1e-5)
