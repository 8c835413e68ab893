"""The fast kernel agrees with the reference kernel for every method, and is refused where it has nothing to offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.federated import InputSpec
from rayfl.engine import looped
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.requests import ParameterGroup
from rayfl.errors import ConfigError
from rayfl.experiment import Parts
from rayfl.models.base import Network
from rayfl.models.perceptron import TwoNN
from rayfl.models.recurrent import CharLSTM
from rayfl.params import leaves
from rayfl.tasks import Classification
from tests.algorithms.cases import CASES, SIZES, Case, toy_of
from tests.engine.problems import CPU, ColourCNN, SmallCNN, examples, request
from tests.toys import DoubleNetwork, ListDataset, Toy, assert_close, assert_equal

COLOURS = InputSpec("image", (3, 6, 6), 4)
KINDS: dict[str, tuple[Callable[[], Network], InputSpec]] = {
    "perceptron": (lambda: TwoNN(hidden=(9, 7)).network(InputSpec("image", (5,), 3)), InputSpec("image", (5,), 3)),
    "CNN": (lambda: Network(ColourCNN), COLOURS),
    "LSTM": (
        lambda: CharLSTM(hidden=6).network(InputSpec("tokens", (7,), 9, vocabulary=9)),
        InputSpec("tokens", (7,), 9, vocabulary=9),
    ),
}
CHANNELS_LAST = "CNN"
"""Where sums over channels are formed in another order."""


def clients_of(spec: InputSpec, sizes: Sequence[int], public: int, dtype: torch.dtype) -> ListDataset:
    """Random samples of one kind, and public ones."""
    own = [examples(n, spec, seed, dtype) for seed, n in enumerate(sizes)]
    dataset = ListDataset([(one.x, one.y) for one in own], spec.num_classes, examples(public, spec, 99, dtype).x)
    dataset.spec = spec
    return dataset


def played(case: Case, kind: str, kernel: str) -> Toy:
    """All rounds of a method with one of the kernels."""
    make, spec = KINDS[kind]
    # A discrepancy of kernels whose two sides are nearly equal makes of a rounding of 1e-8 one of 1e-5 in four rounds.
    double = case.algorithm.name == "fedphp" and kind == CHANNELS_LAST
    dataset = clients_of(spec, SIZES, 6 if case.public else 0, torch.float64 if double else torch.float32)
    network = DoubleNetwork(ColourCNN) if double else make()
    toy = toy_of(case, double=double, dataset=dataset, task=Classification(network), kernel=kernel)
    toy.run()
    return toy


@pytest.mark.parametrize("kind", KINDS)
@CASES
def test_fast_is_the_reference(case: Case, kind: str) -> None:
    fast, reference = (played(case, kind, kernel) for kernel in ("fast", "reference"))
    assert_close(fast.server, reference.server, 1e-5)
    assert_close(fast.states(), reference.states(), 1e-5)
    start = reference.algorithm.init(reference.task, reference.context)
    moved = dict(leaves({"server": reference.server, "states": reference.states()}))
    assert any(isinstance(leaf, Tensor) and not _same(leaf, start, path) for path, leaf in moved.items())
    if case.algorithm.name == "superfed" or kind == CHANNELS_LAST:
        return
    assert_equal(fast.server, reference.server)
    assert_equal(fast.states(), reference.states())


def _same(leaf: Tensor, start: Any, path: str) -> bool:
    before = dict(leaves({"server": start})).get(path)
    return before is not None and torch.equal(before, leaf)


def test_channels_last_is_what_a_convolution_gains() -> None:
    """Otherwise the comparison above would set a thing against itself."""
    task = Classification(Network(ColourCNN))
    update = request(examples(23, COLOURS, 0), task.network.initialize(0))
    fast, reference = (looped.train(update, task, CPU, kernel) for kernel in ("fast", "reference"))  # type: ignore[arg-type]
    assert_close(fast, reference, 1e-5)
    assert any(not torch.equal(fast[name], reference[name]) for name in fast)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.3}, {"groups": (("head", ParameterGroup(lr=0.2)),)}])
def test_one_channel_has_the_bits_of_the_reference(options: dict[str, Any]) -> None:
    spec = InputSpec("image", (1, 6, 6), 4)
    task = Classification(Network(SmallCNN))
    update = replace(request(examples(17, spec, 0), task.network.initialize(0)), **options)
    assert_equal(looped.train(update, task, CPU, "fast"), looped.train(update, task, CPU))


def test_the_configuration_says_where_there_is_no_fast_kernel() -> None:
    with pytest.raises(ValidationError, match="set mode=looped, or kernel=reference"):
        EngineConfig(mode="vectorized", kernel="fast")
    task = Classification(Network(SmallCNN))
    assert Engine(task, CPU, EngineConfig(kernel="fast")).note == ""
    elsewhere = Engine(task, torch.device("cuda"), EngineConfig(kernel="fast"))
    assert elsewhere.note == "engine.kernel=fast is for CPUs: on cuda it is reference"
    assert elsewhere.vectorized


PFEDME = ["algorithm=pfedme", "train.momentum=0", "train.weight_decay=0"]


@pytest.mark.parametrize("model", ["two_cnn", "reddi_cnn"])
def test_an_envelope_of_another_network_is_refused_before_the_start(model: str) -> None:
    config = load_config(Experiment, "quickstart", [*PFEDME, f"model={model}", "engine.kernel=fast"])
    with pytest.raises(ConfigError, match=r"engine\.kernel is fast, .* pfedme .* fully connected .* engine\.kernel="):
        Parts(config).check()
    Parts(load_config(Experiment, "quickstart", [*PFEDME, f"model={model}"])).check()


def test_an_envelope_of_a_perceptron_is_not() -> None:
    Parts(load_config(Experiment, "quickstart", [*PFEDME, "model=two_nn", "engine.kernel=fast"])).check()
