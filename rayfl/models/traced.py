"""A network as a graph of layers and functions, and what is known of these."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from rayfl.errors import ModelError

SINGLE = {
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Hardswish, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.gelu, F.silu, F.mish, F.tanh, F.hardswish, F.dropout),
    *(torch.relu, torch.tanh, "relu", "tanh", "contiguous"),
}
"""Functions of single numbers that map 0 to 0."""
POOLS = {
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d),
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
}
"""Functions of single channels of maps that map 0 to 0."""
ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FLATTEN = {torch.flatten, "flatten"}


class Preparation(nn.Module):
    """What inputs go through before a network's first layer: it has no tensors, and keeps samples apart."""


def traced(model: nn.Module) -> fx.Graph:
    """The layers and functions of a network, in their order.

    Args:
        model: in evaluation mode.

    Raises:
        ModelError: what it computes depends on its inputs' values, or cannot be followed for another reason.
    """
    try:
        return _Tracer().trace(model)
    except (TraceError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"how {type(model).__name__} computes cannot be followed: {_first_line(error)}") from error


def layer_of(model: nn.Module, node: fx.Node) -> tuple[nn.Module | None, Any]:
    """The module that a node of a graph calls, or None, and what kind it is: a class, a function or a method's name."""
    module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module, node.target if module is None else type(module)


def flattens(node: fx.Node, module: nn.Module | None) -> bool:
    """Returns whether a node makes one vector of each sample."""
    said = [*node.args[1:2], node.kwargs.get("start_dim")][0]
    if isinstance(module, nn.Flatten):
        return bool(module.start_dim == 1)
    return node.target in _FLATTEN and bool(said == 1)


def name_of(node: fx.Node, module: nn.Module | None) -> str:
    """What to call a node in a message."""
    what = getattr(node.target, "__name__", node.target) if module is None else type(module).__name__
    return f"{what} ({node.target})" if module is not None else str(what)


class _Tracer(fx.Tracer):
    """Does not look into PyTorch's layers, nor into what branches by shapes: batch normalization, preparations."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _BatchNorm | Preparation) or super().is_leaf_module(m, module_qualified_name)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
