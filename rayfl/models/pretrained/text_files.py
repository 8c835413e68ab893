"""What CLIP's texts are in an exported folder: the head that they make, the context, and the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from rayfl.models.base import Network
from rayfl.models.pretrained.text_head import CONTEXT, WEIGHT

TEXT_HEAD = "text_head.safetensors"
"""The head: ``weight``, s t of shape (C, D), whose products with an image's features of length one are logits; and the
``context`` that it is made of, if one was trained."""

_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt",
)  # fmt: skip
"""Files in which transformers saves the tokenizers of CLIP."""


def is_of_texts(name: str) -> bool:
    """Returns whether a tensor is the head that texts make, or their context."""
    return name in (CONTEXT, WEIGHT)


def text_head_file(network: Network, tensors: Mapping[str, Tensor], classes: Sequence[str]) -> dict[str, bytes]:
    """The file :data:`TEXT_HEAD` by its name; none for a model whose head is not made of texts.

    Args:
        network: of the model.
        tensors: by name in a tree, also what is fixed.
        classes: their names.
    """
    own = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items() if is_of_texts(name)}
    if not own:
        return {}
    if "weight" not in own:
        model = {name: tensors[name] for name in network.parameter_names}
        with torch.no_grad():
            own["weight"] = network.classify(model, torch.eye(network.head_shape[1])).T
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in own.items()}
    return {TEXT_HEAD: safetensors.torch.save(whole, {"format": "pt", "classes": json.dumps(list(classes))})}


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The files of the tokenizer in a base's folder, by name."""
    return {name: (folder / name).read_bytes() for name in _TOKENIZER if (folder / name).is_file()}
