"""Fully connected networks, their cross-entropy and its gradients, without a graph.

The operations are those that autograd would run, in its order, and so are the bits. For small networks and mini-batches
the graph itself costs more than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
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
_log_softmax_into = torch.ops.aten._log_softmax.out
_nll_loss_into = torch.ops.aten.nll_loss_forward.output
_nll_loss_backward_into = torch.ops.aten.nll_loss_backward.grad_input
_log_softmax_backward_into = torch.ops.aten._log_softmax_backward_data.out
_relu_backward_into = torch.ops.aten.threshold_backward.grad_input
_MEAN = 1
_IGNORED = -100
_PIECE = 1 << 15


def tensors_of(layers: Sequence[Layer]) -> list[Tensor]:
    """All weights and biases."""
    return [tensor for layer in layers for tensor in layer if tensor is not None]


@dataclass(frozen=True)
class Pass:
    """What a forward pass leaves for the gradients.

    Attributes:
        inputs: what each layer has read, shape (b, its inputs).
        predicted: log-probabilities, shape (b, C).
        labels: int64, shape (b,).
        loss: the mean cross-entropy; a scalar.
        weights: the total weight of the samples, as PyTorch's backward pass wants it.
    """

    inputs: list[Tensor]
    predicted: Tensor
    labels: Tensor
    loss: Tensor
    weights: Tensor


def forward(layers: Sequence[Layer], x: Tensor, y: Tensor) -> Pass:
    """Linear layers with ReLU between them, and the mean cross-entropy of their logits. No graph may be recorded.

    Args:
        layers: from the first to the one that gives logits.
        x: inputs, shape (b, ...).
        y: labels, int64, shape (b,).
    """
    inputs, logits = activations(layers, x)
    predicted = torch.log_softmax(logits, 1)
    return Pass(inputs, predicted, y, *_nll_loss(predicted, y, None, _MEAN, _IGNORED))


def activations(layers: Sequence[Layer], x: Tensor) -> tuple[list[Tensor], Tensor]:
    """What each layer reads, shape (b, its inputs), and the logits. No graph may be recorded."""
    inputs = [x.flatten(1)]
    for weight, bias in layers:
        out = functional.linear(inputs[-1], weight, bias)
        inputs.append(out.relu_() if len(inputs) < len(layers) else out)
    return inputs, inputs.pop()


def backward(layers: Sequence[Layer], done: Pass, upstream: Tensor, lowest: int = 0) -> Iterator[tuple[int, Tensor]]:
    """From the last layer to the ``lowest``: its place, and the gradient of what it puts out, shape (b, outputs).

    That of a weight is its transpose times what the layer has read, that of a bias its sum over the batch.

    Args:
        layers: as given to :func:`forward`.
        done: what that returned.
        upstream: the gradient of the loss; a scalar.
        lowest: the first layer of interest.
    """
    delta = _nll_loss_backward(upstream, done.predicted, done.labels, None, _MEAN, _IGNORED, done.weights)
    delta = _log_softmax_backward(delta, done.predicted, 1, done.predicted.dtype)
    yield from _downwards(layers, done.inputs, delta, None, lowest)


def _downwards(
    layers: Sequence[Layer], inputs: Sequence[Tensor], logits: Tensor | None, features: Tensor | None, lowest: int
) -> Iterator[tuple[int, Tensor]]:
    """The same from the gradients of the logits and of what the last layer reads; None stands for zeros."""
    last = len(layers) - 1
    delta = logits
    for i in range(last, lowest - 1, -1):
        if delta is not None:
            yield i, delta
        if i > lowest:
            below = None if delta is None else delta.mm(layers[i][0])
            if i == last and features is not None:
                below = features if below is None else features + below
            delta = None if below is None else _relu_backward(below, inputs[i], 0)


@torch.no_grad()
def cross_entropy(tape: Tape, layers: Sequence[Layer], x: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy as part of an objective; a scalar.

    Args:
        tape: reads all tensors of the layers.
        layers: see :func:`forward`.
        x: see there.
        y: see there.
    """
    done = forward(layers, x, y)

    def pull(gradients: Gradients) -> None:
        (upstream,) = gradients
        if upstream is not None:
            _note(tape, layers, done.inputs, backward(layers, done, upstream, _lowest(tape, layers)))

    return tape.cut([done.loss], pull)[0]


@torch.no_grad()
def features_and_logits(tape: Tape, layers: Sequence[Layer], x: Tensor) -> tuple[Tensor, Tensor]:
    """What the last of several layers reads, shape (b, f), and the logits, shape (b, C), as part of an objective.

    Args:
        tape: reads all tensors of the layers.
        layers: see :func:`forward`.
        x: see there.
    """
    inputs, logits = activations(layers, x)

    def pull(gradients: Gradients) -> None:
        of_features, of_logits = gradients
        _note(tape, layers, inputs, _downwards(layers, inputs, of_logits, of_features, _lowest(tape, layers)))

    features, logits = tape.cut([inputs[-1], logits], pull)
    return features, logits


def _lowest(tape: Tape, layers: Sequence[Layer]) -> int:
    """The first layer whose gradients are wanted."""
    return next((i for i, layer in enumerate(layers) if any(map(tape.wants, tensors_of([layer])))), len(layers))


def _note(tape: Tape, layers: Sequence[Layer], inputs: Sequence[Tensor], deltas: Iterator[tuple[int, Tensor]]) -> None:
    """Adds the gradients of weights and biases."""
    for i, delta in deltas:
        weight, bias = layers[i]
        if tape.wants(weight):
            tape.add([weight], 1.0, [torch.mm(delta.t(), inputs[i], out=tape.room_for(weight))])
        if bias is not None and tape.wants(bias):
            tape.add([bias], 1.0, [torch.sum(delta, 0, out=tape.room_for(bias))])


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

    It takes the inputs and labels of a mini-batch, as :func:`forward` does, and no graph may be recorded. What lies
    between is kept for the next mini-batch of that size: the operations are so short that to make room for their
    results counts.

    Args:
        layers: see :func:`forward`; their tensors are read anew at every call.
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
