"""Small pretrained models with random weights, as files of transformers, and networks with adapters over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from rayfl.examples import InputSpec
from rayfl.models.pretrained import network as adapted
from rayfl.models.pretrained.folding import Run
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.models.pretrained.section import PretrainedModel

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")

IMAGES = InputSpec("image", (1, 8, 8), 10)
TOKENS = InputSpec("tokens", (12,), 4, vocabulary=50)
NEXT = InputSpec("tokens", (12,), 50, 50, "tokens", padding=0)
_TEXT: dict[str, Any] = {"vocab_size": 50, "pad_token_id": 0, "num_labels": 4}
_SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
_DECODER: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "head_dim": 8, **_SPECIAL, **_TEXT,
}  # fmt: skip
_ENCODER: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, **_SPECIAL, **_TEXT,
}  # fmt: skip
_VIT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 8,
    "patch_size": 4, "num_channels": 1, "num_labels": 5,
}  # fmt: skip
_GPT2: dict[str, Any] = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_SPECIAL, **_TEXT
}  # fmt: skip
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTConfig", "ViTForImageClassification", _VIT),
    "llama": ("LlamaConfig", "LlamaForSequenceClassification", _DECODER),
    "mistral": ("MistralConfig", "MistralForSequenceClassification", _DECODER),
    "qwen2": ("Qwen2Config", "Qwen2ForSequenceClassification", _DECODER),
    "qwen3": ("Qwen3Config", "Qwen3ForSequenceClassification", _DECODER),
    "gpt2": ("GPT2Config", "GPT2ForSequenceClassification", _GPT2),
    "bert": ("BertConfig", "BertForSequenceClassification", _ENCODER),
    "roberta": ("RobertaConfig", "RobertaForSequenceClassification", _ENCODER),
}
"""By family: the classes of its configuration and model, and a small configuration."""

CAUSAL = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
"""By family, the class of its language model."""

_FOLDERS: list[TemporaryDirectory[str]] = []
"""They are removed when the process ends."""


def write_base(
    family: str,
    folder: Path,
    shard: str = "5GB",
    seed: int = 0,
    causal: bool = False,
    outputs: int | None = None,
    vocabulary: int | None = None,
) -> Path:
    """Writes a base with random weights.

    Args:
        family: of :data:`CONFIGS`.
        folder: is made.
        shard: largest size of a file.
        seed: of the weights.
        causal: whether it is a language model, or a classifier.
        outputs: of its head; None: those of :data:`CONFIGS`.
        vocabulary: how many tokens it has; None: those of :data:`CONFIGS`.
    """
    config, model, options = CONFIGS[family]
    options = options if outputs is None else {**options, "num_labels": outputs}
    options = options if vocabulary is None else {**options, "vocab_size": vocabulary}
    model = CAUSAL[family] if causal else model
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        made = getattr(transformers, model)(getattr(transformers, config)(**options))
    made.save_pretrained(folder, max_shard_size=shard)
    return folder


@cache
def base(family: str, causal: bool = False) -> Path:
    """A base that all tests of this process share, and none writes to."""
    _FOLDERS.append(TemporaryDirectory(prefix=f"rayfl-{family}-"))
    return write_base(family, Path(_FOLDERS[-1].name), causal=causal)


def section(family: str, **options: Any) -> PretrainedModel:
    """The section of a configuration, with small adapters."""
    return PretrainedModel.model_validate({"folder": str(base(family)), "adapter": {"r": 3, "alpha": 6}, **options})


def network(family: str, **options: Any) -> AdaptedNetwork:
    """A network over a shared base."""
    return section(family, **options).network(IMAGES if family == "vit" else TOKENS)


@cache
def vit() -> AdaptedNetwork:
    """The network over a vision transformer; not made where modules are imported, which every process does."""
    return network("vit")


def inputs(family: str, samples: int, seed: int) -> Tensor:
    """Inputs of a family, shape (samples, ...)."""
    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        return torch.rand(samples, 1, 8, 8, generator=generator)
    return torch.randint(1, 50, (samples, 12), generator=generator)


def trained(network: AdaptedNetwork, seed: int, scale: float = 0.1) -> dict[str, Tensor]:
    """A tree some way from its initial values, so that B is not zero."""
    generator = torch.Generator().manual_seed(seed)
    tree = network.initialize(seed)
    return {name: leaf + scale * torch.randn(leaf.shape, generator=generator) for name, leaf in tree.items()}


def language_section(family: str, **options: Any) -> PretrainedModel:
    """The section of a configuration of a language model."""
    given = {"folder": str(base(family, causal=True)), "adapter": {"r": 3, "alpha": 6}, "head": {"train": False}}
    return PretrainedModel.model_validate({**given, **options})


def language_network(family: str, **options: Any) -> AdaptedNetwork:
    """A language model over a shared base."""
    return language_section(family, **options).network(NEXT)


def merged(family: str, net: AdaptedNetwork, tree: dict[str, Tensor]) -> Any:
    """The language model of transformers with the adapters' products added to its weights."""
    model = getattr(transformers, CAUSAL[family]).from_pretrained(base(family, causal=True), local_files_only=True)
    state = dict(model.named_parameters())
    with torch.no_grad():
        for site in net.sites:
            product = net.scale * tree[f"{site}.lora_B.weight"] @ tree[f"{site}.lora_A.weight"]
            state[f"{site.removeprefix('model.')}.weight"] += product.T if family == "gpt2" else product
    return model.eval()


def texts(samples: int, seed: int, shortest: int = 4) -> tuple[Tensor, Tensor]:
    """Ragged rows and their next tokens, of which those of a prompt are not asked for; shapes (samples, 12)."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(1, 50, (samples, 13), generator=generator)
    lengths = torch.randint(shortest, 14, (samples, 1), generator=generator)
    prompts = torch.randint(1, shortest, (samples, 1), generator=generator)
    places = torch.arange(13)
    whole = whole.where(places < lengths, 0)
    asked = (places[1:] >= prompts) & (places[1:] < lengths)
    return whole[:, :-1], whole[:, 1:].where(asked, -100)


@contextmanager
def passes_of_networks() -> Iterator[list[Tensor]]:
    """Gives the inputs of every pass of adapted networks, to the network or to its head, until it ends."""
    seen: list[Tensor] = []
    folded = adapted.folded

    def noting(run: Run, leaves: Sequence[Tensor], x: Tensor) -> Any:
        def noted(leaves: Sequence[Tensor], x: Tensor) -> Any:
            seen.append(x)
            return run(leaves, x)

        return folded(noted, leaves, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapted, "folded", noting)
        yield seen
