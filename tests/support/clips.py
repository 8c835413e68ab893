"""A small CLIP with random weights and its tokenizer, as files of transformers, and networks over it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rayfl.models.pretrained.clip import ClipNetwork
from rayfl.models.pretrained.making_clip import NAMES, clip
from rayfl.models.pretrained.section import PretrainedModel
from tests.support.bases import IMAGES, transformers

PROMPT: dict[str, Any] = {"classes": list(NAMES)}
NO_HEAD: dict[str, Any] = {"train": False}
ADAPTER: dict[str, Any] = {"r": 2, "alpha": 4}

_FOLDERS: list[TemporaryDirectory[str]] = []
"""They are removed when the process ends."""


def write_clip(folder: Path, seed: int = 0, eos_token_id: int | None = None) -> Path:
    """Writes a base with random weights, and its tokenizer.

    Args:
        folder: is made.
        seed: of the weights.
        eos_token_id: of its configuration; None: the tokenizer's.
    """
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        made, *_ = clip(transformers, torch.zeros(1, 1, 8, 8), torch.tensor([9]))
        for parameter in made.model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
    if eos_token_id is not None:
        made.model.config.text_config.eos_token_id = eos_token_id
    made.save_pretrained(folder)
    return folder


@cache
def clip_base() -> Path:
    """A base that all tests of this process share, and none writes to."""
    _FOLDERS.append(TemporaryDirectory(prefix="rayfl-clip-"))
    return write_clip(Path(_FOLDERS[-1].name))


def clip_section(prompt: dict[str, Any] | None = None, **options: Any) -> PretrainedModel:
    """The section of a configuration; without adapters unless others are named."""
    given = {"folder": str(clip_base()), "adapter": "none", "head": NO_HEAD, "prompt": {**PROMPT, **(prompt or {})}}
    return PretrainedModel.model_validate({**given, **options})


def clip_network(prompt: dict[str, Any] | None = None, **options: Any) -> ClipNetwork:
    """A network over the shared base."""
    found = clip_section(prompt, **options).network(IMAGES)
    assert isinstance(found, ClipNetwork)
    return found


def reference(folder: Path | None = None) -> tuple[Any, Any]:
    """transformers' own model and tokenizer."""
    place = folder or clip_base()
    model = transformers.CLIPModel.from_pretrained(place, local_files_only=True)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(place, local_files_only=True)


def expected(texts: list[str], x: torch.Tensor, folder: Path | None = None) -> Any:
    """What transformers' own model computes."""
    model, tokenizer = reference(folder)
    tokens = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model.to(x.dtype)(input_ids=tokens, pixel_values=x)
