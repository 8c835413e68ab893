"""Where a module keeps its tensors, and what its layers tell of how it can be run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from rayfl.models.forward_pass import Stackable


def slots(module: nn.Module, tree: Mapping[str, Tensor]) -> tuple[tuple[dict[str, Any], str, str], ...]:
    """Every place that holds a tensor of the tree: (dictionary of the owner, key in it, name in the tree)."""
    names = {id(tensor): name for name, tensor in tree.items()}
    return tuple(
        (tensors, key, names[id(tensor)])
        for owner in module.modules()
        for tensors in (owner._parameters, owner._buffers)
        for key, tensor in tensors.items()
        if id(tensor) in names
    )


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def grouped(names: Iterable[str], key: Callable[[str], Any]) -> tuple[tuple[str, ...], ...]:
    """Runs of names with one key."""
    return tuple(tuple(group) for _, group in groupby(names, key))


def owner_of(name: str) -> str:
    """The module that a parameter belongs to."""
    return name.rpartition(".")[0]


def stacked_at(name: str) -> str:
    """The layer of a recurrent module that ``weight_ih_l0``, ``bias_hh_l1_reverse`` and the like belong to."""
    return name.removesuffix("_reverse").rpartition("_l")[2]


def under(names: Iterable[str], modules: Iterable[str]) -> tuple[str, ...]:
    """The names that belong to one of the modules."""
    prefixes = tuple(f"{module}." for module in modules)
    return tuple(name for name in names if name.startswith(prefixes))


def draws(module: nn.Module) -> bool:
    """Returns whether the module draws random numbers in training mode."""
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, _DropoutNd) and module.p > 0


def obstacle(module: nn.Module) -> str:
    """Returns why the module cannot be trained under vmap; empty if it can."""
    if isinstance(module, Stackable):
        return ""
    kind = type(module).__name__
    if isinstance(module, nn.RNNBase):
        return f"{kind} has no batching rule"
    if isinstance(module, _BatchNorm):
        return f"{kind} uses batch statistics in training"
    if draws(module):
        return f"{kind} draws random numbers"
    return ""


def second_obstacle(module: nn.Module) -> str:
    """Returns why the module has no second derivative under vmap; empty if it has one.

    PyTorch's backward pass of normalization under vmap takes the inputs for constants in the slope of the scale.
    """
    scaled = isinstance(module, _NormBase | nn.LayerNorm) and module.weight is not None and module.weight.requires_grad
    return f"the second derivative of {type(module).__name__} is wrong in PyTorch for stacked clients" if scaled else ""
