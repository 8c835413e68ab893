"""The three ways to take a step give the same bits wherever more than one is possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from algorithms.base import Algorithm
from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from algorithms.fedprox import FedProx
from algorithms.floco_plus import FlocoPlus
from algorithms.pfedme import PFedMe
from rayfl import objectives
from rayfl.data.federated import InputSpec
from rayfl.engine import fused, looped, moved, steps
from rayfl.engine.looped import _GATHERED_BYTES, _stretches
from rayfl.engine.requests import ParameterGroup
from rayfl.models.perceptron import TwoNN
from rayfl.models.zoo import TwoCNN
from rayfl.objectives import Declared, Pull, declared_by, is_loss_of_the_task, loss_of_the_task
from rayfl.params import ALIGNMENT_BYTES, squared_distance
from rayfl.tasks import Batch, Classification
from tests.engine.problems import CPU, cross_entropy, examples, request
from tests.toys import assert_close, assert_equal

SPEC = InputSpec("image", (1, 4, 4), 5)
OPTIONS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "without momentum": {"momentum": 0.0},
    "clipped": {"max_grad_norm": 0.05},
    "groups": {"groups": (("head.bias", ParameterGroup(lr=0.3)), ("head.weight", ParameterGroup(momentum=0.0)))},
    "bounds": {"groups": (("head.weight", ParameterGroup(bounds=(-0.1, 0.1))),)},
}


@loss_of_the_task
def declared(model: Any, batch: Batch, task: Classification, frozen: Any, draw: Any) -> Tensor:
    raise AssertionError("need not be called")


@pytest.mark.parametrize("exact", [True, False], ids=["fused", "operation by operation"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kernel", ["reference", "fast"])
def test_the_bits_do_not_depend_on_the_way(
    options: str, bias: bool, exact: bool, kernel: steps.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moved, "is_exact", lambda dtype, device: exact and fused.is_exact(dtype, device))
    task = Classification(TwoNN(hidden=(7, 6), bias=bias).network(SPEC))
    start = task.network.initialize(3)
    velocity = [{path: torch.full_like(leaf, 0.01) for path, leaf in start.items()} for _ in range(2)]
    trained = [
        looped.train(
            replace(
                request(examples(23, SPEC, seed=2), start, objective), velocity=buffers, **OPTIONS[options]
            ),
            task, CPU, kernel,
        )
        for objective, buffers in zip((declared, cross_entropy), velocity, strict=True)
    ]  # fmt: skip
    assert_equal(*trained)
    assert_equal(*velocity)
    assert not torch.equal(trained[0]["head.weight"], start["head.weight"])


class Near:
    """A loss and a pull, declared or not."""

    def __init__(self, factor: float, said: bool) -> None:
        self.factor, self.said = factor, said

    def form(self) -> Declared | None:
        return Declared(Pull("anchor", self.factor)) if self.said else None

    @declared_by(form)
    def objective(self, model: Any, batch: Batch, task: Classification, frozen: Any, draw: Any) -> Tensor:
        assert not self.said, "need not be called"
        return task.loss(model, batch) + self.factor * (squared_distance(model, frozen["anchor"]) / 2)


@pytest.mark.parametrize("exact", [True, False], ids=["fused", "operation by operation"])
@pytest.mark.parametrize("factor", [1.0, 0.3, 1e-4])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_pull_is_that_of_autograd(options: str, factor: float, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved, "is_exact", lambda dtype, device: exact and fused.is_exact(dtype, device))
    task = Classification(TwoNN(hidden=(37, 6)).network(SPEC))
    start, anchor = task.network.initialize(3), task.network.initialize(4)
    trained = [
        looped.train(
            replace(
                request(examples(23, SPEC, seed=2), start, Near(factor, said).objective),
                frozen={"anchor": anchor}, **OPTIONS[options],
            ),
            task, CPU,
        )
        for said in (True, False)
    ]  # fmt: skip
    assert_equal(*trained)


class Enveloped(PFedMe):
    """The same, of which the engine cannot know."""

    def objective(self, model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> Tensor:
        return super().objective(model, batch, task, frozen, draw)


@pytest.mark.parametrize("exact", [True, False], ids=["fused", "operation by operation"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("inner_steps", [1, 3])
def test_an_envelope_is_that_of_autograd(
    inner_steps: int, momentum: float, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moved, "is_exact", lambda dtype, device: exact and fused.is_exact(dtype, device))
    task = Classification(TwoNN(hidden=(37, 6)).network(SPEC))
    start, centre = task.network.initialize(3), task.network.initialize(4)
    found = {}
    for method in (PFedMe, Enveloped):
        own = method(inner_steps=inner_steps, proximal_weight=0.7)
        base = request(examples(47, SPEC, seed=2), {"personal": start, "local": centre}, own.objective)
        flags = own.renewals(np.random.default_rng(0), base.plan.steps)
        velocity: dict[str, Tensor] = {}
        own_request = replace(
            base, frozen={"pull": 0.3}, draws={name: torch.from_numpy(flag) for name, flag in flags.items()},
            momentum=momentum, weight_decay=0.02, velocity=velocity,
            groups=(("local", ParameterGroup(lr=0.4, momentum=0.0, weight_decay=0.0)),),
        )  # fmt: skip
        with monkeypatch.context() as patch:
            if method is PFedMe:
                patch.setattr(steps, "_by_autograd", None)  # the only other way
            found[method] = looped.train(own_request, task, CPU), velocity
    assert_equal(*(trained for trained, _ in found.values()))
    assert_equal(*(velocity for _, velocity in found.values()))
    trained = found[PFedMe][0]
    assert not torch.equal(trained["local"]["head.weight"], centre["head.weight"])
    assert not torch.equal(trained["personal"]["head.weight"], start["head.weight"])


@pytest.mark.parametrize(
    "rule", [ParameterGroup(momentum=0.5), ParameterGroup(weight_decay=0.1), ParameterGroup(bounds=(-0.1, 0.1)), None]
)
def test_an_envelope_whose_centre_never_rests_is_left_to_autograd(
    rule: ParameterGroup | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Classification(TwoNN(hidden=(7, 6)).network(SPEC))
    start, centre = task.network.initialize(3), task.network.initialize(4)
    trained = []
    for method in (PFedMe(), Enveloped()):
        base = request(examples(23, SPEC, seed=2), {"personal": start, "local": centre}, method.objective)
        flags = method.renewals(np.random.default_rng(0), base.plan.steps)["renew"]
        more: dict[str, Any] = {"max_grad_norm": 0.05} if rule is None else {"groups": (("local", rule),)}
        base = replace(
            base, frozen={"pull": 0.3}, draws={"renew": torch.from_numpy(flags)}, momentum=0.0, weight_decay=0.0, **more
        )
        monkeypatch.setattr(steps, "_enveloped", None)
        trained.append(looped.train(base, task, CPU))
    assert_equal(*trained)


def test_methods_that_declare_a_pull() -> None:
    for form, factor in (("half_squared", 0.3), ("squared", 0.6)):
        method = FedProx(proximal_weight=0.3, proximal_form=form)  # type: ignore[arg-type]
        assert objectives.declared(method.objective) == Declared(Pull("received", factor))
    assert objectives.declared(FedProx(proximal_form="norm_per_layer").objective) is None
    assert is_loss_of_the_task(FedProx(proximal_weight=0).objective)
    assert objectives.declared(Ditto(proximal_weight=2).personal_objective) == Declared(Pull("received", 2))
    assert objectives.declared(Ditto(proximal_form="norm_per_layer").personal_objective) is None
    assert objectives.declared(FlocoPlus().personal_objective) is None

    class Other(Ditto):
        def distance(self, model: Any, anchor: Any) -> Tensor:
            return super().distance(model, anchor)

    assert objectives.declared(Other().personal_objective) is None

    class Further(FedProx):
        def _proximity(self, model: Any, received: Any, task: Any) -> Tensor | float:
            return 2 * super()._proximity(model, received, task)

    assert objectives.declared(Further().objective) is None


class OtherLoss(Classification):
    """Twice the loss."""

    def loss(self, model: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return 2 * super().loss(model, batch)


def test_a_task_with_a_loss_of_its_own_is_asked_for_it() -> None:
    task = OtherLoss(TwoNN(hidden=(7, 6)).network(SPEC))
    with pytest.raises(AssertionError, match="need not be called"):
        looped.train(request(examples(5, SPEC, 0), task.network.initialize(0), declared), task, CPU)


def test_which_objectives_are_declared() -> None:
    class Penalized(FedAvg):
        def objective(self, model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> Tensor:
            return super().objective(model, batch, task, frozen, draw)

    assert is_loss_of_the_task(Algorithm.objective)
    assert is_loss_of_the_task(FedAvg().objective)
    assert not is_loss_of_the_task(FedProx().objective)
    assert not is_loss_of_the_task(Penalized().objective)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.sampled_from([4, 16, 60, 64, 3136, _GATHERED_BYTES // 20, 2 * _GATHERED_BYTES]),
)
def test_stretches_cover_all_steps_and_begin_batches_where_fresh_memory_would(sizes: list[int], row: int) -> None:
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    found = list(_stretches(bounds, row))
    assert found[0][0] == 0
    assert found[-1][1] == len(sizes)
    assert all(before[1] == after[0] for before, after in pairwise(found))
    for first, last in found:
        assert all((bounds[step] - bounds[first]) * row % ALIGNMENT_BYTES == 0 for step in range(first, last))
        assert (bounds[last - 1] - bounds[first]) * row < _GATHERED_BYTES


@pytest.mark.parametrize("kernel", ["reference", "fast"])
def test_images_are_laid_out_for_convolutions(kernel: steps.Kernel) -> None:
    spec = InputSpec("image", (3, 8, 8), 4)
    task = Classification(TwoCNN().network(spec))
    start, seen = task.network.initialize(0), []

    def objective(model: Any, batch: Batch, task: Classification, frozen: Any, draw: Any) -> Tensor:
        seen.append(batch.x.is_contiguous(memory_format=torch.channels_last))
        return task.loss(model, batch)

    asked = request(examples(23, spec, 0), start, objective, epochs=1)
    trained = looped.train(asked, task, CPU, kernel)
    assert seen == [kernel == "fast"] * 3
    assert_close(trained, looped.train(replace(asked, objective=cross_entropy), task, CPU), 1e-5)


def test_batches_are_what_the_plan_says() -> None:
    data = examples(37, SPEC, seed=1)
    asked = request(data, {"w": torch.zeros(1)}, batch_size=8, epochs=3)
    for batch, index in zip(looped._batches(asked, CPU), asked.plan.batches(CPU), strict=True):
        assert torch.equal(batch.x, data.x[index])
        assert torch.equal(batch.y, data.y[index])
        assert batch.x.data_ptr() % ALIGNMENT_BYTES == 0
