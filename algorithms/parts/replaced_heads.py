"""Networks whose last layer gives way to a classifier of the method's own, and vectors for such classifiers."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from algorithms.parts.partial import part
from algorithms.parts.requirements import check_no_factors_in_head
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.params import Tree
from rayfl.tasks.base import Model


def body(network: Network) -> tuple[str, ...]:
    """Names of the tensors that are trained and sent: all but the last layer's."""
    head = set(network.head_names)
    return tuple(name for name in network.parameter_names + network.buffer_names if name not in head)


def check_replaceable(method: str, network: Network) -> None:
    """Refuses a model whose last layer is computed of other tensors: factors, or a context of texts.

    Args:
        method: what to call the method.
        network: the model.

    Raises:
        ConfigError: naming the fix.
    """
    check_no_factors_in_head(method, network)
    if network.groups.get("context"):
        raise ConfigError(
            f"{method} has a classifier of its own in the place of the last layer, which this model makes of a context "
            "of texts: set model.prompt.context=none, or choose another method"
        )


def idle_head(network: Network, like: Tensor) -> Tree:
    """Zeros in place of the network's last layer, whose output nobody reads."""
    shapes = {name: network.head_shape if name == network.head_weight else network.head_shape[:1]
              for name in network.head_names}  # fmt: skip
    return {name: like.new_zeros(shape) for name, shape in shapes.items()}


def with_idle_head(network: Network, shared: Model, like: Tensor) -> Tree:
    """The network's tensors: a body, and an idle last layer."""
    return part({**shared, **idle_head(network, like)}, network.parameter_names + network.buffer_names)


def orthogonal_directions(classes: int, dim: int, generator: np.random.Generator) -> Tensor:
    """Unit vectors, shape (C, d), float64: orthonormal ones up to C = d, else rows of a matrix of orthonormal columns.

    Args:
        classes: C.
        dim: d.
        generator: draws the rotation.
    """
    if classes <= dim:
        rows = orthonormal_columns(dim, classes, generator).T
    else:
        rows = orthonormal_columns(classes, dim, generator)
    # in the order in which a commit gives them back: of other strides a product has other last bits
    return torch.from_numpy(rows / np.linalg.norm(rows, axis=1, keepdims=True)).contiguous()


def simplex_etf(classes: int, dim: int, generator: np.random.Generator) -> Tensor:
    """The vectors of a simplex equiangular tight frame, shape (C, d), float64.

    They have length 1, and any two of them the cosine -1/(C - 1), the least that is possible for all pairs at once.

    Args:
        classes: C, at least 2.
        dim: d, at least C.
        generator: draws the rotation.
    """
    centred = np.eye(classes) - 1 / classes
    rows = math.sqrt(classes / (classes - 1)) * centred @ orthonormal_columns(dim, classes, generator).T
    return torch.from_numpy(rows)


def orthonormal_columns(rows: int, columns: int, generator: np.random.Generator) -> np.ndarray:
    """A matrix of orthonormal columns, uniform over all of them; shape (rows, columns), at least as high as wide."""
    orthonormal, triangle = np.linalg.qr(generator.standard_normal((rows, columns)))
    # LAPACK is free to choose these signs
    found: np.ndarray = orthonormal * np.sign(np.diag(triangle))
    return found
