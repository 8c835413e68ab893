"""Initial values of a model from a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rayfl.errors import ModelError


def load_weights(module: nn.Module, path: str, head: str, model: str) -> None:
    """Copies the values in a file into a module.

    The head's are left out where the file has none or has them for another number of classes.

    Args:
        module: what is filled.
        path: a ``.safetensors`` file, or one that ``torch.save`` wrote of a state dict.
        head: dotted name of the last layer.
        model: what to call the model in messages.

    Raises:
        ModelError: the file cannot be read, or has other names or shapes than the module.
    """
    state, own = _read(path, model), module.state_dict()
    head_names = {name for name in own if name.startswith(f"{head}.")}
    if any(name not in state or state[name].shape != own[name].shape for name in head_names):
        state = {name: tensor for name, tensor in state.items() if name not in head_names}
    # torchvision's training heads of GoogLeNet and Inception are not built, but its files have them
    state = {name: tensor for name, tensor in state.items() if not name.startswith(("aux1.", "aux2.", "AuxLogits."))}
    optional = head_names | {name for name in own if name.endswith("num_batches_tracked")}
    missing = sorted(set(own).difference(state, optional))
    unknown = sorted(set(state).difference(own))
    other = sorted(name for name in own if name in state and state[name].shape != own[name].shape)
    if missing or unknown or other:
        raise ModelError(
            f"{model}: weights in {path} do not fit: missing {_some(missing)}, unknown {_some(unknown)}, of another "
            f"shape {_some(other)}; the file must hold the state dict of this model"
        )
    module.load_state_dict(state, strict=False)


def _read(path: str, model: str) -> dict[str, Tensor]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ModelError(f"{model}: weights: {path!r} is no file; give null, imagenet or the path of a file")
    # A damaged file is reported by whichever line of the readers stumbles.
    try:
        content: Any = (
            load_file(file)
            if file.suffix == ".safetensors"
            else torch.load(file, map_location="cpu", weights_only=True)
        )
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(f"{model}: weights in {file} cannot be read: {reason}") from error
    if not isinstance(content, Mapping) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise ModelError(
            f"{model}: weights in {file} are no state dict (names and tensors); save `module.state_dict()` alone"
        )
    return dict(content)


def _some(names: list[str]) -> str:
    return f"[{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}]"
