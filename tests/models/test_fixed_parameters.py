"""Parameters that require no gradient: in no tree, the same in every process, and used by every prediction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.engine.stacks import vectorized
from rayfl.engine.steps import looped
from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.experiment.parts import Parts
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.networks.perceptron import MultilayerPerceptron
from rayfl.models.zoo import CustomModel
from rayfl.objectives import loss
from rayfl.tasks.classification import Classification
from tests.support.own_models import Frozen
from tests.support.problems import CPU, examples, request
from tests.support.toys import assert_close, assert_equal

SPEC = InputSpec("image", (1, 4, 4), 5)
FIXED = ("project.weight", "project.bias")
TRAINED = ("inner.weight", "inner.bias", "head.weight", "head.bias")
X = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def module_of(seed: int, frozen: tuple[str, ...] = ("project",)) -> Frozen:
    torch.manual_seed(seed)
    return Frozen(SPEC, frozen)


def network_of(frozen: tuple[str, ...] = ("project",)) -> Network:
    return Network(lambda: Frozen(SPEC, frozen))


def test_no_tree_has_them() -> None:
    network = network_of()
    assert network.parameter_names == network.body_names + network.head_names == TRAINED
    assert network.layers == (TRAINED[:2], TRAINED[2:])
    assert network.num_parameters == 16 * 8 + 8 + 8 * 5 + 5
    assert tuple(network.initialize(3)) == TRAINED
    assert set(network.fixed_parameters) == set(FIXED)
    assert not any(tensor.requires_grad for tensor in network.fixed_parameters.values())


def test_they_are_those_of_the_seed_in_every_process() -> None:
    first = network_of()
    torch.rand(7)
    second = network_of()
    assert_equal(first.fixed_parameters, second.fixed_parameters)
    assert_equal(first.fixed_parameters, {n: dict(module_of(0).named_parameters())[n].detach() for n in FIXED})
    for seed in (5, 6, 5):
        first.settle(seed)
        whole = module_of(seed)
        assert_equal(first.fixed_parameters, {n: dict(whole.named_parameters())[n].detach() for n in FIXED})
        with torch.no_grad():
            assert torch.equal(first.logits(first.initialize(seed), X), whole(X))
    # models of another seed have the trained tensors of their own alone
    other = first.initialize(9)
    assert torch.equal(other["head.weight"], module_of(9).head.weight.detach())
    mixed = module_of(5)
    mixed.load_state_dict({**mixed.state_dict(), **other})
    with torch.no_grad():
        assert torch.equal(first.logits(other, X), mixed(X))


def test_an_experiment_has_those_of_its_initial_model() -> None:
    def parts(seed: int) -> Parts:
        overrides = ["model=tests.support.own_models:Frozen", f"seed={seed}"]
        return Parts(load_config(Experiment, "quickstart", overrides))

    one, again, other = (parts(seed).task.network.fixed_parameters for seed in (0, 0, 1))
    assert_equal(one, again)
    assert not torch.equal(one["project.weight"], other["project.weight"])
    torch.manual_seed(parts(0).streams.integer("init.global"))
    whole = Frozen(parts(0).dataset.spec)
    assert torch.equal(one["project.weight"], whole.project.weight)


class Recalled(ClassificationModel):
    """A random buffer that no state dict has."""

    directions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(16, 6), persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.head = nn.Linear(6, 5)

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.directions

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


def test_buffers_outside_the_tree_are_those_of_the_seed_too() -> None:
    found = []
    for _ in range(2):
        torch.rand(3)
        network = Network(Recalled)
        network.settle(4)
        found.append(network.logits(network.initialize(1), X))
        assert network.buffer_names == ()
        assert network.fixed_parameters == {}
    assert torch.equal(*found)


class PartlyFrozen(MultilayerPerceptron):
    """A perceptron that says that it is a chain."""

    def __init__(self) -> None:
        super().__init__(16, (7, 6), 5, True)
        self.hidden[0].requires_grad_(False)

    def chain(self) -> tuple[str, ...]:
        return super().chain()


def frozen_perceptron() -> ClassificationModel:
    """One of rayfl's own, with a layer frozen from outside."""
    model = MultilayerPerceptron(16, (7, 6), 5, True)
    model.hidden[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "layer"),
    [(lambda: Frozen(SPEC), "project"), (PartlyFrozen, "hidden.0"), (frozen_perceptron, "hidden.0")],
    ids=["own", "own chain", "rayfl's"],
)
def test_training_is_that_of_pytorch_with_the_layer_frozen(make: Callable[[], ClassificationModel], layer: str) -> None:
    network = Network(make)
    network.settle(3)
    task, data = Classification(network), examples(23, SPEC, seed=2)
    asked = request(data, network.initialize(3), loss(), momentum=0.9, weight_decay=0.01)
    trained = looped.train(asked, task, CPU)

    torch.manual_seed(3)
    module = make()
    before = {name: leaf.detach().clone() for name, leaf in module.get_submodule(layer).named_parameters()}
    learnt = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learnt, lr=asked.rule.lr, momentum=0.9, weight_decay=0.01)
    for index in asked.plan.batches(CPU):
        optimizer.zero_grad()
        F.cross_entropy(module(data.x[index]), data.y[index]).backward()
        optimizer.step()
    assert_close(trained, {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}, 1e-6)
    assert_equal(before, {name: leaf.detach() for name, leaf in module.get_submodule(layer).named_parameters()})
    stacked = vectorized.train([asked, asked], task, CPU)
    assert_close(stacked[1], trained, 1e-6)


