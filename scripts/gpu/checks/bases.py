"""Pretrained bases with random weights, clients' adapters over them, and made-up mini-batches."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from checks.bench import DEVICE, REHEARSAL, samples
from checks.running import SkippedError
from rayfl.examples import InputSpec
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.models.pretrained.section import PretrainedModel

_VIT: dict[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "image_size": 224, "patch_size": 16, "num_channels": 3,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
    "intermediate_size": 5632, "max_position_embeddings": 2048, "vocab_size": 32000, "pad_token_id": 0,
}  # fmt: skip
_SMALL_VIT: dict[str, Any] = {
    "hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768, "image_size": 32,
    "patch_size": 4, "num_channels": 3,
}  # fmt: skip
_LESS: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip
BASES: dict[str, tuple[str, dict[str, Any], InputSpec]] = {
    "ViT-B/16": ("ViT", _VIT, InputSpec("image", (3, 224, 224), 100)),
    "1.1 B decoder": ("Llama", _LLAMA, InputSpec("tokens", (512,), 4, vocabulary=32000)),
    "small ViT": ("ViT", _SMALL_VIT, InputSpec("image", (3, 32, 32), 10)),
    "digits ViT": (
        "ViT",
        {**_SMALL_VIT, "image_size": 8, "patch_size": 2, "num_channels": 1},
        InputSpec("image", (1, 8, 8), 10),
    ),
    "digits ViT-B/16": ("ViT", {**_VIT, "num_channels": 1}, InputSpec("image", (1, 224, 224), 10)),
    "many words": (
        "Llama",
        {**_LLAMA, "num_hidden_layers": 2, "vocab_size": 128256},
        InputSpec("tokens", (512,), 128256, 128256, "tokens"),
    ),
}
"""Bases with random weights, of the shapes of published ones."""


@cache
def folder_of(name: str) -> str:
    """A base with random weights; in rehearsals a tiny one."""
    if find_spec("transformers") is None:
        raise SkippedError("transformers is not installed")
    from rayfl.models.pretrained.loading import library

    transformers = library()
    family, options, spec = BASES[name]
    if REHEARSAL:
        options = {**options, **_LESS} | ({"num_key_value_heads": 2} if family == "Llama" else {})
    config = getattr(transformers, f"{family}Config")(**options, num_labels=spec.num_classes)
    kind = "ForImageClassification" if family == "ViT" else "ForSequenceClassification"
    kind = "ForCausalLM" if spec.target == "tokens" else kind
    with torch.device(DEVICE):
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}{kind}")(config).to(torch.bfloat16)
    _FOLDERS.append(tempfile.TemporaryDirectory())
    folder = Path(_FOLDERS[-1].name) / "base"
    model.save_pretrained(folder)
    return str(folder)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""They are removed when the process ends."""


def section_of(name: str, **options: Any) -> PretrainedModel:
    return PretrainedModel.model_validate({"folder": folder_of(name), "adapter": {"r": 8, "alpha": 16}, **options})


def spec_of(name: str) -> InputSpec:
    """The inputs of a base; in rehearsals small ones."""
    spec = BASES[name][2]
    if not REHEARSAL or spec.kind == "image":
        return spec
    return replace(spec, shape=(16,))


def network_of(name: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> AdaptedNetwork:
    network = section_of(name, **options).network(spec_of(name))
    network.compute_in(dtype)
    return network


def stack_of(network: AdaptedNetwork, clients: int) -> dict[str, Tensor]:
    """Adapters of some clients some way from their initial values, shape (N, ...)."""
    generator = torch.Generator().manual_seed(0)
    initial = network.initialize(0)
    return {
        name: torch.stack([leaf + 0.02 * torch.randn(leaf.shape, generator=generator) for _ in range(clients)]).to(
            DEVICE
        )
        for name, leaf in initial.items()
    }


def batches(name: str, clients: int, batch: int) -> tuple[Tensor, Tensor]:
    x, y = samples(spec_of(name), clients * batch, torch.Generator().manual_seed(1))
    return x.unflatten(0, (clients, batch)).to(DEVICE), y.unflatten(0, (clients, batch)).to(DEVICE)  # type: ignore[no-untyped-call]


def gradients_of(
    network: AdaptedNetwork, stack: Mapping[str, Tensor], x: Tensor, y: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Losses of all clients, and the gradients of each."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in stack.items()}

    def loss(tree: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(network.logits(tree, x, training=True), y)

    losses = vmap(loss)(leaves, x, y)
    return losses.detach(), torch.autograd.grad(losses.sum(), list(leaves.values()))
