"""Adapters of the section ``model.adapter``, put into the modules of a base."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from rayfl.errors import ModelError
from rayfl.examples import byte_tokens
from rayfl.models.pretrained.adapter_section import (
    AnyAdapter,
    FeatureAdapterConfig,
    IA3Config,
    NoAdapter,
    PromptTuningConfig,
)
from rayfl.models.pretrained.families import family_of
from rayfl.models.pretrained.folder import BaseFolder
from rayfl.models.pretrained.prompts import Prompts, of_images, of_texts
from rayfl.models.pretrained.rescaling import rescale
from rayfl.models.pretrained.sites import Site, chosen, replace

_BYTES, _TOKENIZER = "bytes", "tokenizer.json"


def put_in(module: nn.Module, adapter: AnyAdapter, folder: BaseFolder, without: str) -> Prompts | None:
    """Puts adapters into a model; returns its virtual tokens, which are no part of its modules.

    Those on features have no place in it: what makes the model adds them.

    Args:
        module: the model, on the device ``meta``.
        adapter: the section.
        folder: the base.
        without: dotted name of the module that makes the outputs, whose layers get none.

    Raises:
        ModelError: an option does not fit the base.
    """
    if isinstance(adapter, NoAdapter):
        return None
    if isinstance(adapter, FeatureAdapterConfig):
        if not family_of(folder.model_type).tower:
            raise ModelError(
                "model.adapter.name=features is for CLIP, which compares features of images with those of texts, not "
                f"for {folder.model_type}: choose lora or ia3"
            )
        return None
    if isinstance(adapter, IA3Config):
        rescale(module, adapter, folder.model_type, without)
        return None
    if isinstance(adapter, PromptTuningConfig):
        return _prompts(module, adapter, folder).to("meta")
    family = family_of(folder.model_type)
    layers = None if adapter.layers == "all" else adapter.layers
    for name in chosen(module, adapter.targets or family.targets, layers, without):
        site = Site(module.get_submodule(name), adapter.r, adapter.scale, adapter.trains, adapter.use_dora)
        replace(module, name, site.to("meta"))
    return None


def _prompts(module: Any, adapter: PromptTuningConfig, folder: BaseFolder) -> Prompts:
    config, kind = module.config, folder.model_type
    if family_of(kind).kind == "tokens":
        if adapter.depth == "deep":
            raise ModelError("model.adapter.depth=deep is for images: texts have virtual tokens before the first block")
        tokens = None if adapter.text is None else text_tokens(adapter, folder)
        if tokens is not None and max(tokens) >= config.vocab_size:
            raise ModelError(
                f"model.adapter.text has the token {max(tokens)}, and the base has {config.vocab_size}: set "
                "model.adapter.tokenizer to the tokenizer of the base"
            )
        return of_texts(adapter.tokens, config.hidden_size, adapter.init, tokens)
    if kind != "vit":
        raise ModelError(f"model.adapter.name=prompt is for texts and for images of vit, not of {kind}")
    if adapter.init == "vocabulary" or adapter.text is not None:
        option = "text" if adapter.text is not None else "init=vocabulary"
        raise ModelError(f"model.adapter.{option} is for texts: images have no tokens to begin from")
    patch = config.num_channels * _area(config.patch_size)
    return of_images(
        adapter.tokens, config.hidden_size, patch, config.num_hidden_layers if adapter.depth == "deep" else 1
    )


def _area(side: int | list[int]) -> int:
    height, width = (side, side) if isinstance(side, int) else side
    return height * width


def text_tokens(adapter: PromptTuningConfig, folder: BaseFolder) -> tuple[int, ...]:
    """The tokens of ``model.adapter.text``, without those that a tokenizer adds to every text.

    Raises:
        ModelError: there is no such tokenizer, or the text has no token.
    """
    if adapter.text_tokens is not None:
        return adapter.text_tokens
    assert adapter.text is not None
    if adapter.tokenizer == _BYTES:
        return tuple(byte_tokens(adapter.text))
    place = folder.path if adapter.tokenizer is None else Path(adapter.tokenizer).expanduser()
    file = place / _TOKENIZER if place.is_dir() else place
    try:
        library: Any = import_module("tokenizers")
        found = tuple(library.Tokenizer.from_file(str(file)).encode(adapter.text, add_special_tokens=False).ids)
    except Exception as error:  # the library raises plain Exceptions
        raise ModelError(
            f"model.adapter.text: {file} is no tokenizer of the library tokenizers ({error}): set "
            "model.adapter.tokenizer to a tokenizer.json, a folder with one, or bytes"
        ) from error
    if not found:
        raise ModelError(f"model.adapter.text has no token of {file}: give another one")
    return found
