"""Gaussians of features: estimates and classifier by hand, folds, and the coefficients of their interpolation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import multivariate_normal
from torch import Tensor

from algorithms.parts.gaussians import Validation, classifier, estimated, folds, frequencies, interpolated
from rayfl.params import Tree
from tests.support.toys import assert_close

KNOWN = {"means": torch.tensor([[1.0, 0], [0, 1], [5, 5]]).double(), "covariance": torch.eye(2).double()}


def some(count: int = 40, classes: int = 3, width: int = 2, apart: float = 2.0) -> tuple[Tensor, Tensor]:
    """Features around a centre for each class, and labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % classes
    centres = apart * torch.randn(classes, width, generator=generator, dtype=torch.float64)
    return centres[labels] + torch.randn(count, width, generator=generator, dtype=torch.float64), labels


def test_inv_fda_estimates_by_hand() -> None:
    features = torch.tensor([[0.0, 0], [2, 0], [1, 3], [0, 2], [6, 5]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 0, 1, 2])
    found = estimated(features, labels, KNOWN, least=2, ridge=0.5)
    assert_close(found["means"], torch.tensor([[1.0, 1], [0, 1], [5, 5]]).double(), 1e-12)
    # deviations (-1, -1), (1, -1), (0, 2), (0, 1), (1, 0), and four degrees of freedom
    assert_close(found["covariance"], torch.tensor([[3 / 4 + 0.5, 0], [0, 7 / 4 + 0.5]]).double(), 1e-12)
    one = estimated(features[:1], labels[:1], KNOWN, least=1, ridge=0.5)
    assert_close(one["covariance"], 0.5 * torch.eye(2).double(), 1e-12)


def test_inv_fda_the_classifier_is_the_posterior_of_gaussians() -> None:
    features, labels = some()
    gaussians = estimated(features, labels, KNOWN, 2, 0.1)
    priors = frequencies(labels[:7], 3, 0.01)
    assert abs(float(priors.sum()) - 1) < 1e-12
    assert_close(priors, (torch.tensor([3.0, 2, 2]).double() / 7 + 0.01) / 1.03, 1e-12)
    sigma = gaussians["covariance"].numpy()
    for shrinkage in (0.0, 0.3, 1.0):
        shrunk = (1 - shrinkage) * sigma + shrinkage * np.trace(sigma) / 2 * np.eye(2)
        densities = [multivariate_normal(mean, shrunk).logpdf(features.numpy()) for mean in gaussians["means"].numpy()]
        joint = torch.from_numpy(np.stack(densities, 1)) + priors.log()
        found = F.linear(features, *classifier(gaussians, priors, shrinkage)).log_softmax(1)
        assert_close(found, joint.log_softmax(1), 1e-10)


def test_a_sphere_with_equal_priors_is_the_nearest_mean() -> None:
    features, labels = some()
    gaussians = {"means": estimated(features, labels, KNOWN, 2, 1.0)["means"], "covariance": 3 * torch.eye(2).double()}
    found = F.linear(features, *classifier(gaussians, torch.full((3,), 1 / 3).double(), 1e-4)).argmax(1)
    assert torch.equal(found, torch.cdist(features, gaussians["means"]).argmin(1))


def test_interpolation_ends_at_both_and_weighs_means_and_covariance_apart() -> None:
    features, labels = some()
    local = estimated(features, labels, KNOWN, 2, 1.0)
    for share, end in ((0.0, KNOWN), (1.0, local)):
        assert_close(interpolated(local, KNOWN, torch.full((2,), share).double()), end, 1e-12)
    apart = interpolated(local, KNOWN, torch.tensor([1.0, 0.0]).double())
    assert_close(apart, {"means": local["means"], "covariance": KNOWN["covariance"]}, 1e-12)


@pytest.mark.parametrize("count", [2, 3])
def test_folds_have_as_many_of_a_class_up_to_one_and_none_of_rare_classes(count: int) -> None:
    labels = [0] * 7 + [1] * count + [2] * (count - 1)
    found = folds(labels, count, np.random.default_rng(0))
    for label, size in ((0, 7), (1, count)):
        sizes = np.bincount(found[np.array(labels) == label], minlength=count)
        assert sizes.sum() == size and sizes.max() - sizes.min() <= 1
    assert (found[-(count - 1) :] == -1).all()
    assert not np.array_equal(found, folds(labels, count, np.random.default_rng(1)))


def validation(features: Tensor, labels: Tensor, known: Tree = KNOWN, ridge: float = 0.1) -> Validation:
    fold = folds(labels.tolist(), 2, np.random.default_rng(3))
    return Validation(features, labels, fold, known, frequencies(labels, 3, 1e-4), 2, ridge, 1e-4)


def test_inv_fda_the_loss_is_of_samples_that_no_estimate_has_seen() -> None:
    features, labels = some()
    fold, priors = folds(labels.tolist(), 2, np.random.default_rng(3)), frequencies(labels, 3, 1e-4)
    coefficients = torch.tensor([0.3, 0.8]).double()
    expected = 0.0
    for held in (torch.from_numpy(fold == number) for number in range(2)):
        local = estimated(features[~held], labels[~held], KNOWN, 2, 0.1)
        layer = classifier(interpolated(local, KNOWN, coefficients), priors, 1e-4)
        expected += float(F.cross_entropy(F.linear(features[held], *layer), labels[held]))
    assert abs(float(validation(features, labels).loss(coefficients)) - expected) < 1e-12


def test_inv_fda_coefficients_are_the_best_of_a_grid() -> None:
    features, labels = some(12)
    loss = validation(features, labels)
    grid = torch.linspace(0, 1, 11).double()
    single = min(float(loss.loss(beta.expand(2))) for beta in grid)
    separate = min(float(loss.loss(torch.stack([a, b]))) for a in grid for b in grid)
    one, two = loss.best(common=True), loss.best(common=False)
    assert float(one[0]) == float(one[1])
    assert float(loss.loss(one)) <= single + 1e-9
    assert float(loss.loss(two)) <= separate + 1e-9
    assert float(loss.loss(two)) <= float(loss.loss(one)) + 1e-9
    for found in (one, two):
        assert ((found >= 0) & (found <= 1)).all()


def test_many_samples_far_from_the_global_means_are_trusted_and_few_near_them_are_not() -> None:
    features, labels = some(300, width=8, apart=0.5)
    local = estimated(features, labels, {"means": torch.zeros(3, 8)}, 2, 0.1)
    wrong = {"means": local["means"][[1, 2, 0]], "covariance": local["covariance"]}
    assert float(validation(features, labels, wrong).best(common=True)[0]) > 0.9
    few = slice(0, 9)
    assert float(validation(features[few], labels[few], local).best(common=True)[0]) < 0.6


def test_without_folds_the_global_gaussians_are_all() -> None:
    features, labels = some(3)
    assert validation(features, labels).best(common=False).tolist() == [0, 0]
