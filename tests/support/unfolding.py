"""Convolutions of stacked clients as products of unfolded inputs, which grouped ones are compared with."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from rayfl.examples import InputSpec
from rayfl.models.architecture import Architecture
from rayfl.models.base import ClassificationModel, Network


class Unfolded(nn.Conv2d):
    """A convolution as a product: inputs are written out patch by patch, (b, c k k, positions)."""

    def forward(self, x: Tensor) -> Tensor:
        side = [
            (size + 2 * pad - kernel) // step + 1
            for size, pad, kernel, step in zip(x.shape[2:], self.padding, self.kernel_size, self.stride, strict=True)  # type: ignore[arg-type]
        ]
        patches = functional.unfold(x, self.kernel_size, padding=self.padding, stride=self.stride)  # type: ignore[arg-type]
        # One product a client: (outputs, c k k) by (c k k, b positions).
        found = self.weight.flatten(1) @ patches.movedim(0, 1).flatten(1)
        found = found if self.bias is None else found + self.bias[:, None]
        return found.unflatten(1, (len(x), *side)).movedim(0, 1)


def _unfolded(model: ClassificationModel) -> ClassificationModel:
    """The model, with convolutions of that form."""
    for module in model.modules():
        if type(module) is nn.Conv2d:
            module.__class__ = Unfolded
    return model


def convolving(architecture: Architecture, spec: InputSpec, unfold: bool) -> Network:
    """The network of an architecture, with convolutions as they are or of that form."""
    return Network(lambda: _unfolded(architecture.build(spec)) if unfold else architecture.build(spec))
