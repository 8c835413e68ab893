"""Losses of two views, votes of neighbours and signs of a collapse, against loops over samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.functional import normalize

from rayfl.metrics.representations import RepresentationMeasures, linear_classes, nearest_classes, spread
from rayfl.metrics.views import nt_xent, towards

DIMENSION = 5


def drawn(count: int, seed: int = 0, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *(shape or (2, DIMENSION)), generator=generator, dtype=torch.float64)


def cosine(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum() / math.sqrt(float(one.square().sum()) * float(other.square().sum())))


def nt_xent_by_loops(views: Tensor, temperature: float) -> list[float]:
    """Of each sample, by the definition: one of 2 n - 1 other views is the right one."""
    flat = [(sample, view) for sample in range(len(views)) for view in (0, 1)]
    losses = []
    for sample in range(len(views)):
        both = []
        for view in (0, 1):
            me = views[sample, view]
            right = math.exp(cosine(me, views[sample, 1 - view]) / temperature)
            others = [math.exp(cosine(me, views[s, v]) / temperature) for s, v in flat if (s, v) != (sample, view)]
            both.append(-math.log(right / sum(others)))
        losses.append(sum(both) / 2)
    return losses


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_nt_xent_is_a_cross_entropy_among_all_other_views(count: int, temperature: float) -> None:
    views = drawn(count)
    expected = nt_xent_by_loops(views, temperature)
    np.testing.assert_allclose(nt_xent(views, temperature), expected, rtol=1e-10, atol=1e-12)
    pieces = [nt_xent(views, temperature, rows=slice(first, first + 2)) for first in range(0, count, 2)]
    np.testing.assert_allclose(torch.cat(pieces), expected, rtol=1e-10, atol=1e-12)


def test_nt_xent_knows_nothing_of_padding_also_in_stacks_and_gradients() -> None:
    sizes, width = (3, 1, 5), 5
    views = torch.stack([drawn(width, seed) for seed in range(3)])
    masks = torch.stack([(torch.arange(width) < size).double() for size in sizes])

    def mean(one: Tensor, mask: Tensor) -> Tensor:
        return (nt_xent(one, 0.5, mask) * mask).sum() / mask.sum()

    found, slopes = vmap(mean)(views, masks), vmap(grad(mean))(views, masks)
    for client, size in enumerate(sizes):
        alone = views[client, :size].clone().requires_grad_()
        value = nt_xent(alone, 0.5).mean()
        (slope,) = torch.autograd.grad(value, alone)
        assert found[client] == pytest.approx(float(value.detach()), rel=1e-12, abs=1e-12)
        torch.testing.assert_close(slopes[client, :size], slope)
        assert not slopes[client, size:].any()


def test_predictions_are_drawn_to_the_other_views_projection_which_is_a_constant() -> None:
    predictions, targets = drawn(4, 1).requires_grad_(), drawn(4, 2).requires_grad_()
    found = towards(predictions, targets)
    expected = [
        -(cosine(p[0], z[1]) + cosine(p[1], z[0])) / 2
        for p, z in zip(predictions.detach(), targets.detach(), strict=True)
    ]
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-12)
    slopes = torch.autograd.grad(found.sum(), [predictions, targets], allow_unused=True)
    assert slopes[0].abs().sum() > 0 and slopes[1] is None


def knn_by_loops(
    features: Tensor, known: Tensor, labels: list[int], count: int, temperature: float, own: bool
) -> list[int]:
    found = []
    for i, feature in enumerate(features):
        near = sorted((-cosine(feature, one), j) for j, one in enumerate(known) if not (own and i == j))[:count]
        votes = dict.fromkeys(range(max(labels) + 1), 0.0)
        for minus, j in near:
            votes[labels[j]] += math.exp(-minus / temperature)
        found.append(max(votes, key=lambda label: votes[label]))
    return found


@pytest.mark.parametrize("count", [1, 4, 200])
@pytest.mark.parametrize("own", [False, True])
def test_neighbours_vote_by_their_cosines(count: int, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    known = normalize(drawn(23, 3, DIMENSION), dim=-1)
    features = known if own else normalize(drawn(9, 4, DIMENSION), dim=-1)
    labels = torch.arange(23) % 4
    expected = knn_by_loops(features, known, labels.tolist(), count, 0.1, own)
    assert nearest_classes(features, known, labels, 4, count, 0.1, own).tolist() == expected
    monkeypatch.setattr("rayfl.metrics.representations._VOTES", 50)  # in pieces
    assert nearest_classes(features, known, labels, 4, count, 0.1, own).tolist() == expected


def test_a_linear_probe_finds_classes_that_a_line_divides_and_the_only_class() -> None:
    known, features = drawn(60, 5, DIMENSION), drawn(40, 6, DIMENSION)
    labels = (known[:, 0] > known[:, 1]).long()
    right = (features[:, 0] > features[:, 1]).long()
    assert (linear_classes(features, known, labels) == right).double().mean() > 0.9
    assert linear_classes(features, known, torch.full((60,), 3)).tolist() == [3] * 40


def test_the_spread_is_0_of_equal_features_and_1_of_directions_alike() -> None:
    assert spread(normalize(torch.ones(9, 7), dim=-1)) == pytest.approx(0, abs=1e-6)
    assert spread(normalize(drawn(20_000, 7, 16), dim=-1)) == pytest.approx(1, abs=0.01)


def test_sums_and_metrics() -> None:
    measures = RepresentationMeasures(("linear_top1",))
    rows = torch.tensor([[0.5, 0.2, 1, 1, 0], [1.5, 0.2, 1, 0, 1], [1.0, 0.2, 1, 1, 1]])
    vector = measures.statistics(rows, torch.zeros(3)).numpy()
    found = measures.values(vector)
    assert {name: pytest.approx(float(value), rel=1e-6) for name, value in found.items()} == {
        "knn_top1": 2 / 3, "linear_top1": 2 / 3, "loss": 1.0, "feature_std": 0.2,
    }  # fmt: skip
    alone = RepresentationMeasures()
    without = alone.values(alone.statistics(torch.tensor([[0.5, 0.2, 0, 0]]), torch.zeros(1)).numpy())
    assert math.isnan(without["knn_top1"]) and without["loss"] == 0.5
    assert "no training samples" in alone.undefined("knn_top1") and not alone.undefined("loss")
