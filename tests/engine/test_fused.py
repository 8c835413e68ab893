"""The fused step gives the bits of SGD done operation by operation."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rayfl.data.federated import InputSpec
from rayfl.engine import fused, looped
from rayfl.engine.fused import FusedSGD, is_exact
from rayfl.engine.requests import ParameterGroup, TrainRequest
from rayfl.engine.sgd import SGD
from rayfl.engine.workspace import Workspace
from rayfl.models.base import Network
from rayfl.params import Layout, leaves
from rayfl.tasks import Classification
from tests.engine.problems import CPU, examples, request
from tests.toys import TwoLayers, assert_equal

SHAPES = ((3, 7), (16,), (), (5, 1, 3), (33,), (64, 64), (130,))
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def drawn(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for i, s in enumerate(SHAPES)}


def update(tree: dict[str, Tensor], **options: Any) -> TrainRequest:
    base: Any = request(examples(3, InputSpec("image", (6,), 4), 0), tree)
    return TrainRequest(**{**vars(base), **options})


@TYPES
@settings(deadline=None, max_examples=40)
@given(
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    weight_decay=st.sampled_from([0.0, 1e-4, 0.3]),
    max_norm=st.sampled_from([None, 0.5]),
    lr=st.sampled_from([0.0, 0.1, 1.7]),
    group=st.sampled_from(
        [
            None,
            ParameterGroup(0.3, 0.0),
            ParameterGroup(weight_decay=0.2, bounds=(-0.5, 0.5)),
            ParameterGroup(None, 0.7),
        ]
    ),
    seed=st.integers(0, 1000),
)
def test_the_same_bits(
    dtype: torch.dtype,
    momentum: float,
    weight_decay: float,
    max_norm: float | None,
    lr: float,
    group: ParameterGroup | None,
    seed: int,
) -> None:
    tree = drawn(seed, dtype)
    groups = () if group is None else (("w1", group), ("w4", group))
    asked = update(tree, lr=lr, momentum=momentum, weight_decay=weight_decay, max_grad_norm=max_norm, groups=groups)
    sgd, layout = SGD(asked, list(tree)), Layout.of(tree)
    flat = layout.pack(tree, CPU)
    velocity = torch.zeros_like(flat) if sgd.has_momentum else None
    step = FusedSGD(sgd, layout, list(tree), flat, velocity, Workspace())
    moved = {name: leaf.clone() for name, leaf in tree.items()}
    buffers = [torch.zeros_like(leaf) for leaf in moved.values()] if sgd.has_momentum else []
    for number in range(3):
        gradients = list(drawn(seed + 1000 * number, dtype).values())
        gradients[0] = gradients[0].T.contiguous().T
        before = [gradient.clone() for gradient in gradients]
        sgd.step(list(moved.values()), gradients, buffers)
        step.step(gradients)
        assert all(torch.equal(a, b) for a, b in zip(gradients, before, strict=True))
    assert_equal(dict(leaves(layout.views(flat))), moved)
    if velocity is not None:
        assert_equal(dict(leaves(layout.views(velocity))), dict(zip(tree, buffers, strict=True)))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="known of x86 alone")
@TYPES
def test_it_is_in_use_on_this_machine(dtype: torch.dtype) -> None:
    assert is_exact(dtype, CPU)
    assert not is_exact(torch.float16, CPU)
    assert not is_exact(dtype, torch.device("cuda"))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_where_it_rounds_otherwise_it_is_not_used(momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(lambda: TwoLayers(6, 9, 4))
    task = Classification(network)
    asked = request(examples(17, InputSpec("image", (6,), 4), 0), network.initialize(0), momentum=momentum)
    expected = looped.train(asked, task, CPU)
    exact = fused.fused_step

    def rough(rule: ParameterGroup, parameters: list[Tensor], *others: Any) -> None:
        exact(rule, parameters, *others)
        torch._foreach_mul_(parameters, 1.001)

    monkeypatch.setattr(fused, "fused_step", rough)
    is_exact.cache_clear()
    try:
        assert not is_exact(torch.float32, CPU)
        assert_equal(looped.train(asked, task, CPU), expected)
    finally:
        is_exact.cache_clear()


def test_one_gradient_for_two_tensors_is_left_as_it_is() -> None:
    """Autograd may hand out one tensor twice, or views of constants."""
    tree = {"a": torch.ones(40), "b": torch.ones(40)}
    constant = torch.arange(40.0)

    def objective(model: Any, *_: Any) -> Tensor:
        loss: Tensor = ((model["a"] + model["b"]) * constant).sum()
        return loss

    task = Classification(Network(lambda: TwoLayers(6, 9, 4)))
    asked = update(tree, objective=objective, lr=0.5, momentum=0.0, weight_decay=0.0)
    trained = looped.train(asked, task, CPU)
    assert_equal(trained, dict.fromkeys(tree, 1 - 0.5 * asked.plan.steps * constant))
    assert torch.equal(constant, torch.arange(40.0))
