"""Cosines of updates with their mean."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rayfl.valuation.cosine import cosines


def test_cosines_are_those_of_the_updates() -> None:
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(5, 40, generator=generator, dtype=torch.float64)
    weights = torch.rand(5, generator=generator, dtype=torch.float64) + 0.1
    mean = (weights[:, None] * updates).sum(0) / weights.sum()
    expected = F.cosine_similarity(updates, mean[None], dim=1)
    assert torch.allclose(cosines(updates @ updates.T, weights), expected, atol=1e-12, rtol=0)


def test_nothing_has_no_direction() -> None:
    updates = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    assert cosines(updates @ updates.T, torch.ones(3, dtype=torch.float64)).tolist() == [1.0, 0.0, 1.0]
    opposed = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    assert cosines(opposed @ opposed.T, torch.ones(2, dtype=torch.float64)).tolist() == [0.0, 0.0]
