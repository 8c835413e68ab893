"""The factor B of a product B A that is turned towards another matrix and stays near to where it was (LoRA-FAIR)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_STEPS = 100
"""Most steps of Newton's method; a few are taken."""
_HALVINGS = 60
"""Most halvings of a step."""
_ROUNDING = 4 * torch.finfo(torch.float64).eps
"""By how much a value may grow through rounding alone."""


def corrected(b: Tensor, a: Tensor, products: tuple[Tensor, Tensor], weight: float, squared: bool) -> Tensor:
    """Returns B + Delta with the smallest 1 - cos(M, (B + Delta) A) + weight ||Delta||, or ||Delta||^2.

    It is a minimum that descent from Delta = 0 leads to; B itself, to the bit, where Delta is zero, or where B A or M
    is zero and has no angle. For ``weight=0`` it is the limit of small weights: of all that have the smallest angle,
    the one nearest to B.

    Neither M nor any other matrix of a layer's size is made. With the eigenvectors Q of A A^T, the j-th column of
    (B + Delta) Q is a sum of the j-th columns of B Q and M A^T Q, since gradients and B are: so there are 2 r unknowns,
    for which Newton's method is exact to rounding. All in float64.

    Args:
        b: B, shape (o, r).
        a: A, shape (r, i).
        products: M as a product, shapes (o, R) and (R, i), float64.
        weight: lambda.
        squared: whether the penalty is ||Delta||^2.
    """
    left, right = products
    eigenvalues, q = torch.linalg.eigh(a.double() @ a.double().mT)
    columns = torch.stack([b.double() @ q, left @ (right @ a.double().mT @ q)])  # (2, o, r)
    basis, places = torch.linalg.qr(columns.permute(2, 1, 0))  # (r, o, 2), (r, 2, 2); of o = 1: (r, 1, 1), (r, 1, 2)
    size = ((left.mT @ left) * (right @ right.mT)).sum().clamp_min(0).sqrt()
    start, target = places[..., 0].flatten(), places[..., 1].flatten()
    e = eigenvalues.clamp_min(0).repeat_interleave(basis.shape[-1])
    if not float(size) or not float(start.square() @ e):
        return b
    problem = _Problem(e, target / size, start, weight, squared)
    found = problem.nearest() if weight == 0 else problem.minimum()
    if found is None:
        return b
    turned: Tensor = (basis @ found.view(len(q), -1, 1))[..., 0].mT @ q.mT
    return turned.to(b)


@dataclass(frozen=True)
class _Problem:
    """The sum 1 - <c, x> / ||x||_e + penalty(x - x_0) of a vector x, with ||x||_e^2 = sum_j e_j x_j^2.

    Of all multiples of x, which have one angle, it is for the one nearest to x_0. That one is orthogonal to x - x_0. So
    the sum is one over directions, and steps are within the plane orthogonal to x: with the length among the unknowns,
    Newton's method goes astray where the weight is small.

    Attributes:
        e: e, not below 0.
        c: c.
        start: x_0.
        weight: of the penalty.
        squared: whether that is the squared distance.
    """

    e: Tensor
    c: Tensor
    start: Tensor
    weight: float
    squared: bool

    def nearest(self) -> Tensor | None:
        """The point nearest to x_0 among those with the smallest angle; None where that is 0, which has no angle."""
        seen = self.e > self.e.max() * 1e-14  # what A maps to zero has no part in the angle, and stays
        found = self._as_long(torch.where(seen, self.c / self.e, 0))
        return None if found is None else torch.where(seen, found, self.start)

    def minimum(self) -> Tensor | None:
        """The minimum; None for x_0 itself."""
        x = self.start
        if not self.squared:
            slope, _ = self._angle(x)
            if float(slope.norm()) <= self.weight:
                return None
            # away from the kink at x_0, where Newton's method has no second derivative
            x = self._shortened(x, -slope * (x.square() @ self.e) / self.e.max(), 0.0)
            if torch.equal(x, self.start):
                return None
        for _ in range(_STEPS):
            slope, curvature = self._slopes(x)
            values, vectors = torch.linalg.eigh(curvature)
            sizes = values.abs().clamp_min(1e-12 * float(values.abs().max()))
            after = self._shortened(x, -vectors @ ((vectors.mT @ slope) / sizes), _ROUNDING)
            moved, x = float((after - x).norm()), after
            if moved <= _ROUNDING * float(x.norm()):
                break
        return None if torch.equal(x, self.start) else x

    def _value(self, x: Tensor) -> float:
        distance = float((x - self.start).norm())
        return 1 - float(self.c @ x / (x.square() @ self.e).sqrt()) + self.weight * distance ** (1 + self.squared)

    def _angle(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient and second derivative of 1 - <c, x> / ||x||_e."""
        turned, length = self.e * x, (x.square() @ self.e).sqrt()
        inner = self.c @ x
        mixed = torch.outer(self.c, turned)
        curvature = (inner * torch.diag(self.e) + mixed + mixed.mT) / length**3
        curvature -= 3 * inner / length**5 * torch.outer(turned, turned)
        return inner / length**3 * turned - self.c / length, curvature

    def _slopes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient and second derivative of the sum over directions, in the plane orthogonal to x."""
        slope, curvature = self._angle(x)
        away, one = x - self.start, torch.eye(len(x), dtype=x.dtype)
        radial = torch.outer(x, x) / (x @ x)
        bent = one - torch.outer(away, away) / (x @ x)  # half the second derivative of the squared distance
        if self.squared:
            slope, curvature = slope + 2 * self.weight * away, curvature + 2 * self.weight * bent
        else:
            distance, unit = away.norm(), away / away.norm()
            slope = slope + self.weight * unit
            curvature = curvature + self.weight / distance * (bent - torch.outer(unit, unit))
        plane = one - radial
        return plane @ slope, plane @ curvature @ plane + curvature.norm() * radial

    def _as_long(self, x: Tensor) -> Tensor | None:
        """The point nearest to x_0 of all positive multiples of x; None where none is nearer than 0."""
        along = float(x @ self.start)
        return x * (along / float(x @ x)) if along > 0 else None

    def _shortened(self, x: Tensor, step: Tensor, slack: float) -> Tensor:
        """x after the step, halved until the sum does not grow by more than ``slack``; x if no length does that."""
        limit = self._value(x) + slack
        for halvings in range(_HALVINGS):
            after = self._as_long(x + step * 0.5**halvings)
            if after is not None and bool(after.square() @ self.e > 0) and self._value(after) <= limit:
                return after
        return x