def test_normalization_whose_scale_is_fixed_still_records_statistics() -> None:
    class Normalized(Frozen):
        def __init__(self) -> None:
            super().__init__(SPEC)
            self.norm = nn.BatchNorm1d(16).requires_grad_(False)

        def features(self, x: Tensor) -> Tensor:
            return torch.relu(self.inner(self.norm(self.project(x.flatten(1)))))

    network = Network(Normalized)
    assert network.buffer_names == ("norm.running_mean", "norm.running_var")
    assert {"norm.weight", "norm.bias"} < set(network.fixed_parameters)
    start = network.initialize(1)
    trained = looped.train(request(examples(23, SPEC, 2), start), Classification(network), CPU)
    assert not torch.equal(trained["norm.running_mean"], start["norm.running_mean"])


def test_fixed_parameters_may_be_of_any_type() -> None:
    class Quantized(Frozen):
        def __init__(self) -> None:
            super().__init__(SPEC)
            self.levels = nn.Parameter(torch.arange(16), requires_grad=False)
            self.project = self.project.half()

        def features(self, x: Tensor) -> Tensor:
            return torch.relu(self.inner(self.project(x.flatten(1)) * self.levels))

    network = Network(Quantized)
    assert network.fixed_parameters["levels"].dtype == torch.int64
    # what is trained is float32, whatever the model says; so is what it is multiplied with
    assert network.fixed_parameters["project.weight"].dtype == torch.float32
    assert torch.isfinite(network.logits(network.initialize(0), X)).all()


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ModelError, match=r"model Frozen: no parameter requires a gradient, .* requires_grad"):
        network_of(("project", "inner", "head"))
    with pytest.raises(ModelError, match="no parameter requires a gradient"):
        CustomModel(factory="tests.support.own_models:untrainable").network(SPEC)


def test_a_model_of_an_older_version_is_told_from_other_misfits() -> None:
    network = network_of()
    old = {**network.initialize(0), **network.fixed_parameters}
    with pytest.raises(ModelError, match=r"unknown \['project.bias', 'project.weight'\]; 2 of these require no grad"):
        network.logits(old, X)
    with pytest.raises(ModelError, match=r"unknown \['other'\]$"):
        network.logits({**network.initialize(0), "other": X}, X)


def test_the_head_may_be_fixed() -> None:
    network = network_of(("head",))
    assert network.head_is_fixed
    assert network.head_names == network.classifier_names == ()
    assert network.head_shape == (5, 8)
    assert not network_of().head_is_fixed
