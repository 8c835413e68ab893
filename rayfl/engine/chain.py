"""The gradient of a fully connected network's cross-entropy, written out: for small networks a graph costs more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Layer = tuple[Tensor, Tensor | None]
"""Weight of shape (outputs, inputs) and bias of shape (outputs,) of a linear layer."""

Room = tuple[Tensor | None, Tensor | None]
"""Where the gradients of a layer go; None for what is not wanted."""

# Named overloads: without the name PyTorch looks for the right one at every call.
_softmax_into = torch.ops.aten._softmax.out
_relu_backward_into = torch.ops.aten.threshold_backward.grad_input


def writing_gradients(layers: Sequence[Layer], room: Sequence[Room]) -> Callable[[Tensor, Tensor], None]:
    """Returns what writes the gradients of the mean cross-entropy each time it is given inputs and labels.

    The network is linear layers on flattened inputs with ReLU between them. What lies between is kept for the next
    mini-batch of that size: the operations are so short that to make room for their results counts.

    Args:
        layers: from the first to the one that gives logits; their tensors are read at every call.
        room: for each layer, tensors of the same shapes.
    """
    by_size: dict[int, Callable[[Tensor, Tensor], None]] = {}

    def write(x: Tensor, y: Tensor) -> None:
        size = len(y)
        if size not in by_size:
            by_size[size] = _writing(layers, room, size)
        by_size[size](x.flatten(1), y.unsqueeze(1))

    return write


def _writing(layers: Sequence[Layer], room: Sequence[Room], size: int) -> Callable[[Tensor, Tensor], None]:
    """The same for mini-batches of one size."""
    outputs, deltas = ([weight.new_empty(size, len(weight)) for weight, _ in layers] for _ in range(2))
    logits, error = outputs[-1], deltas[-1]
    share = 1 / size
    minus = logits.new_full((size, 1), -share)
    upwards = [(weight.t(), bias, out) for (weight, bias), out in zip(layers, outputs, strict=True)]
    lowest = next(i for i, into in enumerate(room) if any(tensor is not None for tensor in into))
    rows = zip(layers, room, deltas, [None, *deltas], [None, *outputs], strict=False)
    downwards = [(weight, *into, delta, delta.t(), below, read) for (weight, _), into, delta, below, read in rows]
    downwards = [(*row[:-2], row[-2] if i > lowest else None, row[-1]) for i, row in enumerate(downwards)][lowest:]
    downwards.reverse()

    def write(x: Tensor, y: Tensor) -> None:
        reached = x
        for turned, bias, out in upwards:
            if bias is None:
                torch.mm(reached, turned, out=out)
            else:
                torch.addmm(bias, reached, turned, out=out)
            reached = out if out is logits else out.relu_()
        _softmax_into(logits, 1, False, out=error)
        error.mul_(share).scatter_add_(1, y, minus)
        for weight, weight_room, bias_room, above, turned, below, read in downwards:
            if weight_room is not None:
                torch.mm(turned, x if read is None else read, out=weight_room)
            if bias_room is not None:
                torch.sum(above, 0, out=bias_room)
            if below is not None and read is not None:
                torch.mm(above, weight, out=below)
                _relu_backward_into(below, read, 0, grad_input=below)

    return write
