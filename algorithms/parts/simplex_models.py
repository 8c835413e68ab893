"""Models in a simplex whose endpoints are trained."""

from __future__ import annotations

import torch
from torch import Tensor

from rayfl.models.pretrained.mixing import at_point
from rayfl.params import Tree
from rayfl.tasks.base import Task


def barycenter(vertices: int) -> Tensor:
    """The centre of the simplex, float64 of shape (d,)."""
    return torch.full((vertices,), 1 / vertices, dtype=torch.float64)


def model_at(simplex: Tree, point: Tensor, task: Task) -> Tree:
    """The model w_alpha: the body, and the head weight sum_m alpha_m theta_m, or adapters of sum_m alpha_m B_m A_m.

    Args:
        simplex: ``body`` and ``endpoints`` of shape (d, *head weight), or a tensor (d, ...) for each factor.
        point: alpha, shape (d,).
        task: names the head weight.
    """
    endpoints = simplex["endpoints"]
    if not isinstance(endpoints, Tensor):
        body = simplex.get("body", {})  # a language model trains adapters alone
        return {**body, **at_point(endpoints, point.to(next(iter(endpoints.values()))))}
    weights = point.to(endpoints).view(-1, *(1,) * (endpoints.dim() - 1))
    # a sum of products instead of a matrix product: exact for one endpoint, whatever precision matmul is set to
    return {**simplex["body"], task.network.head_weight: (weights * endpoints).sum(0)}


def simplex_of(server: Tree) -> Tree:
    """What the server holds of the simplex: the endpoints and, where there is one, the body."""
    return {key: server[key] for key in ("body", "endpoints") if key in server}
