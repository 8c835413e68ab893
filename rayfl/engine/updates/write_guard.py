"""Detects in-place writes to tensors that user code may only read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from rayfl.params import leaves


class WriteGuard:
    """Detects in-place writes by PyTorch's version counters, almost without comparing or copying values.

    Writes that bypass the counters (through ``tensor.data``, or a NumPy array on the same memory) are not detected.

    Args:
        tree: the tensors; plain numbers are ignored.
        recorded: names of module buffers (running statistics), which forward passes change without counting a version:
            their values are compared.
    """

    def __init__(self, tree: Mapping[str, Any], recorded: Collection[str] = ()) -> None:
        found = [(path, leaf) for path, leaf in leaves(tree) if isinstance(leaf, Tensor)]
        # Inference tensors have no version counter; PyTorch itself refuses in-place writes to them.
        lent = [(path, leaf) for path, leaf in found if not leaf.is_inference()]
        self._paths, self._tensors = [path for path, _ in lent], [leaf for _, leaf in lent]
        self._versions = [leaf._version for leaf in self._tensors]
        self._recorded = [(path, leaf, leaf.clone()) for path, leaf in lent if path.rpartition("/")[2] in recorded]

    def written(self, recorded: bool = True) -> str | None:
        """Returns the path of the first tensor that was written to in place; None if there is none.

        Args:
            recorded: whether to compare the values of module buffers, too, for which the host waits for the device.
        """
        # Called after each turn of each client; one comparison almost always suffices.
        versions = [tensor._version for tensor in self._tensors]
        if versions != self._versions:
            both = zip(self._paths, versions, self._versions, strict=True)
            return next(path for path, now, before in both if now != before)
        if not (recorded and self._recorded):
            return None
        differ = torch.stack([(tensor != before).any() for _, tensor, before in self._recorded]).cpu().tolist()
        return next((path for (path, _, _), differs in zip(self._recorded, differ, strict=True) if differs), None)
