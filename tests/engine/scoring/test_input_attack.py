"""Inputs that mislead a model are those of plain loops, within their ball and their bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rayfl.engine.scoring.input_attack import InputAttack

SHAPE, CLASSES = (2, 3, 2), 4
UNIT = np.array([0.5, 2.0]).reshape(2, 1, 1)
LOW, HIGH = np.array([-1.0, -0.5]).reshape(2, 1, 1), np.array([-0.5, 1.5]).reshape(2, 1, 1)


def weights(seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(12, CLASSES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def predicted(w: Tensor, x: Tensor) -> Tensor:
    return (x.flatten(1).sin() @ w).log_softmax(1)


def samples(n: int = 9) -> tuple[Tensor, Tensor]:
    """Most of them between the bounds; some are beyond one."""
    generator = torch.Generator().manual_seed(1)
    share = torch.rand((n, *SHAPE), generator=generator, dtype=torch.float64) * 1.1 - 0.05
    low, high = torch.from_numpy(LOW), torch.from_numpy(HIGH)
    return low + share * (high - low), torch.randint(CLASSES, (n,), generator=generator)


def by_hand(x: Tensor, y: int, w: Tensor, norm: str, loss: str, bounded: bool) -> Tensor:
    """One sample, each number by itself."""
    at, unit = x.clone(), torch.from_numpy(UNIT).expand(SHAPE)
    low, high = (torch.from_numpy(one).expand(SHAPE) for one in (LOW, HIGH))
    for _ in range(5):
        at = at.detach().requires_grad_()
        logs = predicted(w, at[None])[0]
        others = torch.cat([logs[:y], logs[y + 1 :]])
        value = -logs[y] if loss == "cross_entropy" else others.max() - logs[y]
        (slope,) = torch.autograd.grad(value, at)
        if norm == "linf":
            at = at + 0.05 * unit * slope.sign()
            offset = ((at - x) / unit).clamp(-0.12, 0.12)
        else:
            slope = slope * unit  # with respect to distances in units
            offset = (at - x) / unit + 0.05 * slope / float(np.linalg.norm(slope.numpy()))
            offset = offset * min(1.0, 0.12 / float(np.linalg.norm(offset.detach().numpy())))
        at = x + unit * offset
        if bounded:
            for place in np.ndindex(*SHAPE):
                least, most = min(float(x[place]), float(low[place])), max(float(x[place]), float(high[place]))
                at.data[place] = min(max(float(at.detach()[place]), least), most)
    return at.detach()


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("loss", ["cross_entropy", "margin"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_inv_oracle_every_sample_moves_as_in_a_plain_loop(norm: Any, loss: Any, bounded: bool) -> None:
    (x, y), w = samples(), weights()
    bounds = (LOW, HIGH) if bounded else (None, None)
    attack = InputAttack(0.12, 0.05, 5, norm, loss, UNIT, *bounds)
    found = attack.moved(x, y, lambda at: predicted(w, at))
    assert found is not None
    for one, moved, label in zip(x, found, y.tolist(), strict=True):
        torch.testing.assert_close(moved, by_hand(one, label, w, norm, loss, bounded), rtol=0, atol=1e-12)
    away = (found - x) / torch.from_numpy(UNIT)
    farthest = away.abs().flatten(1).amax(1) if norm == "linf" else away.flatten(1).norm(dim=1)
    assert farthest.max() <= 0.12 + 1e-12 and farthest.max() > 0.1
    own = torch.arange(len(y)), y
    assert (predicted(w, found)[own] < predicted(w, x)[own]).all()


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_stacked_inputs_move_as_one_by_one(norm: Any) -> None:
    (x, y), models = samples(8), [weights(0), weights(3)]
    attack = InputAttack(0.12, 0.05, 5, norm, "margin", UNIT, LOW, HIGH)
    stack = x.view(2, 4, *SHAPE)

    def both(at: Tensor) -> Tensor:
        return torch.cat([predicted(w, one) for w, one in zip(models, at, strict=True)])

    found = attack.moved(stack, y, both)
    assert found is not None and found.shape == stack.shape
    for place, w in enumerate(models):
        alone = attack.moved(stack[place], y.view(2, 4)[place], lambda at, w=w: predicted(w, at))
        torch.testing.assert_close(found[place], alone, rtol=0, atol=1e-12)


def test_a_model_that_is_as_good_as_certain_has_a_margin_and_no_cross_entropy_to_climb() -> None:
    (x, _), w = samples(), weights(scale=1000)
    x, w = x.float(), w.float()
    y = predicted(w, x).argmax(1)
    unchanged, moved = (
        InputAttack(0.12, 0.05, 5, "linf", loss, UNIT).moved(x, y, lambda at: predicted(w, at))
        for loss in ("cross_entropy", "margin")
    )
    assert unchanged is not None and moved is not None
    still = (unchanged == x).flatten(1).all(1)
    assert still.any() and not (moved == x).flatten(1).all(1).any()


def test_what_has_no_unit_stays_and_predictions_without_a_slope_are_none() -> None:
    (x, y), w = samples(), weights()
    fixed = np.broadcast_to(UNIT, SHAPE).copy()
    fixed[:, 1] = 0
    for norm in ("linf", "l2"):
        moved = InputAttack(0.12, 0.05, 5, norm, "cross_entropy", fixed).moved(x, y, lambda at: predicted(w, at))  # type: ignore[arg-type]
        assert moved is not None and torch.equal(moved[:, :, 1], x[:, :, 1]) and not torch.equal(moved, x)
    attack = InputAttack(0.12, 0.05, 5, "linf", "cross_entropy", UNIT)
    assert attack.moved(x, y, lambda at: predicted(w, at.detach())) is None
    constant = torch.zeros(len(x), CLASSES, requires_grad=True)
    assert attack.moved(x, y, lambda at: constant * 1) is None
