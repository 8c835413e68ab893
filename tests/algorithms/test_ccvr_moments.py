"""CCVR: invariants CCVR of sums over samples, their Gaussians, and features drawn from these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.parts.moments import class_moments, gaussian_of, virtual_features
from rayfl.params import Tree, map_leaves
from tests.support.toys import assert_close


def problem(counts: Sequence[Sequence[int]] = ((9, 4, 0), (1, 6, 2), (0, 3, 12)), offset: float = 0.0) -> Any:
    """Features (n_k, 4) and labels of clients with given numbers of samples by class."""
    generator = np.random.default_rng(5)
    shape = generator.standard_normal((3, 4, 4))
    parts = []
    for row in counts:
        labels = generator.permutation(np.repeat(np.arange(3), row))
        noise = generator.standard_normal((len(labels), 4))
        parts.append((np.einsum("nd,nde->ne", noise, shape[labels]) + labels[:, None] + offset, labels))
    return parts


def summed(parts: Any) -> Tree:
    """The moments of all clients together."""
    trees = [class_moments(torch.from_numpy(z), torch.from_numpy(y), 3) for z, y in parts]
    return map_leaves(lambda *leaves: torch.stack(leaves).sum(0), *trees)


def equations_3_and_4(parts: Any, label: int) -> tuple[np.ndarray, np.ndarray]:
    """mu_c and Sigma_c from every client's count, mean and covariance, as the paper writes them."""
    known = []
    for z, y in parts:
        own = z[y == label]
        # a covariance of one sample has the weight 0
        known += [(len(own), own.mean(0), np.cov(own.T) if len(own) > 1 else 0 * np.cov(z.T))] if len(own) else []
    total = sum(count for count, _, _ in known)
    mu = sum(count / total * mean for count, mean, _ in known)
    covariance = sum((count - 1) / (total - 1) * one for count, _, one in known)
    covariance = covariance + sum(count / (total - 1) * np.outer(mean, mean) for count, mean, _ in known)
    return mu, covariance - total / (total - 1) * np.outer(mu, mu)


@pytest.mark.parametrize("label", range(3))
def test_inv_ccvr_1_sums_give_equations_3_and_4_and_the_gaussian_of_all_samples(label: int) -> None:
    parts = problem()
    mean, root = gaussian_of(summed(parts), label)
    mu, covariance = equations_3_and_4(parts, label)
    pooled = np.concatenate([z[y == label] for z, y in parts])
    for expected_mean, expected in ((mu, covariance), (pooled.mean(0), np.cov(pooled.T))):
        assert_close(mean, torch.from_numpy(expected_mean), 1e-12)
        assert_close(root @ root, torch.from_numpy(expected), 1e-12)
    assert_close(root, root.T, 1e-14)
    assert torch.linalg.eigvalsh(root).min() >= 0


def test_inv_ccvr_2_how_samples_are_dealt_to_clients_makes_no_difference() -> None:
    parts = problem()
    z, y = (np.concatenate(one) for one in zip(*parts, strict=True))
    order = np.random.default_rng(0).permutation(len(y))
    dealt = [(z[index], y[index]) for index in np.array_split(order, 5)]
    assert_close(summed(parts), summed(dealt), 1e-12)


def test_a_covariance_far_from_the_origin_keeps_its_digits() -> None:
    near, far = (gaussian_of(summed(problem(offset=offset)), 1)[1] for offset in (0.0, 1000.0))
    assert_close(near, far, 1e-6)


def test_inv_ccvr_3_few_samples_give_features_in_their_span_and_one_gives_itself() -> None:
    parts = problem(((2, 1, 0), (1, 0, 4)))
    moments = summed(parts)
    drawn, labels = virtual_features(moments, 50, np.random.default_rng(0))
    pooled = np.concatenate([z[y == 0] for z, y in parts])
    apart = pooled - pooled.mean(0)
    _, singular, directions = np.linalg.svd(apart)
    assert (singular > 1e-3).sum() == 2
    own = drawn[labels == 0].numpy() - pooled.mean(0)
    assert np.abs(own @ directions[2:].T).max() < 1e-12
    assert np.abs(own @ directions[:2].T).max() > 0.5
    single = torch.from_numpy(parts[0][0][parts[0][1] == 1])
    assert_close(drawn[labels == 1], single.expand(50, -1), 1e-12)


def test_drawn_features_have_the_mean_and_the_covariance_and_a_class_without_samples_has_none() -> None:
    parts = problem(((30, 0, 12), (5, 0, 20)))
    drawn, labels = virtual_features(summed(parts), 40_000, np.random.default_rng(0))
    assert labels.bincount(minlength=3).tolist() == [40_000, 0, 40_000]
    for label in (0, 2):
        mu, covariance = equations_3_and_4(parts, label)
        own = drawn[labels == label].numpy()
        scale = np.sqrt(np.diag(covariance).max())
        assert np.abs(own.mean(0) - mu).max() < 0.03 * scale
        assert np.abs(np.cov(own.T) - covariance).max() < 0.05 * scale**2


def test_drawn_features_do_not_hang_on_which_eigenvectors_are_found() -> None:
    z = torch.cat([torch.eye(4), -torch.eye(4)]).double()  # every vector is an eigenvector
    labels = torch.zeros(8, dtype=torch.int64)
    moved = z + 1e-10 * torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, other = (
        virtual_features(class_moments(features, labels, 1), 30, np.random.default_rng(1))[0] for features in (z, moved)
    )
    assert_close(one, other, 1e-8)
