"""Networks that make inputs of noise, and what such inputs are to be for a model that was trained on others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.parts.layers import draw_linear, linear, unit_norm
from rayfl.params import Tree
from rayfl.tasks.base import Task

_SLOPE = 0.2
_SIDE = 3
_MEAN, _VARIANCE = "running_mean", "running_var"


def draw_generator(shape: Sequence[int], code: int, width: int, like: Tensor, generator: np.random.Generator) -> Tree:
    """A network that makes inputs of noise.

    For images, a linear layer to a quarter of their height and width, and three convolutions, before two of which the
    maps are enlarged. For other inputs, two linear layers.

    Args:
        shape: of an input; of images channels, height and width.
        code: numbers of noise, m.
        width: maps of the last convolution but one, f; 2 f before, or units of the hidden layer.
        like: a tensor of the type and device wanted.
        generator: where the numbers come from.
    """
    if len(shape) != 3:
        return {
            "unfolds": {**draw_linear(code, 2 * width, like, generator), **unit_norm(2 * width, like)},
            "writes": draw_linear(2 * width, math.prod(shape), like, generator),
        }
    channels, *sides = shape
    cells = math.prod(_quarters(sides))
    return {
        "unfolds": {**draw_linear(code, 2 * width * cells, like, generator), **unit_norm(2 * width, like)},
        "first": {**_draw_kernel(2 * width, 2 * width, like, generator), **unit_norm(2 * width, like)},
        "second": {**_draw_kernel(2 * width, width, like, generator), **unit_norm(width, like)},
        "writes": {**_draw_kernel(width, channels, like, generator), "offset": like.new_zeros(channels)},
    }


def generated(network: Mapping[str, Any], code: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Inputs of shape (b, ...), normalized in between by the statistics of the b.

    Args:
        network: of :func:`draw_generator`.
        code: noise, of shape (b, m).
        low: least value of each number of an input, in its shape.
        high: the largest.
    """
    x = linear(network["unfolds"], code)
    if low.ndim != 3:
        x = linear(network["writes"], F.leaky_relu(_normalized(network["unfolds"], x), _SLOPE))
    else:
        height, width = low.shape[1:]
        x = _normalized(network["unfolds"], x.view(len(x), -1, *_quarters((height, width))))
        for layer, sides in (("first", (-(-height // 2), -(-width // 2))), ("second", (height, width))):
            x = F.conv2d(F.interpolate(x, sides), network[layer]["kernel"], padding=_SIDE // 2)
            x = F.leaky_relu(_normalized(network[layer], x), _SLOPE)
        x = F.conv2d(x, network["writes"]["kernel"], network["writes"]["offset"], padding=_SIDE // 2)
    return low + (high - low) * x.reshape(-1, *low.shape).sigmoid()


def statistics_apart(model: Mapping[str, Tensor], x: Tensor, task: Task) -> Tensor:
    """sum over layers of batch normalization of ||mean - running mean|| + ||variance - running variance||; a scalar.

    Those of what the layers read, in evaluation mode; 0 without such layers.

    Args:
        model: by whose running statistics.
        x: inputs.
        task: what is learned.

    References:
        Yin et al.: Dreaming to Distill: Data-Free Knowledge Transfer via DeepInversion, CVPR 2020, eq. 4.
    """
    found = x.new_zeros(())
    for name, read in task.network.batch_norm_inputs(model, x):
        if f"{name}.{_MEAN}" in model:
            maps = read[..., None].flatten(2)
            mean, variance = maps.mean((0, 2)), maps.var((0, 2), unbiased=False)
            found = found + torch.linalg.vector_norm(mean - model[f"{name}.{_MEAN}"])
            found = found + torch.linalg.vector_norm(variance - model[f"{name}.{_VARIANCE}"])
    return found


def boundary_divergence(teacher: Tensor, student: Tensor, agreeing: bool) -> Tensor:
    """The mean over samples of KL(teacher || student), which is 0 for some of them; a scalar.

    Args:
        teacher: logits, of shape (b, C).
        student: logits, of shape (b, C).
        agreeing: whether those count that both give to the same class, or those that they give to different ones.
    """
    logs, targets = student.log_softmax(-1), teacher.log_softmax(-1)
    counted = (teacher.argmax(-1) == student.argmax(-1)) == agreeing
    return (counted * (targets.exp() * (targets - logs)).sum(-1)).mean()


def _quarters(sides: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-side // 4) for side in sides)


def _draw_kernel(inputs: int, outputs: int, like: Tensor, generator: np.random.Generator) -> Tree:
    bound = 1 / math.sqrt(inputs * _SIDE**2)
    drawn = generator.uniform(-bound, bound, (outputs, inputs, _SIDE, _SIDE))
    return {"kernel": torch.from_numpy(drawn).to(like)}


def _normalized(layer: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, layer["norm_gain"], layer["norm_offset"], training=True)
