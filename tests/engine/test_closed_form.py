"""Fully connected networks have their gradients in closed form, to the bit those of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfl.closed_form import cross_entropy, tensors_of
from rayfl.data.federated import InputSpec
from rayfl.engine import looped
from rayfl.engine.steps import Kernel
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.perceptron import MultilayerPerceptron, TwoNN
from rayfl.params import squared_distance
from rayfl.tape import Tape, total
from rayfl.tasks import Batch, Classification
from tests.engine.problems import CPU, examples, request
from tests.toys import assert_equal

SPEC = InputSpec("image", (1, 4, 4), 5)
Loss = Callable[[dict[str, Tensor], Batch, Classification], Tensor]


def problem(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[Classification, dict[str, Tensor], Batch]:
    network = TwoNN(hidden=(7, 6), bias=bias).network(SPEC)
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(9, 1, 4, 4, generator=generator, dtype=dtype)
    batch = Batch(x, torch.randint(0, 5, (9,), generator=generator))
    model = {name: leaf.to(dtype).requires_grad_() for name, leaf in network.initialize(1).items()}
    return Classification(network), model, batch


def both(loss: Loss, model: dict[str, Tensor], batch: Batch, task: Classification) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients by autograd and on an exact tape; zeros for what the loss does not read."""
    moved = [leaf for leaf in model.values() if leaf.requires_grad]
    plain = torch.autograd.grad(loss(model, batch, task), moved, allow_unused=True)
    tape = Tape(moved, exact=True)
    with tape:
        value = loss(model, batch, task)
    terms = tape.gradients(value)
    zeros = [torch.zeros_like(p) if g is None else g for p, g in zip(moved, plain, strict=True)]
    return zeros, [total(found, like) for found, like in zip(terms, moved, strict=True)]


LOSSES: dict[str, Loss] = {
    "plain": lambda model, batch, task: task.loss(model, batch),
    "scaled": lambda model, batch, task: 0.3 * task.loss(model, batch),
    "with a penalty": lambda model, batch, task: (
        task.loss(model, batch) + 0.7 * sum((leaf - 0.1).pow(2).sum() for leaf in model.values())
    ),
    "of a power": lambda model, batch, task: task.loss(model, batch) ** 2,
    "unread": lambda model, batch, task: model["head.weight"].sum() + 0 * batch.x.sum(),
    "of logits": lambda model, batch, task: 0.3 * F.cross_entropy(task.logits(model, batch), batch.y),
    "of features and logits": lambda model, batch, task: transfer(*task.features_and_logits(model, batch), batch),
    "of what the head reads": lambda model, batch, task: transfer(*task.head_inputs_and_logits(model, batch), batch),
    "of features": lambda model, batch, task: task.features(model, batch).pow(2).sum(),
    "of three passes": lambda model, batch, task: (
        task.loss(model, batch) + sum(task.logits(model, Batch(batch.x + i, batch.y)).std() for i in range(2))
    ),
    "of a student": lambda model, batch, task: F.mse_loss(
        task.logits(model, batch), task.logits(teacher(task, batch), batch)
    ),
    "of the network itself": lambda model, batch, task: task.network.logits(model, batch.x).pow(2).mean(),
    "of computed weights": lambda model, batch, task: task.loss({n: 2 * leaf for n, leaf in model.items()}, batch),
}


def transfer(features: Tensor, logits: Tensor, batch: Batch) -> Tensor:
    """Features are read twice here, and once by the head."""
    loss = 0.9 * F.cross_entropy(logits, batch.y) + 0.1 * torch.cdist(features, features.detach()).mean()
    return loss + 0.2 * (features - 1).pow(2).mean() + logits.softmax(1).max()


