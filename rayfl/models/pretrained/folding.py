"""Clients in the batch of one network: the rule by which ``vmap`` runs it once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

Run = Callable[[Sequence[Tensor], Tensor], Any]
"""Takes tensors of shape (N, ...), those of N clients, and inputs of shape (N b, ...); returns a tensor of shape
(N b, ...) or a tuple of such."""


def folded(run: Run, leaves: Sequence[Tensor], x: Tensor) -> Any:
    """Runs a network whose clients lie in the batch.

    Args:
        run: the network.
        leaves: the tensors of one client; under ``vmap``, of each.
        x: the inputs of one client, shape (b, ...); under ``vmap``, of each.
    """
    if any(is_batchedtensor(tensor) for tensor in (x, *leaves)):
        return _Folded.apply(run, x, *leaves)
    return run([leaf.unsqueeze(0) for leaf in leaves], x)


class _Folded(torch.autograd.Function):
    """The network under ``vmap``. Autograd goes through what the rule does, and never asks this function itself."""

    generate_vmap_rule = False

    @staticmethod
    def forward(run: Run, x: Tensor, *leaves: Tensor) -> Any:
        raise NotImplementedError("a folded network is run by its rule for vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise NotImplementedError("vmap(grad) of a folded network: take the gradient outside of vmap")

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], run: Run, x: Tensor, *leaves: Tensor) -> Any:
        count, (_, dim, *dims) = info.batch_size, in_dims
        inputs = _whole(x, dim, count).flatten(0, 1)
        if all(own is None for own in dims):  # one model: all clients' samples are its batch
            found = run([leaf.unsqueeze(0) for leaf in leaves], inputs)
        else:
            found = run([_whole(leaf, own, count) for leaf, own in zip(leaves, dims, strict=True)], inputs)
        if isinstance(found, tuple):
            return tuple(part.unflatten(0, (count, -1)) for part in found), (0,) * len(found)
        return found.unflatten(0, (count, -1)), 0


def _whole(tensor: Tensor, dim: int | None, count: int) -> Tensor:
    """A tensor with the dimension of clients in front; an expanded view where all have the same."""
    return tensor.unsqueeze(0).expand(count, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
