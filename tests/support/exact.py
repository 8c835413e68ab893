"""Adapted networks and their bases in float64, and adapters put into transformers' own models by hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rayfl.models.pretrained.network import AdaptedNetwork
from tests.support.bases import CAUSAL, CONFIGS, base, transformers


def outputs(net: AdaptedNetwork, tree: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """A network's outputs with a tree in float64, over the base in float64."""
    net.compute_in(torch.float64)
    leaves = [leaf[None] for leaf in tree.values()]
    model: Any = net._placed(tuple(tree), leaves, False)
    found: Tensor = model(x.double() if x.is_floating_point() else x)
    return found


def double(tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leaves in float64 that require gradients."""
    return {name: leaf.double().requires_grad_() for name, leaf in tree.items()}


def plain(family: str, classes: int | None) -> Any:
    """transformers' own model in float64: a classifier, or for no classes a language model."""
    kind = CAUSAL[family] if classes is None else CONFIGS[family][1]
    options = {} if classes is None else {"num_labels": classes, "ignore_mismatched_sizes": True}
    model = getattr(transformers, kind).from_pretrained(
        base(family, causal=classes is None), dtype=torch.float64, local_files_only=True, **options
    )
    return model.eval()


def with_head(model: Any, tree: Mapping[str, Tensor], call: Callable[[], Tensor]) -> Tensor:
    """What a call of a model returns while its head has the values of a tree, of which gradients are known."""
    own = {name.removeprefix("model."): leaf for name, leaf in tree.items() if name.startswith("model.")}
    head = {name: leaf for name, leaf in own.items() if not name.endswith(".ia3_l")}
    places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in head]
    before = [place._parameters.pop(key) for place, key in places]
    try:
        for (place, key), leaf in zip(places, head.values(), strict=True):
            setattr(place, key, leaf)
        return call()
    finally:
        for (place, key), old in zip(places, before, strict=True):
            delattr(place, key)
            setattr(place, key, old)


def check_same(found: Tensor, expected: Tensor, tree: Mapping[str, Tensor], seed: int = 0) -> None:
    """Outputs, and gradients of a random linear function of them, agree to 1e-10 of the largest."""
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()
    one, other = (torch.autograd.grad((out * weights).sum(), list(tree.values())) for out in (found, expected))
    for name, mine, theirs in zip(tree, one, other, strict=True):
        assert theirs.abs().max() > 0, name
        assert (mine - theirs).abs().max() <= 1e-10 * theirs.abs().max(), name
