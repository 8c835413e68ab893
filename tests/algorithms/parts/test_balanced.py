"""The prior of the balanced softmax: powers of counts, and classes that a client lacks."""

from __future__ import annotations

import math

import pytest
import torch

from algorithms.parts.balanced import ABSENT, log_prior

COUNTS = torch.tensor([4.0, 0.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 3.0])
def test_it_is_the_logarithm_of_a_power_of_the_counts(exponent: float) -> None:
    assert log_prior(COUNTS, exponent).tolist() == [exponent * math.log(4), ABSENT, 0]
    assert log_prior(COUNTS, exponent, absent_count=0.5).tolist() == pytest.approx(
        [exponent * math.log(4), exponent * math.log(0.5), 0], rel=1e-15
    )


def test_without_exponent_every_class_is_alike() -> None:
    assert log_prior(COUNTS, 0.0).tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_absent_has_no_share_and_no_slope(dtype: torch.dtype) -> None:
    logits = torch.tensor([1.0, 300.0, -2.0], dtype=dtype, requires_grad=True)
    shares = (logits + log_prior(COUNTS, 1.0).to(dtype)).softmax(0)
    assert shares[1] == 0
    (slopes,) = torch.autograd.grad(-shares[0].log(), logits)
    assert slopes[1] == 0 != slopes[0]
