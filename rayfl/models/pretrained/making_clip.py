"""A small CLIP that is made here in seconds: it tells scikit-learn's digits 0 to 4 by their names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rayfl.models.pretrained.prompt_section import PromptConfig

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
"""Of the digits, in English."""

_OTHERS = ("a", "an", "the", "photo", "picture", "image", "of", "digit", "number", "handwritten", ".", ",")
_FILLS, _UNKNOWN, _BEGINS, _ENDS = "<fill>", "<unknown>", "<begin>", "<end>"


class Contrasted(nn.Module):
    """A CLIP whose outputs for images are its logits for some texts, and which is saved with its tokenizer.

    Args:
        model: transformers' ``CLIPModel``.
        tokenizer: of its texts.
        texts: what images are contrasted with.
    """

    def __init__(self, model: Any, tokenizer: Any, texts: list[str]) -> None:
        super().__init__()
        self.model, self._tokenizer = model, tokenizer
        self._tokens = torch.tensor(tokenizer(texts)["input_ids"])

    def forward(self, pixel_values: Tensor) -> Any:
        """Logits as the attribute ``logits``, shape (b, number of texts)."""
        found = self.model(input_ids=self._tokens, pixel_values=pixel_values)
        return SimpleNamespace(logits=found.logits_per_image)

    def save_pretrained(self, folder: Path) -> None:
        """Writes the model and its tokenizer."""
        self.model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)


def clip(transformers: Any, pixels: Tensor, labels: Tensor) -> tuple[Any, Mapping[str, Tensor], Tensor]:
    """Two towers of two blocks, and images with their classes, of which the names are :data:`NAMES`.

    Args:
        transformers: the package.
        pixels: images, float32 of shape (n, 1, 8, 8).
        labels: their classes, int64.
    """
    tokenizer = _word_tokenizer(transformers)
    tower = {
        "hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3,
        "initializer_factor": 2.0,  # narrow towers learn faster from larger values
    }  # fmt: skip
    texts = {
        "vocab_size": len(tokenizer), "max_position_embeddings": 32, "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    config = transformers.CLIPConfig(
        text_config={**tower, **texts},
        vision_config={**tower, "image_size": 8, "patch_size": 2, "num_channels": 1},
        projection_dim=32,
        initializer_factor=2.0,
    )
    prompt = PromptConfig()
    known = [prompt.text_of(name) for name in NAMES[: int(labels.max()) + 1]]
    return Contrasted(transformers.CLIPModel(config), tokenizer, known), {"pixel_values": pixels}, labels


def _word_tokenizer(transformers: Any) -> Any:
    """A tokenizer of a few words, which begins and ends texts as CLIP's own does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = [_FILLS, _UNKNOWN, *_OTHERS, *NAMES, _BEGINS, _ENDS]
    numbers = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(numbers, unk_token=_UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(word, numbers[word]) for word in (_BEGINS, _ENDS)]
    made.post_processor = processors.TemplateProcessing(single=f"{_BEGINS} $A {_ENDS}", special_tokens=ends)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=_BEGINS, eos_token=_ENDS, pad_token=_FILLS, unk_token=_UNKNOWN
    )