def teacher(task: Classification, batch: Batch) -> dict[str, Tensor]:
    return {name: leaf.to(batch.x.dtype) for name, leaf in task.network.initialize(8).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_bits_are_those_of_autograd(loss: str, bias: bool, dtype: torch.dtype) -> None:
    task, model, batch = problem(bias, dtype)
    for expected, found in zip(*both(LOSSES[loss], model, batch, task), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("loss", ["plain", "of logits", "of features and logits"])
@pytest.mark.parametrize("frozen", [("hidden.0",), ("hidden.0", "hidden.1"), ("head",), ("hidden.1", "head")])
def test_frozen_layers(frozen: tuple[str, ...], loss: str) -> None:
    task, model, batch = problem()
    for name, leaf in model.items():
        leaf.requires_grad_(not name.startswith(frozen))
    for expected, found in zip(*both(LOSSES[loss], model, batch, task), strict=True):
        assert expected.any()
        assert torch.equal(expected, found)


def test_no_graph_is_built() -> None:
    task, model, batch = problem()
    tape = Tape(list(model.values()), exact=True)
    with tape:
        value = task.loss(model, batch)
        for tree, wanted in ((model, True), (teacher(task, batch), False)):
            for tensor in task.features_and_logits(tree, batch):
                assert tensor.is_leaf
                assert tensor.requires_grad == wanted
    assert value.is_leaf
    assert torch.equal(value.detach(), task.loss(model, batch).detach())


def test_outside_a_tape_there_is_a_graph() -> None:
    task, model, batch = problem()
    assert not task.loss(model, batch).is_leaf


def test_a_mixture_on_a_tape_passes_gradients_on() -> None:
    """The gradient of a network of tensors that themselves come from the tape."""
    task, model, batch = problem()
    moved = list(model.values())
    plain = torch.autograd.grad(task.loss({n: 3 * leaf for n, leaf in model.items()}, batch), moved)
    tape = Tape(moved)
    with tape:
        with torch.no_grad():
            tripled = [3 * leaf for leaf in moved]
        cut = tape.cut(tripled, lambda gradients: tape.add(moved, 3.0, gradients))
        value = task.loss(dict(zip(model, cut, strict=True)), batch)
    for expected, terms in zip(plain, tape.gradients(value), strict=True):
        torch.testing.assert_close(total(terms, expected), expected)


def adapted(model: dict[str, Tensor], batch: Batch, task: Classification, frozen: Any, draw: Any) -> Tensor:
    """The loss after a step of gradient descent, as in model-agnostic meta-learning."""
    slopes = torch.autograd.grad(task.loss(model, batch), list(model.values()), create_graph=True)
    return task.loss({n: leaf - 0.5 * slope for (n, leaf), slope in zip(model.items(), slopes, strict=True)}, batch)


@pytest.mark.parametrize("kernel", ["reference", "fast"])
def test_objectives_may_differentiate_on_their_own(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    task = problem()[0]
    update = request(examples(23, SPEC, seed=2), task.network.initialize(3), adapted)
    found = looped.train(update, task, CPU, kernel)
    monkeypatch.setattr(Network, "chain", lambda self, tree: None)
    assert_equal(found, looped.train(update, task, CPU))


def test_other_errors_of_an_objective_stay_what_they_are() -> None:
    def wrong(model: Any, batch: Batch, task: Classification, frozen: Any, draw: Any) -> Tensor:
        return task.loss(model, batch) + (batch.x @ batch.x).sum()

    task, data = problem()[0], examples(23, InputSpec("image", (1, 2, 8), 5), 2)
    with pytest.raises(RuntimeError, match="Expected size for first two dimensions"):
        looped.train(request(data, task.network.initialize(3), wrong), task, CPU)


class Squashed(MultilayerPerceptron):
    """Inherits the layers but not what they compute."""

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(super().features(x))


def test_a_subclass_is_no_chain() -> None:
    def build() -> ClassificationModel:
        return Squashed(16, (7, 6), 5, True)

    task, model, batch = Classification(Network(build)), problem()[1], problem()[2]
    assert task.network.chain(model) is None
    for expected, found in zip(*both(LOSSES["plain"], model, batch, task), strict=True):
        assert torch.equal(expected, found)


def test_labels_out_of_range_are_refused() -> None:
    task, model, batch = problem()
    with Tape(list(model.values()), exact=True), pytest.raises(IndexError, match="out of bounds"):
        task.loss(model, Batch(batch.x, batch.y + 5))


def test_the_tensors_of_layers() -> None:
    weight, bias = torch.ones(2, 3), torch.ones(2)
    assert tensors_of([(weight, bias), (weight, None)]) == [weight, bias, weight]


def test_nothing_wanted_gives_nothing() -> None:
    weight, other = torch.ones(5, 16), torch.ones(1, requires_grad=True)
    tape = Tape([other])
    with tape:
        value = cross_entropy(tape, [(weight, None)], torch.ones(2, 16), torch.tensor([0, 1]))
    assert tape.gradients(value) == [[]]


def proximal(
    model: dict[str, Tensor], batch: Batch, task: Classification, frozen: dict[str, Tensor], draw: None
) -> Tensor:
    return task.loss(model, batch) + 0.05 * squared_distance(model, frozen)


@pytest.mark.parametrize("penalty", [False, True])
def test_local_updates_have_the_bits_of_a_plain_loop(penalty: bool) -> None:
    task, model, _ = problem()
    start = {name: leaf.detach().clone() for name, leaf in model.items()}
    anchor = {name: leaf + 0.01 for name, leaf in start.items()}
    objective = proximal if penalty else (lambda m, batch, task, frozen, draw: task.loss(m, batch))
    data = examples(23, SPEC, seed=2)
    asked = request(data, start, objective, frozen=anchor, momentum=0.9, weight_decay=0.01)
    trained = looped.train(asked, task, CPU)

    module = MultilayerPerceptron(16, (7, 6), 5, True)
    module.load_state_dict(start)
    optimizer = torch.optim.SGD(module.parameters(), lr=asked.lr, momentum=0.9, weight_decay=0.01)
    for index in asked.plan.batches(CPU):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(data.x[index]), data.y[index])
        if penalty:
            loss = loss + 0.05 * squared_distance(dict(module.named_parameters()), anchor)
        loss.backward()
        optimizer.step()
    assert_equal(trained, {name: leaf.detach() for name, leaf in module.named_parameters()})
