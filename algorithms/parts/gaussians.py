"""Class-conditional Gaussians of features with one covariance: estimates, interpolation, and the classifier they give.

A tree ``gaussians`` has ``means`` mu_y of shape (C, d) and ``covariance`` Sigma of shape (d, d). All is computed in
float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.parts.prototypes import class_counts, class_means
from rayfl.params import Tree, map_leaves


def estimated(features: Tensor, labels: Tensor, known: Tree, least: int, ridge: float) -> Tree:
    """The Gaussians of labelled features.

    mu_y is the mean of a class, or the known one if the class has too few samples for that;

        Sigma = 1/(n - 1) sum_i (f_i - mu_{y_i}) (f_i - mu_{y_i})^T + ridge I.

    Args:
        features: f, of shape (n, d).
        labels: y, of shape (n,).
        known: Gaussians.
        least: samples from which on a class has a mean of its own.
        ridge: added to the diagonal.
    """
    counts, means = class_means(features, labels, len(known["means"]))
    means = torch.where(counts[:, None] >= least, means, known["means"].double())
    apart = features.double() - means[labels]
    scatter = apart.T @ apart / max(len(labels) - 1, 1)
    return {"means": means, "covariance": scatter + ridge * torch.eye(len(scatter)).to(scatter)}


def interpolated(local: Tree, known: Tree, coefficients: Tensor) -> Tree:
    """beta local + (1 - beta) known, with one beta for the means and one for the covariance; shape (2,)."""
    shares = dict(zip(("means", "covariance"), coefficients, strict=True))
    return {name: share * local[name] + (1 - share) * known[name].double() for name, share in shares.items()}


def frequencies(labels: Tensor, classes: int, floor: float) -> Tensor:
    """pi_y, shape (C,): the classes' shares of the labels, each with the floor added, of sum 1."""
    shares = class_counts(labels, classes) / max(len(labels), 1) + floor
    return shares / shares.sum()


def classifier(gaussians: Tree, priors: Tensor, shrinkage: float) -> tuple[Tensor, Tensor]:
    """The linear layer whose softmax is the posterior of the classes: ``weight`` (C, d) and ``bias`` (C,).

    With S = (1 - shrinkage) Sigma + shrinkage tr(Sigma)/d I, the weight's rows are S^-1 mu_y and the bias is
    log pi_y - 1/2 mu_y^T S^-1 mu_y.

    Args:
        gaussians: mu_y and Sigma.
        priors: pi_y, shape (C,).
        shrinkage: of the covariance, in [0, 1].
    """
    means, covariance = gaussians["means"].double(), gaussians["covariance"].double()
    sphere = covariance.trace() / len(covariance) * torch.eye(len(covariance)).to(covariance)
    shrunk = (1 - shrinkage) * covariance + shrinkage * sphere
    weight = torch.linalg.solve(shrunk, means.T).T
    return weight, priors.log() - (weight * means).sum(1) / 2


def folds(labels: Sequence[int], count: int, generator: np.random.Generator) -> np.ndarray:
    """The fold of each sample, shape (n,), such that every fold has as many of a class, up to one.

    Samples of classes with fewer samples than there are folds have none: -1.

    Args:
        labels: the samples' classes.
        count: number of folds.
        generator: shuffles.
    """
    classes = np.asarray(labels)
    found = np.full(len(classes), -1)
    for label in np.unique(classes):
        places = generator.permutation(np.flatnonzero(classes == label))
        if len(places) >= count:
            found[places] = np.arange(len(places)) % count
    return found


class Validation:
    """The cross-entropy of interpolated Gaussians on features that they are not estimated from.

    Args:
        features: f, of shape (n, d).
        labels: y, of shape (n,).
        fold: of each sample, as of :func:`folds`.
        known: the Gaussians that local ones are mixed with.
        priors: pi_y, shape (C,).
        least: as of :func:`estimated`.
        ridge: as of :func:`estimated`.
        shrinkage: as of :func:`classifier`.
    """

    def __init__(
        self,
        features: Tensor,
        labels: Tensor,
        fold: np.ndarray,
        known: Tree,
        priors: Tensor,
        least: int,
        ridge: float,
        shrinkage: float,
    ) -> None:
        self._known, self._priors, self._shrinkage = map_leaves(Tensor.double, known), priors, shrinkage
        self._parts = []
        for number in range(fold.max(initial=-1) + 1):
            rest, held = (
                torch.from_numpy(np.flatnonzero(chosen)).to(labels.device)
                for chosen in ((fold >= 0) & (fold != number), fold == number)
            )
            local = estimated(features[rest], labels[rest], known, least, ridge)
            self._parts.append((local, features[held].double(), labels[held]))

    def loss(self, coefficients: Tensor) -> Tensor:
        """The sum over folds of the mean cross-entropy; a scalar.

        Args:
            coefficients: beta of the means and of the covariance, shape (2,).
        """
        total = coefficients.new_zeros(())
        for local, features, labels in self._parts:
            layer = classifier(interpolated(local, self._known, coefficients), self._priors, self._shrinkage)
            total = total + F.cross_entropy(F.linear(features, *layer), labels)
        return total

    def best(self, common: bool) -> Tensor:
        """The coefficients in [0, 1] of the least loss, by L-BFGS-B from 1/2; shape (2,). Both are 0 without folds.

        Args:
            common: whether both are one number.
        """
        from scipy.optimize import minimize  # SciPy loads slowly, and few methods need it

        device = self._priors.device
        if not self._parts:
            return torch.zeros(2, dtype=torch.float64, device=device)

        def value_and_slope(point: np.ndarray) -> tuple[float, np.ndarray]:
            free = torch.tensor(point, dtype=torch.float64, device=device, requires_grad=True)
            with torch.enable_grad():
                value = self.loss(free.expand(2))
                (slope,) = torch.autograd.grad(value, free)
            return float(value.detach()), slope.cpu().numpy()

        start = np.full(1 if common else 2, 0.5)
        bounds = [(0.0, 1.0)] * len(start)
        options = {"ftol": 1e-12, "gtol": 1e-8, "maxiter": 50}
        found = minimize(value_and_slope, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
        return torch.tensor(found, device=device).expand(2)
