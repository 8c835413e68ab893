"""Modular sums of integers that are private by the noise of all who send them (distributed differential privacy).

A client clips its change to a norm, turns it by a random rotation that all know, so that its entries are of about the
same size, and rounds them at random to whole multiples of a step. It rounds once more as long as the result is longer
than a bound that nearly every rounding keeps. Then it adds integers of noise. The server turns the sum back.

Sources: Kairouz, Liu, Steinke: The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation, ICML 2021, Algorithms 1 and 2; Agarwal, Kairouz, Liu: The Skellam Mechanism for Differentially Private
Federated Learning, NeurIPS 2021, which does the same with other noise. Their texts were not at hand: the algorithms are
from memory, and the bounds were compared with the authors' code (google-research/federated, distributed_dp), which was
read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rayfl.aggregation.compression import on_device
from rayfl.params import Tree, from_leaves, leaves

_LOG_INVERSE_BETA = 0.5
"""-log(beta): a rounding is kept with a probability of 1 - beta at least; beta = exp(-1/2), as in the papers."""
_PADDING = "(padding)"
"""Where the tree of a sum has the entries of the rotation beyond those of the message."""


def padded(entries: int) -> int:
    """Returns d, the entries of a rotated message: the next power of 2."""
    return 1 << max(entries - 1, 0).bit_length()


def rounded_norm(norm: float, entries: int) -> float:
    """Returns the largest Euclidean norm of a vector after rounding to integers.

    Args:
        norm: largest one before, in steps.
        entries: d.
    """
    root = math.sqrt(entries)
    usual = norm**2 + entries / 4 + math.sqrt(2 * _LOG_INVERSE_BETA) * (norm + root / 2)
    return min(norm + root, math.sqrt(usual))


def rounded_sum(norm: float, entries: int) -> float:
    """Returns the largest sum of magnitudes of a vector of integers; ``norm`` is its largest Euclidean norm."""
    return norm * min(math.sqrt(entries), norm)


def hadamard(values: Tensor) -> Tensor:
    """Returns vectors times the Hadamard matrix, divided by the root of d: an isometry, its own inverse.

    Args:
        values: float64 of shape (N, d), d a power of 2.
    """
    found, half, (count, size) = values, 1, values.shape
    while half < size:
        first, second = found.view(count, -1, 2, half).unbind(2)
        found, half = torch.stack([first + second, first - second], 2).view(count, size), 2 * half
    return found / math.sqrt(size)


def rotated(changes: Tensor, signs: Tensor) -> Tensor:
    """Returns H D x of changes x with zeros appended: D are random signs, H the matrix of :func:`hadamard`.

    Args:
        changes: float64 of shape (N, P).
        signs: 1 or -1, shape (d,), d = ``padded(P)``.
    """
    return hadamard(signs * torch.nn.functional.pad(changes, (0, len(signs) - changes.shape[1])))


def turned_back(values: Tensor, signs: Tensor, entries: int) -> Tensor:
    """Returns the changes of ``entries`` numbers of which :func:`rotated` has made these values."""
    return (signs * hadamard(values))[:, :entries]


def shortened(changes: Tensor, norm: float) -> Tensor:
    """Returns changes, float64 of shape (N, P), as long as ``norm`` at most."""
    factors = (norm / _lengths(changes)).clamp(max=1)  # a change of zero has the factor min(inf, 1)
    return changes * factors[:, None]


def in_integers(values: Tensor, norm: float, generators: Sequence[np.random.Generator]) -> Tensor:
    """Returns values rounded at random to neighbouring integers, until they are no longer than ``rounded_norm``.

    Values that are no numbers stay, so that they are found.

    Args:
        values: float64 of shape (N, d), in steps.
        norm: the largest norm that each of the N may have.
        generators: of each; draws a number for each entry, and others for each further rounding.
    """
    longest, size = rounded_norm(norm, values.shape[1]), values.shape[1]
    found, again = values, list(range(len(values)))
    while again:
        draws = on_device(np.stack([generators[one].random(size) for one in again]), values.device)
        first = len(again) == len(values)
        rolled = ((values if first else values[again]) + draws).floor()
        found = rolled if first else found.index_copy(0, torch.tensor(again, device=values.device), rolled)
        too_long = (_lengths(rolled) > longest).tolist()  # waits for a device once, for all of them
        again = [one for one, more in zip(again, too_long, strict=True) if more]
    return found


def _lengths(rows: Tensor) -> Tensor:
    return rows.square().sum(1).sqrt()


def wrapped(total: Tensor, modulus_bits: int) -> Tensor:
    """Returns integers modulo 2^M, between -2^(M-1) and 2^(M-1) - 1; all are float64."""
    half = 2.0 ** (modulus_bits - 1)
    return torch.remainder(total + half, 2 * half) - half


def in_tree(values: Tensor, shapes: Mapping[str, torch.Size]) -> Tree:
    """Returns a rotated message with the paths and shapes of the message, which the sum over clients then has.

    Args:
        values: of shape (d,).
        shapes: by path; the entries follow each other in the order of the paths.
    """
    sizes = [shapes[path].numel() for path in sorted(shapes)]
    *parts, rest = torch.split(values, [*sizes, len(values) - sum(sizes)])
    found = {path: part.view(shapes[path]) for path, part in zip(sorted(shapes), parts, strict=True)}
    return from_leaves({**found, _PADDING: rest} if len(rest) else found)


def from_tree(tree: Tree) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the values that :func:`in_tree` was given, float64, and the leaves of the message's paths."""
    found = dict(sorted(leaves(tree)))
    rest = [found.pop(_PADDING)] if _PADDING in found else []
    return torch.cat([part.double().flatten() for part in [*found.values(), *rest]]), found
