"""Trees as safetensors files: tensors in the body, plain numbers in the header, never a pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from rayfl.errors import DamageError
from rayfl.params import Tree, from_leaves

_OF_NUMPY = {
    torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool,
}  # fmt: skip
"""Types that NumPy has, too: its way to the same file takes less time where there are many small tensors."""
_HEADER = "rayfl"
_RESERVED = "__metadata__"


def dumps(tree: Mapping[str, Any]) -> bytes:
    """Serialises a tree of tensors and numbers; empty dicts are kept.

    Raises:
        TypeError: when the tree could not be restored exactly, naming the path.
    """
    pairs = dict(_entries(tree))
    found = {path: leaf.detach().cpu() for path, leaf in pairs.items() if isinstance(leaf, Tensor)}
    # PyTorch conjugates and negates lazily: the file would have the memory as it was before.
    tensors = {path: leaf.resolve_conj().resolve_neg().contiguous() for path, leaf in found.items()}
    numbers = {path: leaf for path, leaf in pairs.items() if not isinstance(leaf, Tensor)}
    # A single metadata entry: the library does not keep the order of several, and equal trees must give equal files.
    metadata = {_HEADER: json.dumps({"numbers": numbers, "order": list(pairs)})}
    if all(tensor.dtype in _OF_NUMPY for tensor in tensors.values()):
        arrays = {path: tensor.numpy() for path, tensor in tensors.items()}
        return safetensors.numpy.save(arrays, metadata=metadata)
    return safetensors.torch.save(_copy_overlapping(tensors), metadata=metadata)


def loads(data: bytes, name: str) -> Tree:
    """The inverse of :func:`dumps`; needs the bytes of the content and of its largest tensor in addition to these.

    Args:
        data: the file's content.
        name: name of the file, for errors.

    Raises:
        DamageError: when the content is not such a file.
    """
    try:
        tensors = safetensors.torch.load(data)
        size = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + size])[_RESERVED][_HEADER])
        numbers, order = header["numbers"], header["order"]
        # Copies: the alignment of a tensor depends on its place in the file, and must not affect a resumed run. What
        # was copied goes at once, so that at most one tensor is there twice beside the content.
        return from_leaves({path: tensors.pop(path).clone() if path in tensors else numbers[path] for path in order})
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamageError(f"{name} is damaged or not a rayfl tree file: {error}") from error


def check(tree: Mapping[str, Any]) -> None:
    """Checks that :func:`dumps` accepts a tree.

    Raises:
        TypeError: naming the path that it does not accept.
    """
    for _ in _entries(tree):
        pass


def _entries(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields leaves and empty dicts by path; refuses values that could not be restored exactly."""
    for key, value in tree.items():
        if not isinstance(key, str) or "/" in key:
            raise TypeError(f"keys of a stored tree are strings without '/', got {key!r} below {prefix or '/'!r}")
        path = f"{prefix}{key}"
        if isinstance(value, Tensor):  # most leaves are tensors, so they are tested first
            if path == _RESERVED:
                raise TypeError(f"{path!r} is a name of the file format's own: choose another key")
            yield path, value
        elif isinstance(value, Mapping) and value:
            yield from _entries(value, f"{path}/")
        elif isinstance(value, bool | int | float | Mapping):
            yield path, value
        else:
            raise TypeError(f"a stored tree holds tensors and numbers, {path!r} is a {type(value).__name__}")


def _copy_overlapping(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors that share memory with another leaf, such as a local model equal to the received one.

    The file format refuses shared memory.
    """
    result = dict(tensors)
    end = 0
    for path, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            result[path] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return result
