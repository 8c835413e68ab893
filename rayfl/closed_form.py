"""Fully connected networks, their cross-entropy and its gradients, without a graph.

The operations are those that autograd would run, in its order, and so are the bits. For small networks and mini-batches
the graph itself costs more than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Layer = tuple[Tensor, Tensor | None]
"""Weight of shape (outputs, inputs) and bias of shape (outputs,) of a linear layer."""

# Named overloads: without the name PyTorch looks for the right one at every call.
_log_softmax_into = torch.ops.aten._log_softmax.out
_nll_loss_into = torch.ops.aten.nll_loss_forward.output
_nll_loss_backward_into = torch.ops.aten.nll_loss_backward.grad_input
_log_softmax_backward_into = torch.ops.aten._log_softmax_backward_data.out
_relu_backward_into = torch.ops.aten.threshold_backward.grad_input
_MEAN = 1
_IGNORED = -100
_PIECE = 1 << 15


def pulling(
    values: Sequence[Tensor], anchors: Sequence[Tensor], factor: float, gradients: Sequence[Tensor]
) -> Callable[[], None]:
    """Adds ``factor (value - anchor)`` to all gradients, in place, each time that it is called.

    The operations are those of autograd for ``factor / 2`` times the squared distance. No graph may be recorded.

    Args:
        values: tensors, read anew at every call.
        anchors: tensors of the same shapes and type.
        factor: a number.
        gradients: tensors of the same shapes and type.
    """
    columns = zip(values, anchors, gradients, strict=True)
    rows = [(value.detach(), anchor.detach().to(value), gradient) for value, anchor, gradient in columns]
    if any(value.device.type != "cpu" for value, _, _ in rows):

        def by_pytorch() -> None:
            for value, anchor, gradient in rows:
                gradient.add_((value - anchor).mul_(factor))

        return by_pytorch

    # NumPy's operations begin in half of PyTorch's time; pieces stay in the processor's cache.
    pieces = [
        tuple(tensor.view(-1)[start : start + _PIECE].numpy() for tensor in (row[0], row[1].contiguous(), row[2]))
        for row in rows
        for start in range(0, row[0].numel(), _PIECE)
    ]
    scratch = np.empty(_PIECE, pieces[0][0].dtype) if pieces else None
    rooms = [scratch[: len(value)] for value, _, _ in pieces] if scratch is not None else []

    def by_numpy() -> None:
        for (value, anchor, gradient), room in zip(pieces, rooms, strict=True):
            np.subtract(value, anchor, out=room)
            np.multiply(room, factor, out=room)
            np.add(gradient, room, out=gradient)

    return by_numpy


def writing_gradients(layers: Sequence[Layer], room: Sequence[Layer]) -> Callable[[Tensor, Tensor], None]:
    """Writes the gradients of the mean cross-entropy with respect to all weights and biases, each time it is called.

    It takes the inputs of a mini-batch, shape (b, ...), and its labels, int64 of shape (b,). No graph may be recorded.
    What lies between is kept for the next mini-batch of that size: the operations are so short that to make room for
    their results counts.

    Args:
        layers: linear layers with ReLU between them, from the first to the one that gives logits; their tensors are
            read at every call.
        room: where the gradients go, tensors of the same shapes.
    """
    by_size: dict[int, Callable[[Tensor, Tensor], None]] = {}

    def write(x: Tensor, y: Tensor) -> None:
        size = len(y)
        if size not in by_size:
            by_size[size] = _writing(layers, room, size)
        by_size[size](x, y)

    return write


def _writing(layers: Sequence[Layer], room: Sequence[Layer], size: int) -> Callable[[Tensor, Tensor], None]:
    """The same for mini-batches of one size."""
    outputs, deltas = ([weight.new_empty(size, len(weight)) for weight, _ in layers] for _ in range(2))
    logits, delta = outputs[-1], deltas[-1]
    predicted, of_predicted = torch.empty_like(logits), torch.empty_like(logits)
    loss, total, upstream = (logits.new_ones(()) for _ in range(3))
    upwards = [(weight.t(), bias, out) for (weight, bias), out in zip(layers, outputs, strict=True)]
    rows = zip(layers, room, deltas, [None, *deltas], [None, *outputs], strict=False)
    downwards = [(weight, *into, delta, delta.t(), below, read) for (weight, _), into, delta, below, read in rows]
    downwards.reverse()

    def write(x: Tensor, y: Tensor) -> None:
        reached = lowest = x.flatten(1)
        for turned, bias, out in upwards:
            if bias is None:
                torch.mm(reached, turned, out=out)
            else:
                torch.addmm(bias, reached, turned, out=out)
            reached = out if out is logits else out.relu_()
        _log_softmax_into(logits, 1, False, out=predicted)
        _nll_loss_into(predicted, y, None, _MEAN, _IGNORED, output=loss, total_weight=total)
        _nll_loss_backward_into(upstream, predicted, y, None, _MEAN, _IGNORED, total, grad_input=of_predicted)
        _log_softmax_backward_into(of_predicted, predicted, 1, predicted.dtype, out=delta)
        for weight, weight_room, bias_room, above, turned, below, read in downwards:
            torch.mm(turned, lowest if read is None else read, out=weight_room)
            if bias_room is not None:
                torch.sum(above, 0, out=bias_room)
            if below is not None:
                torch.mm(above, weight, out=below)
                _relu_backward_into(below, read, 0, grad_input=below)

    return write
