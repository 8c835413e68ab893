"""Small bases that are made here in seconds, for first runs and tests: no download, and real files of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.errors import ConfigError
from rayfl.examples import BYTE_TOKENS, END_OF_BYTES, byte_tokens
from rayfl.models.pretrained.folder import BaseFolder
from rayfl.models.pretrained.loading import library
from rayfl.models.pretrained.making_clip import clip
from rayfl.models.pretrained.whole_folder import whole_folder

TRAINING_STEPS = 150
"""Steps that a base is trained for."""
_BATCH, _RATE = 64, 2e-3
_VOCABULARY, _LENGTH = 64, 16


@dataclass(frozen=True)
class Made:
    """What was made.

    Attributes:
        folder: where it lies.
        sha256: its checksum.
        parameters: number of scalars.
        accuracy: share of its training samples that it tells, of a language model of its next tokens.
    """

    folder: Path
    sha256: str
    parameters: int
    accuracy: float


def make(name: str, folder: str | Path, seed: int = 0) -> Made:
    """Trains a small transformer, and writes it as ``save_pretrained`` of transformers does.

    Args:
        name: of :data:`MAKERS`.
        folder: where it goes; must not hold a model.
        seed: of its initial values and mini-batches.

    Raises:
        ConfigError: there is no such maker, or the folder has a model, or cannot be written to.
        ModelError: transformers is not there.
    """
    path = Path(folder).expanduser()
    if name not in MAKERS:
        raise ConfigError(f"{name!r} cannot be made; there are {', '.join(MAKERS)}")
    if (path / "config.json").exists():
        raise ConfigError(f"{path} holds a model: name another folder with --out, or remove it")
    transformers = library()
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model, inputs, labels = MAKERS[name](transformers, np.random.default_rng(seed))
        accuracy = _train(model, inputs, labels, np.random.default_rng([seed, 1]))
    with whole_folder(path, last="config.json") as place:
        model.save_pretrained(place)
    return Made(path, BaseFolder(path).sha256, sum(p.numel() for p in model.parameters()), accuracy)


def _vit(transformers: Any, generator: np.random.Generator) -> tuple[Any, Mapping[str, Tensor], Tensor]:
    """A vision transformer of three blocks, and the digits 0 to 4."""
    pixels, labels = _digits()
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=192, image_size=8, patch_size=2,
        num_channels=1, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), {"pixel_values": pixels}, labels


def _clip(transformers: Any, generator: np.random.Generator) -> tuple[Any, Mapping[str, Tensor], Tensor]:
    """Two towers of two blocks, the digits 0 to 4, and their names."""
    return clip(transformers, *_digits())


def _digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits 0 to 4, (n, 1, 8, 8), and their classes."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    known = digits.target < 5
    pixels = torch.from_numpy(digits.images[known] / 16).float()[:, None]
    return pixels, torch.from_numpy(digits.target[known]).long()


_TEXT = {"vocab_size": _VOCABULARY, "max_position_embeddings": 64, "num_labels": 4, "pad_token_id": 0}


def _llama(transformers: Any, generator: np.random.Generator) -> tuple[Any, Mapping[str, Tensor], Tensor]:
    """A decoder of two blocks, and rows of tokens whose class is that of the most frequent kind of token."""
    config = transformers.LlamaConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, **_TEXT
    )
    return transformers.LlamaForSequenceClassification(config), *_rows(generator)


def _bert(transformers: Any, generator: np.random.Generator) -> tuple[Any, Mapping[str, Tensor], Tensor]:
    """An encoder of two blocks, and the same rows."""
    config = transformers.BertConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **_TEXT,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config), *_rows(generator)


_READ = ("iris", "wine", "breast_cancer", "diabetes", "digits", "linnerud")
_WINDOW, _EVERY = 48, 12


def _lm(transformers: Any, generator: np.random.Generator) -> tuple[Any, Mapping[str, Tensor], Tensor]:
    """A decoder of two blocks, and windows of scikit-learn's descriptions of data, in bytes: each line is a text."""
    from sklearn import datasets

    lines = [line for name in _READ for line in getattr(datasets, f"load_{name}")().DESCR.splitlines() if line.strip()]
    whole = torch.tensor([token for line in lines for token in (*byte_tokens(line.strip()), END_OF_BYTES)])
    windows = whole.unfold(0, _WINDOW + 1, _EVERY)
    config = transformers.LlamaConfig(
        vocab_size=BYTE_TOKENS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, max_position_embeddings=256, pad_token_id=0, bos_token_id=None,
        eos_token_id=END_OF_BYTES,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": windows[:, :-1]}, windows[:, 1:]


def _rows(generator: np.random.Generator) -> tuple[Mapping[str, Tensor], Tensor]:
    labels = generator.integers(4, size=1024)
    own = 1 + labels[:, None] * 15 + generator.integers(15, size=(1024, _LENGTH))
    other = generator.integers(1, _VOCABULARY, size=own.shape)
    rows = np.where(generator.random(own.shape) < 0.6, own, other)
    return {"input_ids": torch.from_numpy(rows)}, torch.from_numpy(labels)


def _train(model: Any, inputs: Mapping[str, Tensor], labels: Tensor, generator: np.random.Generator) -> float:
    """Trains a model for some steps of AdamW; returns the share of labels that it then tells."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    model.train()
    for _ in range(TRAINING_STEPS):
        rows = torch.from_numpy(generator.integers(len(labels), size=_BATCH))
        logits = model(**{key: value[rows] for key, value in inputs.items()}).logits
        loss: Any = F.cross_entropy(logits.flatten(0, -2), labels[rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return float((model(**inputs).logits.argmax(-1) == labels).float().mean())


Maker = Callable[[Any, np.random.Generator], tuple[Any, Mapping[str, Tensor], Tensor]]
MAKERS: dict[str, Maker] = {
    "tiny-vit": _vit, "tiny-clip": _clip, "tiny-llama": _llama, "tiny-bert": _bert, "tiny-lm": _lm
}  # fmt: skip
"""By name, what makes a model, its inputs and labels: a class each, or the next token at each position."""
