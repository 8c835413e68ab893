"""Planes in the space of a model's parameters: through three models, or around one in random directions.

Parameters are one vector w in float64. The plane through w1, w2, w3 has the orthonormal directions (Garipov et al.,
Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs, NeurIPS 2018)

    u = (w2 - w1) / ||w2 - w1||,    v = z / ||z|| with z = (w3 - w1) - <w3 - w1, u> u,

so its coordinates are distances. Random directions are filter-normalised (Li et al., Visualizing the Loss Landscape of
Neural Nets, NeurIPS 2018): every filter (one output's weights) of a normal draw is scaled to the norm of the same
filter of w, and directions of parameters with fewer than two dimensions (biases, normalisation) are zero. A unit is
then a change as large as the model itself, which makes the widths of different models' minima comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Model, Task

_FLAT = 1e-6
"""A third model this near the line through the other two, relative to its distance, is on it up to rounding."""


@dataclass(frozen=True)
class Plane:
    """A plane w + a u + b v.

    Attributes:
        origin: the model at (0, 0); all models of the plane have its buffers.
        names: the parameters, in the order of the vectors.
        u, v: directions, float64 of shape (d,).
        anchors: coordinates of the models it was made of, shape (m, 2).
    """

    origin: Model
    names: tuple[str, ...]
    u: Tensor
    v: Tensor
    anchors: np.ndarray

    def at(self, point: np.ndarray) -> Tree:
        """The model at coordinates (a, b); exactly the origin at (0, 0)."""
        a, b = (float(value) for value in point)
        moved = a * self.u + b * self.v
        result, start = dict(self.origin), 0
        for name in self.names:
            tensor = self.origin[name]
            step = moved[start : start + tensor.numel()].view(tensor.shape)
            result[name] = (tensor.double() + step).to(tensor.dtype)
            start += tensor.numel()
        return result

    def squared_norm(self, point: np.ndarray) -> float:
        """||w||^2 at coordinates (a, b)."""
        vector = vector_of(self.at(point), self.names)
        return float(vector @ vector)


def vector_of(model: Model, names: Sequence[str]) -> Tensor:
    """Parameters as one vector, float64 of shape (d,)."""
    return torch.cat([model[name].double().flatten() for name in names])


def plane_through(models: Sequence[Model], task: Task) -> Plane:
    """The plane through three models.

    Raises:
        ConfigError: when they lie on a line, or have not the same parameters.
    """
    names = tuple(task.network.parameter_names)
    shapes = [[tuple(model[name].shape) for name in names if name in model] for model in models]
    if any(shape != shapes[0] for shape in shapes):
        raise ConfigError("landscape: the three models have different architectures, no plane goes through them")
    first, second, third = (vector_of(model, names) for model in models)
    u, w = second - first, third - first
    length = u.norm()
    z = w - (w @ u) / (u @ u) * u if length > 0 else w
    if not length > 0 or not z.norm() > _FLAT * w.norm():
        raise ConfigError("landscape: the three models lie on one line (two are equal?), no plane is theirs")
    height = z.norm()
    anchors = np.array([[0.0, 0.0], [float(length), 0.0], [float(w @ u / length), float(height)]])
    return Plane(models[0], names, u / length, z / height, anchors)


def plane_around(model: Model, task: Task, generator: np.random.Generator) -> Plane:
    """A plane in two random filter-normalised directions."""
    names = tuple(task.network.parameter_names)
    u, v = (torch.cat([_direction(model[name], generator) for name in names]) for _ in range(2))
    return Plane(model, names, u, v, np.zeros((1, 2)))


def _direction(tensor: Tensor, generator: np.random.Generator) -> Tensor:
    """A filter-normalised draw, flattened."""
    drawn = torch.from_numpy(generator.standard_normal(tuple(tensor.shape)))
    if tensor.dim() < 2:
        return torch.zeros(tensor.numel(), dtype=torch.float64)
    rows, own = drawn.flatten(1), tensor.double().flatten(1)
    scaled: Tensor = rows / rows.norm(dim=1, keepdim=True) * own.norm(dim=1, keepdim=True)
    return scaled.flatten()
