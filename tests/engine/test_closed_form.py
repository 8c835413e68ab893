"""Fully connected networks have their gradients in closed form, to the bit those of autograd; no objective is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfl.data.federated import InputSpec
from rayfl.engine import looped
from rayfl.engine.steps import Kernel
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.perceptron import MultilayerPerceptron, TwoNN
from rayfl.objectives import loss_of_the_task
from rayfl.params import interpolate, squared_distance, squared_norm
from rayfl.tasks import Batch, Classification
from tests.engine.problems import CPU, examples, request
from tests.toys import assert_equal

SPEC = InputSpec("image", (1, 4, 4), 5)
Loss = Callable[[dict[str, Tensor], Batch, Classification], Tensor]


def problem(bias: bool = True) -> Classification:
    return Classification(TwoNN(hidden=(7, 6), bias=bias).network(SPEC))


def start_of(task: Classification, seed: int = 3) -> dict[str, Tensor]:
    return task.network.initialize(seed)


def gradient_penalty(model: dict[str, Tensor], batch: Batch, task: Classification) -> Tensor:
    """The squared norm of the loss's own gradient; what the loss does not read is left out."""
    loss = task.loss(model, batch)
    slopes = torch.autograd.grad(loss, list(model.values()), create_graph=True, allow_unused=True)
    return loss + 10 * sum(slope.square().sum() for slope in slopes if slope is not None)


def adapted(model: dict[str, Tensor], batch: Batch, task: Classification) -> Tensor:
    """The loss after a step of gradient descent, as in model-agnostic meta-learning."""
    slopes = torch.autograd.grad(task.loss(model, batch), list(model.values()), create_graph=True)
    return task.loss({n: leaf - 0.5 * slope for (n, leaf), slope in zip(model.items(), slopes, strict=True)}, batch)


def of_detached_pieces(model: dict[str, Tensor], batch: Batch, task: Classification) -> Tensor:
    """Tensors that share memory with those that are moved."""
    held = {name: leaf.detach() for name, leaf in model.items()}
    mixed = interpolate(model, held, 0.25)
    return task.loss(mixed, batch) + squared_distance(model, {n: 2 * leaf for n, leaf in held.items()})


def transfer(features: Tensor, logits: Tensor, batch: Batch) -> Tensor:
    """Features are read twice here, and once by the head."""
    loss = 0.9 * F.cross_entropy(logits, batch.y) + 0.1 * torch.cdist(features, features.detach()).mean()
    return loss + 0.2 * (features - 1).pow(2).mean() + logits.softmax(1).max()


LOSSES: dict[str, Loss] = {
    "a gradient penalty": gradient_penalty,
    "a penalty of the input's gradient": lambda model, batch, task: (
        torch.autograd.grad(
            task.logits(model, Batch(x := batch.x.clone().requires_grad_(), batch.y)).logsumexp(1).sum(),
            [x],
            create_graph=True,
        )[0]
        .square()
        .sum()
    ),
    "meta-learning": adapted,
    "detached pieces": of_detached_pieces,
    "features and logits": lambda model, batch, task: transfer(*task.features_and_logits(model, batch), batch),
    "what the head reads": lambda model, batch, task: transfer(*task.head_inputs_and_logits(model, batch), batch),
    "a power": lambda model, batch, task: task.loss(model, batch) ** 2 + 0.01 * squared_norm(model),
}


@pytest.mark.parametrize("kernel", ["reference", "fast"])
@pytest.mark.parametrize("loss", LOSSES)
def test_an_objective_that_declares_nothing_is_differentiated_as_it_stands(loss: str, kernel: Kernel) -> None:
    """A plain loop with ``torch.optim`` and the objective is what a local update is."""
    task, data = problem(), examples(23, SPEC, seed=2)

    def objective(model: Any, batch: Batch, task: Classification, frozen: Any, draw: Any) -> Tensor:
        return LOSSES[loss](model, batch, task)

    asked = request(data, start_of(task), objective, momentum=0.9, weight_decay=0.01)
    model = {name: leaf.requires_grad_() for name, leaf in start_of(task).items()}
    optimizer = torch.optim.SGD(model.values(), lr=asked.lr, momentum=0.9, weight_decay=0.01)
    for index in asked.plan.batches(CPU):
        optimizer.zero_grad()
        LOSSES[loss](model, Batch(data.x[index], data.y[index]), task).backward()
        optimizer.step()
    assert_equal(looped.train(asked, task, CPU, kernel), {name: leaf.detach() for name, leaf in model.items()})


