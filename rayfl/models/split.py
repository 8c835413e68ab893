"""A classification model made of an ordinary module by taking its last linear layer out."""

from __future__ import annotations

from torch import Tensor, nn

from rayfl.models.base import ClassificationModel


class SplitModel(ClassificationModel):
    """A module whose last linear layer is applied apart from it; the features are that layer's input.

    The tree names the head ``head`` and everything else ``body.<name in the module>``.

    Args:
        module: from inputs to logits; its linear layer ``head`` is taken out, so the module is changed.
        head: dotted name of the linear layer that makes the logits, with nothing after it.
        block: dotted name of the child of ``module`` whose other parameters, if any, form the classifier block with the
            head; None for the head alone.
        prepare: what inputs go through first.
    """

    def __init__(
        self, module: nn.Module, head: str, *, block: str | None = None, prepare: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.prepare = prepare or nn.Identity()
        parent, _, name = head.rpartition(".")
        owner = module.get_submodule(parent)
        layer = owner.get_submodule(name)
        setattr(owner, name, nn.Identity())
        self.body = module
        self.head = layer
        if block is not None and next(module.get_submodule(block).parameters(), None) is not None:
            self.classifier_modules = (f"body.{block}", "head")

    def features(self, x: Tensor) -> Tensor:
        features: Tensor = self.body(self.prepare(x))
        return features

    def classify(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits


class PixelModel(SplitModel):
    """A module whose last convolution is of one pixel: it becomes the linear layer that it is.

    Features are of shape (b, H, W[, D], f), and logits (b, H, W[, D], C).

    Args:
        module: from images to logits of shape (b, C, H, W[, D]); its last convolution is taken out.
        head: dotted name of the convolution, see :func:`is_pixelwise`.
    """

    def __init__(self, module: nn.Module, head: str) -> None:
        super().__init__(module, head)
        convolution = self.head
        assert isinstance(convolution, nn.Conv2d | nn.Conv3d)
        self.head = nn.Linear(convolution.in_channels, convolution.out_channels, convolution.bias is not None)
        self.head.load_state_dict(
            {name: value.flatten(1) if value.dim() > 1 else value for name, value in convolution.state_dict().items()}
        )

    def features(self, x: Tensor) -> Tensor:
        return super().features(x).movedim(1, -1)


def is_pixelwise(layer: nn.Module) -> bool:
    """Returns whether a layer is a convolution that makes each pixel of the same pixel, as a linear layer would."""
    if not isinstance(layer, nn.Conv2d | nn.Conv3d) or layer.groups != 1:
        return False
    return set(layer.stride) == {1} and set(layer.kernel_size) == {1} and set(layer.padding) == {0}


def last_linear_layer(module: nn.Module) -> str | None:
    """The dotted name of the last linear layer in the order of the module; None if it has none."""
    names = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    return names[-1] if names else None
