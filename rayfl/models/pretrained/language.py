"""Causal language models over a frozen base: the next token at each position, by the base's own output layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfl.metrics.language import IGNORED
from rayfl.models.base import ClassificationModel
from rayfl.models.pretrained.adapted_model import AdaptedModel
from rayfl.models.pretrained.families import OUTPUT_LAYER
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.models.pretrained.output_layer import rows_at_a_time, token_losses
from rayfl.models.pretrained.prompts import Prompts, behind_padding, token_features
from rayfl.models.pretrained.reading import Reading
from rayfl.models.pretrained.sites import replace


class AdaptedLanguageModel(AdaptedModel):
    """A causal transformer with adapters; its output layer is the base's, and is not trained.

    Rows are padded on the right. What a causal model computes at a token does not depend on those after it, so that
    padding needs no mask, and columns that hold nothing else may be left out.

    Args:
        module: the transformer, on the device ``meta``, with sites put in.
        padding: the token that fills rows up; None: none does.
        prompts: virtual tokens that are read before the texts; None: there are none.
    """

    def __init__(self, module: nn.Module, padding: int | None, prompts: Prompts | None = None) -> None:
        # Where the base ties its output layer to its embedding, both are one tensor. In trees and places they are two.
        tied = module.get_submodule(OUTPUT_LAYER)
        outputs, inputs = tied.weight.shape  # type: ignore[misc]
        own = nn.Linear(int(inputs), int(outputs), bias=False, device="meta").requires_grad_(False)
        replace(module, OUTPUT_LAYER, own)
        super().__init__(module, OUTPUT_LAYER, OUTPUT_LAYER, image=False, prompts=prompts)
        self.padding, self._tokens = padding, int(outputs)

    def features(self, x: Tensor) -> Tensor:
        """Returns what the output layer reads at each position, shape (N b, T, f)."""
        known = x if self.padding is None or self.padding < self._tokens else x.where(x < self._tokens, 0)
        trunk: Any = self.model.base_model
        if self.prompts is not None:
            return token_features(trunk, self.prompts, known)
        found: Tensor = trunk(input_ids=known).last_hidden_state
        return found

    def further_features(self, x: Tensor, known: Tensor, cache: Any) -> Tensor:
        """Returns what the output layer reads at the last of some further tokens, shape (b, f).

        Args:
            x: the tokens, shape (b, t).
            known: 1 for the tokens of the texts so far and 0 for what fills them up on the left, with those of ``x`` at
                its end, int64 of shape (b, T).
            cache: keys and values of the tokens before ``x``, as transformers keeps them; gets those of ``x``.
        """
        trunk: Any = self.model.base_model
        read: dict[str, Tensor] = {"input_ids": x}
        if self.prompts is not None:
            if not cache.get_seq_length():
                read = {"inputs_embeds": behind_padding(self.prompts, trunk.get_input_embeddings()(x), known)}
            known = F.pad(known, (0, self.prompts.count), value=1)  # they are behind the padding too
        (tokens,) = read.values()
        places = (known.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        found: Tensor = trunk(
            **read, attention_mask=known, position_ids=places, past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1]
        return found

    @property
    def output_weight(self) -> Tensor:
        """The matrix of the output layer, shape (V, f)."""
        layer: Any = self.model.get_submodule(OUTPUT_LAYER)
        weight: Tensor = layer.weight
        return weight


class LanguageNetwork(AdaptedNetwork):
    """An :class:`AdaptedLanguageModel` as a function of its adapters; see the base class."""

    why_differentiable_once = "the output layer of a language model has none: it is computed in parts"

    @property
    def output_rows(self) -> int:  # type: ignore[override]
        """Of how many positions logits are in memory at a time."""
        return rows_at_a_time(self.head_shape[0])

    def reading(self, tree: Mapping[str, Tensor]) -> Reading:
        """Returns what reads texts piece by piece with the adapters of a tree."""
        return Reading(lambda entry, x: self._call(entry, tree, x, False))

    def beginning(self) -> dict[str, Tensor]:
        """Returns the initial model of the seed that the network is settled for, which a run begins with."""
        return self.initialize(self._seed)

    def token_losses(
        self,
        tree: Mapping[str, Tensor],
        x: Tensor,
        y: Tensor,
        *,
        training: bool = False,
        mask: Tensor | None = None,
    ) -> Tensor:
        """See the base class; what is no sample has no loss. At most ``output_rows`` rows of logits exist at a time."""
        if mask is not None:
            y = y.where(mask[:, None] > 0, IGNORED)
        found: Tensor = self._call(_token_losses, tree, torch.stack([x, y], -1), training)
        return found


def _token_losses(model: ClassificationModel, both: Tensor) -> Tensor:
    """Cross-entropies (b, T) of tokens and targets, stacked along the last dimension."""
    assert isinstance(model, AdaptedLanguageModel)
    x, y = both.unbind(-1)
    features = model.features(x)
    return token_losses(features.flatten(0, 1), model.output_weight, y.flatten()).view_as(y)
