"""Adapters as the files that the package ``peft`` writes and reads; it is not needed for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors.torch
from torch import Tensor

from rayfl.errors import ConfigError, ModelError
from rayfl.models.pretrained.prompts import PROMPTS
from rayfl.models.pretrained.whole_folder import whole_folder

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model."
"""Comes before the names of trees, which begin with ``model.``."""

_VIRTUAL, _IN_TREES = "prompt_embeddings", f"{PROMPTS}0.weight"
"""What virtual tokens are called in files and in trees. With them, names in files lack ``model.``."""

_TYPES = {"lora": "LORA", "ia3": "IA3", "prompt": "PROMPT_TUNING"}
"""What ``peft`` calls the kinds of the section ``model.adapter``."""


def write_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    description: Mapping[str, Any],
    further: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Writes an adapter that ``PeftModel.from_pretrained`` loads over the same base.

    Args:
        folder: is made; must have neither an adapter nor a model. It has one only once all files are written.
        tensors: by name in a tree.
        settings: the content of ``adapter_config.json``.
        description: goes into the metadata of the weights, under ``rayfl``.
        further: contents of more files, by name.

    Raises:
        ConfigError: the folder has an adapter or a model, or cannot be written.
    """
    if (folder / WEIGHTS).exists():
        raise ConfigError(f"--out: {folder} has an adapter: name another folder, or remove it")
    if (folder / "config.json").exists():  # whose weights from_pretrained would add the adapter to
        raise ConfigError(f"--out: {folder} has a model: name another folder, or remove it")
    named = {_in_files(name, tensors): tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with whole_folder(folder, last=WEIGHTS) as place:
        for name, content in further.items():
            (place / name).write_bytes(content)
        metadata = {"format": "pt", "rayfl": json.dumps(description)}
        (place / WEIGHTS).write_bytes(safetensors.torch.save(named, metadata))
        (place / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


class AdapterFolder:
    """An adapter that ``peft`` or rayfl has written.

    Args:
        path: the folder.
        kind: of the adapter, as in the section ``model.adapter``.

    Raises:
        ModelError: it has no adapter, or one of another kind.
    """

    def __init__(self, path: str, kind: str = "lora") -> None:
        self.path = Path(path).expanduser()
        try:
            self.settings = json.loads((self.path / SETTINGS).read_text(encoding="utf-8"))
            content = (self.path / WEIGHTS).read_bytes()
            self.tensors = {_in_trees(name, kind): one for name, one in safetensors.torch.load(content).items()}
        except Exception as error:  # a damaged file is reported by whichever line of the readers stumbles
            raise ModelError(
                f"model.adapter.start: {self.path} has no adapter of peft ({SETTINGS}, {WEIGHTS}): {error}"
            ) from error
        settings = json.dumps({key: self.settings.get(key) for key in (*_COMPARED, *_PLAIN)}, sort_keys=True)
        self.sha256 = hashlib.sha256(content + settings.encode()).hexdigest()
        if (found := self.settings.get("peft_type")) != _TYPES[kind]:
            known = next((f": set model.adapter.name={name}" for name, one in _TYPES.items() if one == found), "")
            raise ModelError(f"model.adapter.start: {self.path} has a {found}, not {_TYPES[kind]}{known}")
        for key in (*_PLAIN, *_FURTHER):
            if self.settings.get(key) not in (None, False, {}, [], "none"):
                raise ModelError(
                    f"model.adapter.start: {self.path} has {key}={self.settings[key]!r}, which cannot be continued: "
                    "LoRA alone can, plain or with magnitudes (DoRA)"
                )
        if (drawn := self.settings.get(_DRAWN)) not in (None, True, False, *_OVER_THE_BASE):
            raise ModelError(
                f"model.adapter.start: {self.path} has {_DRAWN}={drawn!r}, of which a part was taken out of the base: "
                "have peft convert it to plain LoRA (path_initial_model_for_weight_conversion of save_pretrained)"
            )

    def check(self, rank: int, alpha: float, rooted: bool, decomposed: bool) -> None:
        """Makes sure that it is of the rank, scale and kind of the section ``model.adapter``.

        Args:
            rank: r.
            alpha: numerator of the scale.
            rooted: whether the denominator is sqrt(r).
            decomposed: whether there are magnitudes.

        Raises:
            ModelError: it is not, with what to set.
        """
        # Files of older versions of peft do not have the last ones.
        flags = (bool(self.settings.get(key)) for key in _COMPARED[2:])
        found = (*(self.settings.get(key) for key in _COMPARED[:2]), *flags)
        if found != (rank, alpha, rooted, decomposed):
            scaling = "alpha_over_sqrt_r" if found[2] else "alpha_over_r"
            raise ModelError(
                f"model.adapter.start: the adapter in {self.path} needs model.adapter.r={found[0]} "
                f"model.adapter.alpha={found[1]} model.adapter.scaling={scaling} "
                f"model.adapter.use_dora={str(found[3]).lower()}"
            )

    def check_tokens(self, count: int) -> None:
        """Makes sure that it is virtual tokens of one sequence, as many as the section ``model.adapter`` says.

        Args:
            count: how many there should be.

        Raises:
            ModelError: it is not, with what to set.
        """
        found, parts = (self.settings.get(key) for key in ("num_virtual_tokens", "num_transformer_submodules"))
        if parts not in (None, 1):
            raise ModelError(f"model.adapter.start: {self.path} has virtual tokens of encoder and decoder")
        if found != count:
            raise ModelError(f"model.adapter.start: the adapter in {self.path} needs model.adapter.tokens={found}")

    def values(self, shapes: Mapping[str, tuple[int, ...]], head: str) -> dict[str, Tensor]:
        """Its tensors by name in a tree.

        Args:
            shapes: of adapters and head in the tree.
            head: what names of the head begin with; those of another shape are left out, to be drawn again.

        Raises:
            ModelError: it lacks a factor, or has one of another shape or place.
        """
        adapters = {name for name in shapes if not name.startswith(head)}
        # Of a head that the tree does not have none may be left out: outputs would be those of another model.
        own = {name for name in self.tensors if not (name.startswith(head) and name in shapes)}
        wrong = sorted(
            name
            for name in adapters | own
            if name not in adapters or name not in own or tuple(self.tensors[name].shape) != shapes[name]
        )
        if wrong:
            raise ModelError(
                f"model.adapter.start: the adapter in {self.path} does not fit model.adapter.targets and layers: "
                f"{wrong[:3]} ({len(wrong)} in all) are missing, unknown or of another shape"
            )
        return {
            name: tensor.float() for name, tensor in self.tensors.items() if tuple(tensor.shape) == shapes.get(name)
        }


def _in_files(name: str, tensors: Mapping[str, Tensor]) -> str:
    """The name in a file of a tensor of a tree."""
    if _IN_TREES not in tensors:
        return f"{_PREFIX}{name}"
    return _VIRTUAL if name == _IN_TREES else f"{_PREFIX}{name.removeprefix('model.')}"


def _in_trees(name: str, kind: str) -> str:
    """The name in a tree of a tensor of a file."""
    if kind != "prompt":
        return name.removeprefix(_PREFIX)
    return _IN_TREES if name == _VIRTUAL else f"model.{name.removeprefix(_PREFIX)}"


_COMPARED = ("r", "lora_alpha", "use_rslora", "use_dora")
_PLAIN = ("rank_pattern", "alpha_pattern", "bias", "trainable_token_indices")
"""Settings of adapters that are not plain; part of the checksum, so that no more are added."""

_FURTHER = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
)
"""Further ones."""

_DRAWN, _OVER_THE_BASE = "init_lora_weights", ("gaussian", "eva", "orthogonal", "mica")
"""How peft drew an adapter, and the ways that leave the base as it is."""
