"""A transformer with adapters and a head, whose clients lie in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from rayfl.models.base import ClassificationModel
from rayfl.models.pretrained.prompts import Prompts, image_features, text_features
from rayfl.models.pretrained.sites import Head


class AdaptedModel(ClassificationModel):
    """A transformer with adapters and a head, whose clients lie in the batch.

    Args:
        module: the transformer, with sites and trained layers put in.
        head: dotted name of its last layer.
        block: dotted name of the module that is new for the task.
        image: whether inputs are images.
        channels: of the images that the base reads; grey ones are repeated.
        padding: the token that an encoder must not look at. None: there is none, or the model is causal, which needs
            no mask where rows are padded on the right.
        prompts: virtual tokens that the transformer reads too; None: there are none.

    Attributes:
        blocks: the layers that can be computed again in the backward pass, if that may be asked for.
    """

    def __init__(
        self,
        module: nn.Module,
        head: str,
        block: str,
        image: bool,
        channels: int = 0,
        padding: int | None = None,
        prompts: Prompts | None = None,
    ) -> None:
        super().__init__()
        self.prompts = prompts
        self.model = module
        self.head_module = f"model.{head}"
        self.classifier_modules = (f"model.{block}",)
        self._block, self._image, self._channels, self._padding = block, image, channels, padding
        self.blocks: tuple[Any, ...] = ()
        for one in module.modules():
            # What a base keeps belongs to it, and so to no tree.
            one._non_persistent_buffers_set.update(one._buffers)
        # Modules are made in training mode: without this the first passes would be taken for what the mode is already.
        self.train(False)

    def features(self, x: Tensor) -> Tensor:
        """Returns what the head reads, shape (N b, f)."""
        if not self._image:
            mask = None if self._padding is None else _of_tokens(x, self._padding)
            if self.prompts is not None:
                return text_features(self.model, self.prompts, x, mask, self._block)
            found: Tensor = self.model(input_ids=x, **({} if mask is None else {"attention_mask": mask})).logits
            return found
        pixels = self.pixels(x)
        if self.prompts is not None:
            return image_features(self.model, self.prompts, pixels)
        found = self.model(pixel_values=pixels).logits
        return found

    def pixels(self, x: Tensor) -> Tensor:
        """Images with the channels that the base reads."""
        return x.expand(-1, self._channels, -1, -1) if x.shape[1] == 1 else x

    def classify(self, features: Tensor) -> Tensor:
        """Logits (N b, C) of features (N b, f)."""
        head = self.model.get_submodule(self.head_module.removeprefix("model."))
        if isinstance(head, Head):
            return head.outputs(features)
        logits: Tensor = head(features)
        return logits

    def checkpointing(self, blocks: Sequence[nn.Module], now: bool) -> Self:
        """Says which layers can be computed again in the backward pass, and whether they are from now on."""
        self.blocks = tuple(blocks)
        for block in self.blocks:
            block.gradient_checkpointing = now
        return self

    def train(self, mode: bool = True) -> Self:
        """Keeps the base in evaluation mode; only blocks that are computed twice know that there is a backward pass."""
        super().train(False)
        self.training = mode
        for block in self.blocks:
            block.training = mode
        return self


def _of_tokens(x: Tensor, padding: int) -> Tensor:
    """1 for the tokens of rows and 0 for the padding behind the last of them, int64 of the shape of x."""
    places = torch.arange(1, x.shape[1] + 1, device=x.device)
    return (places <= ((x != padding) * places).amax(1, keepdim=True)).long()
