"""Hand-written gradients of many MLPs' cross-entropies, in batched matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rayfl.tasks.chain import GradientBuffers, Layer


def compute_mlp_gradients(
    layers: Sequence[Layer], buffers: Sequence[GradientBuffers], x: Tensor, y: Tensor, mask: Tensor | None
) -> None:
    """Computes the gradients of each client's mean cross-entropy, for linear layers with ReLU.

    Args:
        layers: weights of shape (N, outputs, inputs) and biases of shape (N, outputs), the last one gives logits.
        buffers: where the gradients are written, in the shapes of the layers; None if not needed.
        x: inputs, shape (N, b, *input shape).
        y: labels, shape (N, b).
        mask: 1 for samples and 0 for padding, shape (N, b); None if all are samples.
    """
    inputs = [x.flatten(2)]
    for place, (weight, bias) in enumerate(layers):
        read, turned = inputs[-1], weight.mT
        out = torch.bmm(read, turned) if bias is None else torch.baddbmm(bias[:, None], read, turned)
        inputs.append(out if place == len(layers) - 1 else out.relu_())
    delta = inputs.pop().softmax(-1)
    delta.scatter_add_(-1, y[..., None], delta.new_full((1, 1, 1), -1.0).expand(*y.shape, 1))
    if mask is None:
        delta.mul_(1 / y.shape[1])
    else:
        delta.mul_((mask / mask.sum(1, keepdim=True))[..., None])
    for place in range(len(layers) - 1, -1, -1):
        weight_out, bias_out = buffers[place]
        if weight_out is not None:
            torch.bmm(delta.mT, inputs[place], out=weight_out)
        if bias_out is not None:
            torch.sum(delta, 1, out=bias_out)
        if place:
            delta = torch.bmm(delta, layers[place][0])
            delta = torch.ops.aten.threshold_backward(delta, inputs[place], 0)
