"""Normalization layers whose statistics, or whose whole state, never leave a client.

Whatever the method, a tensor of such a layer is a placeholder without elements wherever a model is on its way or at the
server: arithmetic on models goes on as before, and nothing of it costs a byte. At the client the placeholders of what
it receives become its own tensors, and what it would send of them is kept in its state instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from rayfl.models.base import Network
from rayfl.params import Tree, leaves
from rayfl.randomness import RandomStreams

PrivateNormPolicy = Literal["none", "statistics", "all"]
STATE = "private_norm"
"""Where a client's state keeps the tensors, by name."""


def private_names(network: Network, policy: PrivateNormPolicy) -> frozenset[str]:
    """Names of the tensors that stay with the client.

    Args:
        network: the model.
        policy: ``none``; ``statistics``, running statistics of normalization layers; ``all``, scales and shifts too.
    """
    if policy == "none":
        return frozenset()
    kept = network.buffer_names if policy == "statistics" else network.parameter_names + network.buffer_names
    return frozenset(kept) & frozenset(network.norm_names)


class PrivateNorm:
    """Takes private tensors out of what a client sends and puts them into what it receives.

    A client that has never sent a model has the tensors of the initial one.

    Args:
        network: the model, the same for all clients.
        policy: see :func:`private_names`.
        streams: the experiment's randomness; the initial model is that of the stream ``init.global``.

    Attributes:
        names: of the private tensors; a tree's leaf is private if its path ends in one of them.

    Source: Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization,
    ICLR 2021 (``all``).
    """

    def __init__(self, network: Network, policy: PrivateNormPolicy, streams: RandomStreams) -> None:
        self.names = private_names(network, policy)
        self._network = network
        self._streams = streams
        self._initial: Tree | None = None

    def withheld(self, tree: Mapping[str, Any]) -> Tree:
        """The tree with placeholders for private tensors."""
        return _chosen(tree, lambda name, leaf: leaf.new_zeros(0) if name in self.names else leaf)

    def joined(self, tree: Mapping[str, Any], state: Mapping[str, Any], device: torch.device) -> Tree:
        """Returns what a client receives, with its own tensors in the private places.

        Args:
            tree: as received.
            state: the client's state.
            device: where initial tensors are wanted.
        """
        own: Tree = state.get(STATE) or self._initial_tensors(device)
        # copies: a forward pass in training mode writes running statistics into the tensors it is given
        return _chosen(tree, lambda name, leaf: own[name].clone() if name in self.names else leaf)

    def kept_back(self, tree: Mapping[str, Any], state: Tree) -> Tree:
        """Returns what a client may send of ``tree``; the rest is kept in ``state``.

        Raises:
            ValueError: a private tensor is there twice, so that it is not clear which one to keep.
        """
        found: Tree = {}
        for path, leaf in leaves(tree):
            name = path.rpartition("/")[2]
            if name in self.names:
                if name in found:
                    raise ValueError(f"sends {name} of more than one model, of which train.private_norm can keep one")
                found[name] = leaf
        if not found:
            return dict(tree)
        state[STATE] = {**state.get(STATE, {}), **found}
        return self.withheld(tree)

    def _initial_tensors(self, device: torch.device) -> Tree:
        if self._initial is None:
            model = self._network.initialize(self._streams.integer("init.global"))
            self._initial = {name: model[name].to(device) for name in self.names}
        return self._initial


def _chosen(tree: Mapping[str, Any], choose: Callable[[str, Any], Any]) -> Tree:
    """The tree with ``choose(name, leaf)`` in the place of every leaf."""
    return {
        key: _chosen(value, choose)
        if isinstance(value, Mapping)
        else choose(key, value)
        if isinstance(value, Tensor)
        else value
        for key, value in tree.items()
    }
