"""CLIP whose classes are told by texts with a trained context, as methods of prompts name and check it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.models.pretrained.clip import ClipNetwork
from rayfl.models.pretrained.text_head import CONTEXT
from rayfl.params import Tree
from rayfl.tasks.base import Task


def check_context(method: str, network: Network) -> None:
    """Refuses a model that is no CLIP with a context that is trained.

    Args:
        method: what to call the method.
        network: the model.

    Raises:
        ConfigError: naming what to set.
    """
    if not network.groups.get("context"):
        raise ConfigError(
            f"{method} needs CLIP with a context that is trained: set model=pretrained, model.folder to that of a "
            "CLIPModel, and model.prompt.context=shared or by_class (docs/adapters.md)"
        )


def clip_of(task: Task) -> ClipNetwork:
    """Returns the network of a task whose model :func:`check_context` accepts."""
    assert isinstance(task.network, ClipNetwork)
    return task.network


def with_context(model: Mapping[str, Tensor], context: Tensor) -> Tree:
    """Returns a model with another context in the place of its own."""
    return {**model, CONTEXT: context}
