"""Which layers have a form for stacked clients."""

from __future__ import annotations

from torch import nn

from rayfl.models.forward_pass import ForwardPass, Stackable
from rayfl.models.layers.dropout import DROPOUTS
from rayfl.models.layers.lstm import StackableLSTM
from rayfl.models.layers.normalization import BATCH_NORMALIZATIONS

_FORMS = {**DROPOUTS, **BATCH_NORMALIZATIONS, nn.LSTM: StackableLSTM}


def make_stackable(model: nn.Module, forward_pass: ForwardPass) -> None:
    """Gives the layers of a model the form that can be stacked, where there is one, and tells them of forward passes.

    The layers stay the objects that they are, so that whatever refers to them has the new form. A subclass of a
    layer of PyTorch's, which may compute something else, stays as it is.
    """
    for module in model.modules():
        kind = _FORMS.get(type(module))
        if kind is not None and getattr(module, "proj_size", 0) == 0:
            module.__class__ = kind
        if isinstance(module, Stackable):
            module.forward_pass = forward_pass
