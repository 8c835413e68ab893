"""Hand-written gradients of an MLP's cross-entropy: for small networks autograd's overhead dominates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Layer = tuple[Tensor, Tensor | None]
"""Weight of shape (outputs, inputs) and bias of shape (outputs,) of a linear layer."""

GradientBuffers = tuple[Tensor | None, Tensor | None]
"""Output tensors for the gradients of a layer's weight and bias; None if not needed."""

# Explicit overloads: otherwise PyTorch resolves the overload at every call.
_softmax_into = torch.ops.aten._softmax.out
_relu_backward_into = torch.ops.aten.threshold_backward.grad_input


class MlpGradients:
    """Computes the gradients of the mean cross-entropy of an MLP: linear layers with ReLU, on flattened inputs.

    Activation buffers and views are kept for the next mini-batch of the same size: making them would take a notable
    share of such short operations' time.

    Args:
        layers: from the first to the one that gives logits; their tensors are read at every call.
        buffers: where the gradients are written, by layer.
    """

    def __init__(self, layers: Sequence[Layer], buffers: Sequence[GradientBuffers]) -> None:
        self._layers, self._buffers = layers, buffers
        self._lowest = next(i for i, into in enumerate(buffers) if any(tensor is not None for tensor in into))
        self._by_size: dict[int, tuple[list[Any], list[Any], Tensor, Tensor]] = {}

    def compute(self, x: Tensor, y: Tensor) -> None:
        """Computes the gradients and writes them to the buffers. No autograd graph may be recorded.

        Args:
            x: inputs, shape (b, *input shape).
            y: labels, shape (b,).
        """
        size = y.shape[0]
        if size not in self._by_size:
            self._by_size[size] = self._of_size(size)
        upward, downward, share, minus = self._by_size[size]
        read = flat = x.flatten(1)
        for weight_t, bias, out in upward:
            if bias is None:
                torch.mm(read, weight_t, out=out)
            else:
                torch.addmm(bias, read, weight_t, out=out)
            read = out if out is upward[-1][-1] else out.relu_()
        last = downward[0][0]
        _softmax_into(read, 1, False, out=last)
        last.mul_(share).scatter_add_(1, y.unsqueeze(1), minus)
        for delta, delta_t, read, below, (weight, _), (weight_out, bias_out) in downward:
            if weight_out is not None:
                torch.mm(delta_t, flat if read is None else read, out=weight_out)
            if bias_out is not None:
                torch.sum(delta, 0, out=bias_out)
            if below is not None:
                torch.mm(delta, weight, out=below)
                _relu_backward_into(below, read, 0, grad_input=below)

    def _of_size(self, size: int) -> tuple[list[Any], list[Any], Tensor, Tensor]:
        """Returns for b samples what the layers read and write, upward and downward, and the numbers 1/b and -1/b."""
        outputs, deltas = ([weight.new_empty(size, len(weight)) for weight, _ in self._layers] for _ in range(2))
        upward = [(weight.t(), bias, out) for (weight, bias), out in zip(self._layers, outputs, strict=True)]
        downward = [
            (deltas[i], deltas[i].t(), outputs[i - 1] if i else None, deltas[i - 1] if i > self._lowest else None, *own)
            for i, own in enumerate(zip(self._layers, self._buffers, strict=True))
            if i >= self._lowest
        ]
        return upward, downward[::-1], outputs[-1].new_tensor(1 / size), outputs[-1].new_full((size, 1), -1 / size)