def test_a_gradient_penalty_counts() -> None:
    """Once, a loss without a graph made its gradient "unused", and the penalty was none."""
    task, data = problem(), examples(23, SPEC, seed=2)

    def plain(model: Any, batch: Batch, task: Classification, frozen: Any, draw: Any) -> Tensor:
        return task.loss(model, batch)

    def penalized(model: Any, batch: Batch, task: Classification, frozen: Any, draw: Any) -> Tensor:
        return gradient_penalty(model, batch, task)

    with_penalty, without = (
        looped.train(request(data, start_of(task), objective), task, CPU) for objective in (penalized, plain)
    )
    assert (with_penalty["hidden.0.weight"] - without["hidden.0.weight"]).abs().max() > 1e-2


def test_other_errors_of_an_objective_stay_what_they_are() -> None:
    def wrong(model: Any, batch: Batch, task: Classification, frozen: Any, draw: Any) -> Tensor:
        return task.loss(model, batch) + (batch.x @ batch.x).sum()

    task, data = problem(), examples(23, InputSpec("image", (1, 2, 8), 5), 2)
    with pytest.raises(RuntimeError, match="Expected size for first two dimensions"):
        looped.train(request(data, start_of(task), wrong), task, CPU)


class Squashed(MultilayerPerceptron):
    """Inherits the layers but not what they compute."""

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(super().features(x))


@loss_of_the_task
def declared(model: Any, batch: Batch, task: Classification, frozen: Any, draw: Any) -> Tensor:
    return task.loss(model, batch)


def undeclared(model: Any, batch: Batch, task: Classification, frozen: Any, draw: Any) -> Tensor:
    return task.loss(model, batch)


def test_a_subclass_is_no_chain() -> None:
    def build() -> ClassificationModel:
        return Squashed(16, (7, 6), 5, True)

    task = Classification(Network(build))
    assert task.network.chain(start_of(task)) is None
    data = examples(23, SPEC, seed=2)
    assert_equal(*(looped.train(request(data, start_of(task), o), task, CPU) for o in (declared, undeclared)))


class Smoothed(Classification):
    """Another cross-entropy under the same loss."""

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(logits, batch.y, label_smoothing=0.2)


class Tempered(Classification):
    """Other logits under the same loss."""

    def logits(self, model: Any, batch: Batch, training: bool = True) -> Tensor:
        return super().logits(model, batch, training) / 4


@pytest.mark.parametrize("kind", [Smoothed, Tempered])
def test_a_task_that_computes_something_else_is_no_chain(kind: type[Classification]) -> None:
    task, data = kind(problem().network), examples(23, SPEC, seed=2)
    found = [looped.train(request(data, start_of(task), o), task, CPU) for o in (declared, undeclared)]
    assert_equal(*found)
    plain = looped.train(request(data, start_of(task), declared), problem(), CPU)
    assert not torch.equal(found[0]["head.weight"], plain["head.weight"])


def test_labels_out_of_range_are_refused() -> None:
    task, data = problem(), examples(23, SPEC, seed=2)
    data.y.add_(5)
    for objective in (declared, undeclared):
        with pytest.raises(IndexError, match="out of bounds"):
            looped.train(request(data, start_of(task), objective), task, CPU)


def proximal(
    model: dict[str, Tensor], batch: Batch, task: Classification, frozen: dict[str, Tensor], draw: None
) -> Tensor:
    return task.loss(model, batch) + 0.05 * squared_distance(model, frozen)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("objective", [proximal, undeclared, declared], ids=lambda function: function.__name__)
def test_local_updates_have_the_bits_of_a_plain_loop(objective: Callable[..., Tensor], bias: bool) -> None:
    task = problem(bias)
    start = start_of(task)
    anchor = {name: leaf + 0.01 for name, leaf in start.items()}
    data = examples(23, SPEC, seed=2)
    asked = request(data, start, objective, frozen=anchor, momentum=0.9, weight_decay=0.01)
    trained = looped.train(asked, task, CPU)

    module = MultilayerPerceptron(16, (7, 6), 5, bias)
    module.load_state_dict(start)
    optimizer = torch.optim.SGD(module.parameters(), lr=asked.lr, momentum=0.9, weight_decay=0.01)
    for index in asked.plan.batches(CPU):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(data.x[index]), data.y[index])
        if objective is proximal:
            loss = loss + 0.05 * squared_distance(dict(module.named_parameters()), anchor)
        loss.backward()
        optimizer.step()
    assert_equal(trained, {name: leaf.detach() for name, leaf in module.named_parameters()})
