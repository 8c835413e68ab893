"""Memory that local updates use one after the other."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from rayfl.params import Layout

_LAYOUTS = 4
"""A method trains few different trees; of more, the memory of the least recently used is given up."""


class Workspace:
    """Flat buffers that are not handed out with the result of a local update, kept for the next one.

    Memory that is new to a process has to be cleared and mapped page by page, which for a client of a few steps takes
    as long as one of them. Only one local update may use a workspace at a time.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, Layout, torch.device], Tensor] = OrderedDict()

    def buffer(self, purpose: str, layout: Layout, device: torch.device) -> Tensor:
        """A buffer of the layout's size and type: zeros at first, then as its last user has left it.

        Args:
            purpose: buffers of different purposes are different ones.
            layout: gives size and type, and tells buffers apart whose padding lies elsewhere.
            device: where it lies.
        """
        key = (purpose, layout, device)
        if key not in self._kept:
            self._kept[key] = torch.zeros(layout.size, dtype=layout.dtype, device=device)
            while len({known for _, known, _ in self._kept}) > _LAYOUTS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]
