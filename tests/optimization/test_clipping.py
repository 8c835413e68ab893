"""Bounds, clipping, and steps where nothing is to be moved."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rayfl.errors import MethodError
from rayfl.optimization.optimizers import OptimizerName, ParameterGroup, Rule, clipped
from tests.support.gradients import PLACES, PLAIN, PULLED, ByTorch, function, given, keeping, trained, tree_of, updates
from tests.support.optimizer_rules import ADAMS, RULES
from tests.support.toys import assert_close, assert_equal

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def unread(model: Any, batch: Any, task: Any, frozen: Any, draw: Any) -> Tensor:
    """Its gradient is 1 for all of ``first``, and none for ``second``."""
    total: Tensor = batch.mean(0 * batch.x.sum(-1)) + sum(leaf.sum() for leaf in model["first"].values())
    return total


@MODES
def test_what_is_not_read_is_moved_by_adams_decay_by_the_learning_rate(mode: str) -> None:
    """Coupled decay is all of its gradient, and Adam makes steps of one length; AdamW's shrinks it by its share."""
    start = updates(unread, Rule(0.0), torch.float64, (1,))[0].trainable["second"]["b.weight"]
    expected = {
        Rule(0.01, "adam", weight_decay=1e-3): start - 0.01 * start.sign(),
        Rule(0.01, "adamw", weight_decay=1e-3): start * (1 - 1e-5),
        Rule(0.01, "adam"): start,
    }
    for rule, after in expected.items():
        (found,) = trained(mode, updates(unread, rule, torch.float64, (1,)))
        assert float((found["second"]["b.weight"] - after).abs().max()) < 1e-5 * 0.01 * 100
        assert torch.equal(found["second"]["b.weight"], start) == (not rule.weight_decay)


@pytest.mark.parametrize("optimizer", ADAMS)
@MODES
def test_adam_moves_nothing_where_loss_and_penalty_have_no_gradient(mode: str, optimizer: OptimizerName) -> None:
    """The gradient of a distance of 0 is 0, and no round-off."""
    made = []
    for update in updates(PULLED, Rule(0.01, optimizer), torch.float32):
        data = replace(update.examples, x=update.examples.x.clone())
        data.x[:, PLACES["b.weight"]] = 0
        made.append(
            replace(update, examples=data, frozen={f"{key} anchor": update.trainable[key] for key in update.trainable})
        )
    for found, update in zip(trained(mode, made), made, strict=True):
        assert torch.equal(found["second"]["b.weight"], update.trainable["second"]["b.weight"])
        assert not torch.equal(found["first"]["a.weight"], update.trainable["first"]["a.weight"])


@pytest.mark.parametrize("optimizer", ["sgd", *ADAMS])
@MODES
def test_bounds_hold_after_every_step(mode: str, optimizer: OptimizerName) -> None:
    groups = (("second", ParameterGroup(bounds=(-0.25, 0.25))),)
    requests = updates(PULLED, Rule(0.1, optimizer), torch.float64, groups=groups)
    free = trained(mode, updates(PULLED, Rule(0.1, optimizer), torch.float64))
    for found, unbounded in zip(trained(mode, requests), free, strict=True):
        assert (
            float(found["second"]["b.weight"].abs().max()) <= 0.25 < float(unbounded["second"]["b.weight"].abs().max())
        )
        assert_close(found["first"], unbounded["first"], 1e-12)


@pytest.mark.parametrize("rule", [Rule(0.1, momentum=0.9), Rule(0.1, "adam"), Rule(0.1, "adamw")], ids=str)
@MODES
def test_tensors_without_elements_are_left_alone(mode: str, rule: Rule) -> None:
    """What stays with a client has placeholders of no elements in the tree."""
    requests = keeping(updates(unread, rule, torch.float32, max_grad_norm=1.0))
    holed = [replace(r, trainable={**r.trainable, "second": {"b.weight": torch.zeros(0)}}) for r in requests]
    for found in trained(mode, holed):
        assert found["second"]["b.weight"].shape == (0,)
        assert found["first"]["a.bias"].isfinite().all()


def test_momentum_that_another_optimizer_would_ignore_is_refused() -> None:
    with pytest.raises(MethodError, match=r"momentum=0\.9.*adam.*options of its own.*optimizer='sgd'"):
        ParameterGroup(momentum=0.9).applied(Rule(0.1, "adam"))
    assert ParameterGroup(momentum=0.9, optimizer="sgd").applied(Rule(0.1, "adam")).slots == ("momentum",)
    assert ParameterGroup(optimizer="adam").applied(Rule(0.1, momentum=0.9)).slots == ("m", "v")
    assert ParameterGroup(momentum=0.0).applied(Rule(0.1, "adamw")).slots == ("m", "v")


@pytest.mark.parametrize("rule", [RULES["nesterov"], RULES["adam-decay"], RULES["adamw-decay"]], ids=str)
@pytest.mark.parametrize("max_norm", [1e-3, 2.0, 1e9])
@MODES
@pytest.mark.two_cases
def test_gradients_are_clipped_before_decay_and_moments(mode: str, max_norm: float, rule: Rule) -> None:
    """Each client's by its own norm, over all of its tensors, whichever clients are stacked with it."""
    requests = updates(function, rule, torch.float64, max_grad_norm=max_norm)
    for update, found in zip(requests, trained(mode, requests), strict=True):
        assert_close(found, ByTorch(update).run(max_norm), 1e-12)


@MODES
def test_a_limit_that_is_not_reached_changes_no_bit(mode: str) -> None:
    """Not even with a sum of terms, which is taken by autograd then."""
    one, other = (trained(mode, updates(function, Rule(0.1), torch.float32, max_grad_norm=n)) for n in (None, 1e9))
    for left, right in zip(one, other, strict=True):
        assert_equal(left, right)


@pytest.mark.parametrize("stacked", [False, True])
def test_clipped_gradients_have_the_limits_length_and_their_direction(stacked: bool) -> None:
    gradients = [torch.randn(4, 3, 5), torch.randn(4, 7), torch.randn(4)]
    rows = [[g[k] for g in gradients] for k in range(4)] if stacked else [gradients]
    found = clipped(gradients, 0.5, stacked)
    for k, row in enumerate(rows):
        own = torch.cat([g.flatten() for g in row])
        cut = torch.cat([(g[k] if stacked else g).flatten() for g in found])
        assert 0.5 * (1 - 1e-5) < float(cut.norm()) <= 0.5 * (1 + 1e-6)
        assert float(torch.cosine_similarity(own, cut, dim=0)) == pytest.approx(1.0, abs=1e-6)
        if stacked:
            for mine, whole in zip(clipped(row, 0.5), found, strict=True):
                assert torch.allclose(mine, whole[k], rtol=1e-6)


def test_the_reference_is_fed_what_the_engine_is() -> None:
    """Steps of plain SGD are the sum of the gradients."""
    (update,) = updates(PLAIN, Rule(0.1), torch.float64, (5,))
    moved = tree_of(-0.1 * torch.stack(given(update)).sum(0))
    (found,) = trained("looped", [update])
    for key in ("first", "second"):
        for name, leaf in found[key].items():
            assert math.isclose(
                float((leaf - update.trainable[key][name] - moved[key][name]).abs().max()), 0, abs_tol=1e-14
            )
