"""Adapters and a head as part of the base's own weights: a plain model of transformers, which has no adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from rayfl.errors import ConfigError
from rayfl.models.pretrained.folder import BaseFolder
from rayfl.models.pretrained.loading import quiet
from rayfl.models.pretrained.magnitudes import MAGNITUDE
from rayfl.models.pretrained.mixing import delta_name, is_delta
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.models.pretrained.peft_files import SETTINGS
from rayfl.models.pretrained.rescaling import FACTORS
from rayfl.models.pretrained.sites import matrix_of
from rayfl.models.pretrained.text_files import is_of_texts
from rayfl.models.pretrained.whole_folder import whole_folder
from rayfl.params import TINY

ABOUT = "rayfl.json"
"""Where a written model says what it is from."""

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_A, _B = ".lora_A.weight", ".lora_B.weight"


def merge(network: AdaptedNetwork, tensors: Mapping[str, Tensor]) -> Any:
    """The base with W + s B A in the place of every W that has an adapter, and with the head: a module of its own.

    Where a tree has a matrix that is added to W, it is added too. Where it has magnitudes, rows get them as norms.
    Vectors that rescale outputs or inputs are products with rows or columns. What texts make is no weight of the base.

    Args:
        network: of which the base and the places of adapters are taken.
        tensors: adapters and head by name in a tree, also those that are not trained. Adapters may be of another rank
            than the network's.

    Returns:
        The model of transformers on the CPU, float32.
    """
    module: Any = network.source.read(torch.float32)
    with torch.no_grad():
        for name, tensor in tensors.items():
            place = name.removeprefix("model.")
            if place.endswith(_A):
                layer = module.get_submodule(place.removesuffix(_A))
                whole = network.scale * (tensors[name.removesuffix(_A) + _B].double() @ tensor.double())
                if (delta := tensors.get(delta_name(name.removesuffix(_A)))) is not None:
                    whole += delta.double()
                weight = matrix_of(layer)
                whole += weight.double()
                if (magnitudes := tensors.get(name.removesuffix(_A) + MAGNITUDE)) is not None:
                    lengths = torch.linalg.vector_norm(whole, dim=1).clamp_min(TINY)
                    whole *= (magnitudes.double() / lengths)[:, None]
                weight.copy_(whole)
            elif place.endswith(FACTORS):
                layer = module.get_submodule(place.removesuffix(FACTORS))
                weight = matrix_of(layer)
                weight.copy_(weight.double() * tensor.double())
                if len(tensor) > 1 and layer.bias is not None:
                    layer.bias.copy_(layer.bias.double() * tensor[:, 0].double())
            elif not (place.endswith((_B, MAGNITUDE)) or is_delta(place) or is_of_texts(name)):
                module.get_parameter(place).copy_(tensor)
    return module


def write_model(
    folder: Path,
    network: AdaptedNetwork,
    tensors: Mapping[str, Tensor],
    description: Mapping[str, Any],
    labels: Sequence[str] = (),
    further: Mapping[str, bytes] = MappingProxyType({}),
) -> nn.Module:
    """Writes a merged model that ``from_pretrained`` of transformers loads; see :func:`merge`.

    Args:
        folder: is made; must have neither a model nor an adapter. It has one only once all files are written.
        network: see :func:`merge`.
        tensors: see :func:`merge`.
        description: goes into the file :data:`ABOUT`.
        labels: names of the outputs, for config.json; none: the base's own, where it has as many.
        further: contents of more files, by name.

    Returns:
        What was written.

    Raises:
        ConfigError: the folder has a model, an adapter or other weights, or cannot be written.
    """
    if (folder / _CONFIG).exists():
        raise ConfigError(f"--out: {folder} has a model: name another folder, or remove it")
    if (folder / SETTINGS).exists():  # which from_pretrained would add once more
        raise ConfigError(f"--out: {folder} has an adapter: name another folder, or remove it")
    module = merge(network, tensors)
    own = BaseFolder(network.source.folder).config
    if "use_cache" in own:
        module.config.use_cache = own["use_cache"]  # training needs no cache, but generating does
    elif hasattr(module.config, "use_cache"):
        module.config.use_cache = True
    if labels:
        module.config.id2label = dict(enumerate(labels))
        module.config.label2id = {label: number for number, label in enumerate(labels)}
    with whole_folder(folder, last=_CONFIG) as place:
        with quiet():
            module.save_pretrained(place)
        # from_pretrained prefers one file of weights to several, and would read it in place of these
        strays = sorted(path.name for path in folder.glob("*.safetensors*") if not (place / path.name).exists())
        if strays:
            raise ConfigError(f"--out: {folder} has other weights ({strays[0]}): name another folder, or remove them")
        if (settings := BaseFolder(network.source.folder).path / _GENERATION).is_file():
            shutil.copyfile(settings, place / _GENERATION)
        for name, content in further.items():
            (place / name).write_bytes(content)
        (place / ABOUT).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    assert isinstance(module, nn.Module)
    return module
