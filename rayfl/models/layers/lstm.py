"""An LSTM that can be stacked: by products for all clients at once, time step by time step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayfl.models.forward_pass import Stackable, is_stacked
from rayfl.models.layers.recurrent_weights import in_one_block

State = tuple[Tensor, Tensor]


class StackableLSTM(nn.LSTM, Stackable):
    """PyTorch's LSTM, written out where clients are stacked, for which PyTorch's own has no batching rule.

    Both forms agree up to rounding. Dropout between layers has counted masks; client by client such layers are called
    one by one.
    """

    def forward(self, x: Any, hx: State | None = None) -> Any:
        """See ``nn.LSTM``. Stacked, the inputs have the shape (b, T, f), or (T, b, f) without ``batch_first``."""
        weights = [getattr(self, name) for name in self._flat_weights_names]
        stacked = any(isinstance(one, Tensor) and is_stacked(one) for one in (x, *weights))
        if not stacked and not (self.training and self.dropout and self.num_layers > 1):
            return super().forward(x, hx)
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise TypeError("an LSTM that is stacked, or that has dropout, needs inputs of shape (b, T, f)")
        if hx is None:
            width = self.num_layers * (2 if self.bidirectional else 1)
            zeros = x.new_zeros(width, x.shape[0 if self.batch_first else 1], self.hidden_size)
            hx = zeros, zeros
        ends: list[tuple[Tensor, Tensor]] = []
        for layer, (hidden, cell) in enumerate(zip(*(part.chunk(self.num_layers) for part in hx), strict=True)):
            if layer and self.training and self.dropout:
                rows = x if self.batch_first else x.transpose(0, 1)
                rows = rows * self.forward_pass.kept(rows.shape, 1 - self.dropout, rows)
                x = rows if self.batch_first else rows.transpose(0, 1)
            x, hidden, cell = self._stepped(x, hidden, cell, layer) if stacked else self._own(x, hidden, cell, layer)
            ends.append((hidden, cell))
        last, cells = (torch.cat(part) for part in zip(*ends, strict=True))
        return x, (last, cells)

    def _own(self, x: Tensor, hidden: Tensor, cell: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """A layer as PyTorch computes it."""
        count = len(self._flat_weights) // self.num_layers
        weights: Any = self._flat_weights[layer * count : (layer + 1) * count]
        weights = weights if x.device.type == "cpu" else in_one_block(weights)
        found: Any = torch.lstm(
            x, (hidden, cell), weights, self.bias, 1, 0.0, self.training, self.bidirectional, self.batch_first
        )
        return found  # type: ignore[no-any-return]

    def _stepped(self, x: Tensor, hidden: Tensor, cell: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """A layer, written out."""
        time = 1 if self.batch_first else 0
        outputs, ends = [], []
        for place, name in enumerate((f"l{layer}", f"l{layer}_reverse")[: len(hidden)]):
            of_inputs, of_states = getattr(self, f"weight_ih_{name}"), getattr(self, f"weight_hh_{name}")
            bias = getattr(self, f"bias_ih_{name}") + getattr(self, f"bias_hh_{name}") if self.bias else None
            # What inputs add to the gates, at all time steps at once.
            added = functional.linear(x, of_inputs, bias).unbind(time)
            h, c, turned, found = hidden[place], cell[place], of_states.t(), []
            for step in reversed(added) if place else added:
                enters, stays, candidate, leaves = (step + h @ turned).chunk(4, -1)
                c = stays.sigmoid() * c + enters.sigmoid() * candidate.tanh()
                h = leaves.sigmoid() * c.tanh()
                found.append(h)
            outputs.append(torch.stack(found[::-1] if place else found, time))
            ends.append((h, c))
        last, cells = (torch.stack(part) for part in zip(*ends, strict=True))
        return torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0], last, cells
