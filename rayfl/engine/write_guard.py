"""Tensors that are lent out and must come back as they were."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from rayfl.params import leaves


class WriteGuard:
    """Notices writes in place, by the version that PyTorch counts for every tensor: little is compared or copied.

    What is written past PyTorch (through ``tensor.data``, or an array of NumPy's on the same memory) is not noticed.

    Args:
        tree: the tensors; plain numbers among them do not matter.
        recorded: names of the tensors in which a forward pass may record something (running statistics). PyTorch does
            not count that as a write: their values are compared.
    """

    def __init__(self, tree: Mapping[str, Any], recorded: Collection[str] = ()) -> None:
        found = [(path, leaf) for path, leaf in leaves(tree) if isinstance(leaf, Tensor)]
        # PyTorch itself refuses writes to what was made in inference mode, and counts none.
        lent = [(path, leaf) for path, leaf in found if not leaf.is_inference()]
        self._paths, self._tensors = [path for path, _ in lent], [leaf for _, leaf in lent]
        self._versions = [leaf._version for leaf in self._tensors]
        self._recorded = [(path, leaf, leaf.clone()) for path, leaf in lent if path.rpartition("/")[2] in recorded]

    def written(self) -> str | None:
        """The path of the first tensor that has been written to in place; None if there is none."""
        # Asked after each turn of each client, and answered by one comparison almost always.
        versions = [tensor._version for tensor in self._tensors]
        if versions != self._versions:
            both = zip(self._paths, versions, self._versions, strict=True)
            return next(path for path, now, before in both if now != before)
        if not self._recorded:
            return None
        differ = torch.stack([(tensor != before).any() for _, tensor, before in self._recorded]).cpu().tolist()
        return next((path for (path, _, _), differs in zip(self._recorded, differ, strict=True) if differs), None)
