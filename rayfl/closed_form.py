"""The cross-entropy of fully connected networks, and its gradients, without a graph.

The operations are those that autograd would run, in its order, and so are the bits. For small networks and mini-batches
the graph itself costs more than they do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from rayfl.tape import Gradients, Tape

Layer = tuple[Tensor, Tensor | None]
"""Weight of shape (outputs, inputs) and bias of shape (outputs,) of a linear layer."""

# Named overloads: without the name PyTorch looks for the right one at every call.
_nll_loss = torch.ops.aten.nll_loss_forward.default
_nll_loss_backward = torch.ops.aten.nll_loss_backward.default
_log_softmax_backward = torch.ops.aten._log_softmax_backward_data.default
_relu_backward = torch.ops.aten.threshold_backward.default
_MEAN = 1
_IGNORED = -100


def tensors_of(layers: Sequence[Layer]) -> list[Tensor]:
    """All weights and biases."""
    return [tensor for layer in layers for tensor in layer if tensor is not None]


@torch.no_grad()
def cross_entropy(tape: Tape, layers: Sequence[Layer], x: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy of linear layers with ReLU between them; a scalar.

    Args:
        tape: reads all tensors of the layers.
        layers: from the first to the one that gives logits.
        x: inputs, shape (b, ...).
        y: labels, int64, shape (b,).
    """
    inputs = [x.flatten(1)]
    for weight, bias in layers:
        out = functional.linear(inputs[-1], weight, bias)
        inputs.append(out.relu_() if len(inputs) < len(layers) else out)
    predicted = torch.log_softmax(inputs.pop(), 1)
    loss, weights = _nll_loss(predicted, y, None, _MEAN, _IGNORED)
    lowest = next((i for i, layer in enumerate(layers) if any(map(tape.wants, tensors_of([layer])))), len(layers))

    def pull(gradients: Gradients) -> None:
        (upstream,) = gradients
        if upstream is None:
            return
        delta = _nll_loss_backward(upstream, predicted, y, None, _MEAN, _IGNORED, weights)
        delta = _log_softmax_backward(delta, predicted, 1, predicted.dtype)
        for i in range(len(layers) - 1, lowest - 1, -1):
            weight, bias = layers[i]
            if tape.wants(weight):
                tape.add([weight], 1.0, [torch.mm(delta.t(), inputs[i], out=tape.room_for(weight))])
            if bias is not None and tape.wants(bias):
                tape.add([bias], 1.0, [torch.sum(delta, 0, out=tape.room_for(bias))])
            if i > lowest:
                delta = _relu_backward(delta.mm(weight), inputs[i], 0)

    return tape.cut([loss], pull)[0]
