"""Texts that a causal transformer reads piece by piece: keys and values of what it has read stay with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rayfl.models.pretrained.loading import library

Call = Callable[[Callable[[Any, Tensor], Tensor], Tensor], Tensor]
"""Runs a function of a model and of tokens, shape (b, t), with the model whose tree is bound."""


class Reading:
    """What one model has read of several texts; each further token costs what it takes to read that token alone.

    Texts are filled up on the left, so that the next token of each is in the next column: what a model with a sliding
    window sees of a text does not depend on the others.

    Args:
        call: runs the model.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._cache: Any = None
        self._known: Tensor | None = None

    def read(self, x: Tensor, known: Tensor | None = None) -> Tensor:
        """Reads further tokens, and returns what the output layer reads at the last of them, shape (b, f).

        Args:
            x: tokens, shape (b, t).
            known: false where ``x`` fills a text up, bool of the shape of ``x``; None: nowhere.
        """
        known = torch.ones_like(x) if known is None else known.to(x.dtype)
        self._known = known if self._known is None else torch.cat([self._known, known], 1)
        found = self._call(self._further, x)
        return found

    def keep(self, places: Tensor) -> None:
        """Forgets all texts but some.

        Args:
            places: of those that stay, int64.
        """
        assert self._known is not None
        self._known = self._known[places]
        self._cache.batch_select_indices(places)

    def _further(self, model: Any, x: Tensor) -> Tensor:
        if self._cache is None:
            self._cache = library().DynamicCache(config=model.model.config)
        found: Tensor = model.further_features(x, self._known, self._cache)
        return found
