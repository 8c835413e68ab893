"""Dropout whose masks come from the counter-based generator, so that a client has the same alone and in a stack."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from rayfl.models.forward_pass import Stackable


class _CountedDropout(_DropoutNd, Stackable):
    """Zeroes entries with the probability ``p``, rounded to a multiple of 1 / 65536, and scales the others up."""

    def forward(self, x: Tensor) -> Tensor:
        """``x``, shape (b, ...), in evaluation mode as it is."""
        if not self.training or self.p == 0:
            return x
        factor = x.new_zeros(()) if self.p == 1 else self.forward_pass.kept(self._drawn(x), 1 - self.p, x)
        return x.mul_(factor) if self.inplace else x * factor

    def _drawn(self, x: Tensor) -> tuple[int, ...]:
        """The shape of what is drawn."""
        return tuple(x.shape)


class CountedDropout(_CountedDropout, nn.Dropout):
    """``nn.Dropout`` with counted masks."""


class _OfChannels(_CountedDropout):
    def _drawn(self, x: Tensor) -> tuple[int, ...]:
        return (*x.shape[:2], *(1 for _ in x.shape[2:]))


class CountedDropout1d(_OfChannels, nn.Dropout1d):
    """``nn.Dropout1d`` with counted masks."""


class CountedDropout2d(_OfChannels, nn.Dropout2d):
    """``nn.Dropout2d`` with counted masks."""


class CountedDropout3d(_OfChannels, nn.Dropout3d):
    """``nn.Dropout3d`` with counted masks."""


DROPOUTS: dict[type[nn.Module], type[Stackable]] = {
    nn.Dropout: CountedDropout,
    nn.Dropout1d: CountedDropout1d,
    nn.Dropout2d: CountedDropout2d,
    nn.Dropout3d: CountedDropout3d,
}
"""By kind of PyTorch's, that with counted masks."""
