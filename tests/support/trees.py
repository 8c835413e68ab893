"""Random trees of tensors, for hypothesis."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

KEYS = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), max_size=4)
SHAPES = st.lists(st.integers(0, 5), max_size=3)


@st.composite
def tensors_of(draw: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    shape = draw(SHAPES)
    seed = draw(st.integers(0, 2**32))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def trees(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Non-empty trees without empty branches."""
    branch = lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=4)  # noqa: E731
    return branch(st.recursive(leaf, branch, max_leaves=6))
