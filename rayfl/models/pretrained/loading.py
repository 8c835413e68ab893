"""Modules of transformers: as a skeleton without memory, or with a folder's weights, once a process and device."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import nn

from rayfl.errors import ModelError
from rayfl.models.pretrained.families import Family, family_of
from rayfl.models.pretrained.folder import BaseFolder

_log = logging.getLogger(__name__)

Purpose = Literal["images", "sequences", "next_tokens", "images_and_texts"]
_CLASSES: dict[Purpose, str] = {
    "images": "AutoModelForImageClassification",
    "sequences": "AutoModelForSequenceClassification",
    "next_tokens": "AutoModelForCausalLM",
    "images_and_texts": "AutoModel",
}
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""What safetensors calls them."""

_MAJOR = 5
"""The version of transformers whose names of modules are those of trees: other versions have other names."""

_LOADED: WeakValueDictionary[tuple[Any, ...], nn.Module] = WeakValueDictionary()
"""Bases of this process that somebody uses, by what they are, type and device."""


def library() -> Any:
    """The package transformers, which is told that there is no hub.

    Raises:
        ModelError: it is not installed, or is a version with other names of modules.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        found = version("transformers")
        import transformers
    except (ImportError, PackageNotFoundError) as error:
        raise ModelError(
            f"model=pretrained needs transformers, which cannot be imported ({error}): "
            "pip install 'rayfl[transformers]'"
        ) from error
    if int(found.partition(".")[0]) != _MAJOR:
        raise ModelError(
            f"model=pretrained needs transformers {_MAJOR}, here is {found}, whose modules have other names: "
            "pip install 'rayfl[transformers]'"
        )
    return transformers


@dataclass(frozen=True)
class Source:
    """Which modules a folder is made into.

    Attributes:
        folder: the folder.
        sha256: its checksum.
        purpose: what the model does.
        classes: number of outputs of the new last layer; None where it is the base's own.
        attention: how attention is computed.
        padding: the token behind the ends of rows that are to be classified; else None.
    """

    folder: str
    sha256: str
    purpose: Purpose
    classes: int | None
    attention: str
    padding: int | None = None

    @property
    def family(self) -> Family:
        """Returns what is known of the models of its kind."""
        return family_of(BaseFolder(self.folder).model_type)

    @property
    def own_type(self) -> torch.dtype:
        """The type of the folder's weights, in which they are mapped and not read; float32 where there are several."""
        types = {entry.dtype for entry in BaseFolder(self.folder).entries.values()}
        return next((dtype for dtype, name in _TYPES.items() if types == {name}), torch.float32)

    def skeleton(self) -> nn.Module:
        """The modules on the device ``meta``, without memory or values."""
        with quiet() as transformers, torch.device("meta"):
            made = getattr(transformers, _CLASSES[self.purpose]).from_config(
                self._config(transformers), attn_implementation=self.attention
            )
        assert isinstance(made, nn.Module)
        return made.eval()

    def loaded(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The modules with the folder's weights, frozen; all that ask for the same get the same object.

        Args:
            device: where they are.
            dtype: of the weights.

        Raises:
            ModelError: the folder's weights do not fit the modules, or were changed.
        """
        key = (self, str(device), dtype)
        found = _LOADED.get(key)
        if found is None:
            found = self.read(dtype).to(device)
            _LOADED[key] = found
        return found

    def read(self, dtype: torch.dtype) -> nn.Module:
        """Modules with the folder's weights on the CPU that nobody else has; type and errors as for :meth:`loaded`."""
        folder = BaseFolder(self.folder)
        folder.check(self.sha256)
        new = f"{family_of(folder.model_type).block}." if self.classes is not None else None
        # Files of another type would be in memory whole, next to what is made of them.
        types = {entry.dtype for entry in folder.entries.values()}
        kind: Any = type(self.skeleton())
        given = {"state_dict": _cast(folder, dtype)} if types - {_TYPES.get(dtype)} else {}
        try:
            with quiet() as transformers:
                made, report = kind.from_pretrained(
                    None if given else folder.path,
                    config=self._config(transformers),
                    **given,
                    local_files_only=True,
                    use_safetensors=True,
                    trust_remote_code=False,
                    dtype=dtype,
                    attn_implementation=self.attention,
                    ignore_mismatched_sizes=True,  # a head for other classes; all else is refused below
                    output_loading_info=True,
                )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ModelError(f"model.folder: the weights in {folder.path} cannot be loaded: {reason}") from error
        lacking = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
        if wrong := sorted(name for name in lacking if new is None or not name.startswith(new)):
            raise ModelError(
                f"model.folder: {folder.path} lacks weights that its config.json asks for, or has them in another "
                f"shape: {wrong[:3]} ({len(wrong)} in all); give the folder that both are from"
            )
        assert isinstance(made, nn.Module)
        if unread := sorted(name for name in report["unexpected_keys"] if _in_parts(name, made, new)):
            _log.warning(
                "model.folder: %d weights in %s are left out, as the model of its config.json has no place for them: "
                "%s; is config.json that of another model?",
                len(unread),
                folder.path,
                unread[:3],
            )
        return made.requires_grad_(False).eval()

    def _config(self, transformers: Any) -> Any:
        config = transformers.AutoConfig.from_pretrained(
            BaseFolder(self.folder).path, local_files_only=True, trust_remote_code=False
        )
        if self.classes is not None:
            config.num_labels = self.classes
        if hasattr(config, "use_cache"):
            config.use_cache = False
        if self.padding is not None:
            config.pad_token_id = self.padding
        if getattr(config, "problem_type", None) is not None:
            config.problem_type = None
        return config


def _in_parts(name: str, module: Any, new: str | None) -> bool:
    """Returns whether a weight's name begins with a part that the modules have.

    Others are of heads for other tasks, which are left out on purpose.

    Args:
        name: as a folder's files have it, with or without the prefix of the base.
        module: the base and its head.
        new: what names of the head begin with, where that is made new.
    """
    if new is not None and name.startswith(new):
        return False
    own = name.removeprefix(f"{module.base_model_prefix}.")
    return own.partition(".")[0] in {part for one in (module, module.base_model) for part, _ in one.named_children()}


def _cast(folder: BaseFolder, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of a folder in another type: in memory are these, and one tensor of the files at a time."""
    found = {}
    for name in folder.entries:
        tensor = folder.tensor(name)
        assert tensor is not None
        found[name] = tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
    return found


@contextmanager
def quiet() -> Iterator[Any]:
    """Yields transformers, which prints and draws nothing meanwhile: what it has to say is in our own messages."""
    transformers = library()
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            yield transformers
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
