"""Hand-written gradients of an MLP's cross-entropy: for small networks autograd's overhead dominates."""

from __future__ import annotations

from collections.abc import Sequence

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

    Activation buffers are reused for the next mini-batch of the same size: allocating them would take a notable share
    of such short operations' time.

    Args:
        layers: from the first to the one that gives logits; their tensors are read at every call.
        buffers: where the gradients are written, by layer.
    """

    def __init__(self, layers: Sequence[Layer], buffers: Sequence[GradientBuffers]) -> None:
        self._layers, self._buffers = layers, buffers
        self._lowest = next(i for i, into in enumerate(buffers) if any(tensor is not None for tensor in into))
        self._between: dict[int, tuple[list[Tensor], list[Tensor], Tensor]] = {}

    def compute(self, x: Tensor, y: Tensor) -> None:
        """Computes the gradients and writes them to the buffers.

        Args:
            x: inputs, shape (b, *input shape).
            y: labels, shape (b,).
        """
        outputs, deltas, minus = self._of_size(len(y))
        inputs = [x.flatten(1), *outputs[:-1]]
        for (weight, bias), read, out in zip(self._layers, inputs, outputs, strict=True):
            if bias is None:
                torch.mm(read, weight.t(), out=out)
            else:
                torch.addmm(bias, read, weight.t(), out=out)
            if out is not outputs[-1]:
                out.relu_()
        _softmax_into(outputs[-1], 1, False, out=deltas[-1])
        deltas[-1].mul_(1 / len(y)).scatter_add_(1, y.unsqueeze(1), minus)
        for place in range(len(deltas) - 1, self._lowest - 1, -1):
            weight_out, bias_out = self._buffers[place]
            if weight_out is not None:
                torch.mm(deltas[place].t(), inputs[place], out=weight_out)
            if bias_out is not None:
                torch.sum(deltas[place], 0, out=bias_out)
            if place > self._lowest:
                torch.mm(deltas[place], self._layers[place][0], out=deltas[place - 1])
                _relu_backward_into(deltas[place - 1], inputs[place], 0, grad_input=deltas[place - 1])

    def _of_size(self, size: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Returns buffers for activations, for their gradients, and the constant -1/b, for a mini-batch of size b."""
        if size not in self._between:
            outputs, deltas = ([weight.new_empty(size, len(weight)) for weight, _ in self._layers] for _ in range(2))
            self._between[size] = outputs, deltas, outputs[-1].new_full((size, 1), -1 / size)
        return self._between[size]
