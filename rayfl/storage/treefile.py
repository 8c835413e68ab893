"""Trees as safetensors files: tensors in the body, plain numbers in the header, never a pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from rayfl.errors import DamageError
from rayfl.params import Tree, from_leaves

_HEADER = "rayfl"


def dumps(tree: Mapping[str, Any]) -> bytes:
    """Serialises a tree of tensors and numbers; empty dicts are kept.

    Raises:
        TypeError: when the tree could not be read back as it is, naming the place.
    """
    pairs = dict(_entries(tree))
    tensors = {path: leaf.detach().cpu().contiguous() for path, leaf in pairs.items() if isinstance(leaf, Tensor)}
    numbers = {path: leaf for path, leaf in pairs.items() if not isinstance(leaf, Tensor)}
    # One metadata entry: the library does not keep the order of several, and equal trees should give equal files.
    metadata = {_HEADER: json.dumps({"numbers": numbers, "order": list(pairs)})}
    return safetensors.torch.save(_copy_overlapping(tensors), metadata=metadata)


def loads(data: bytes, name: str) -> Tree:
    """The inverse of :func:`dumps`.

    Args:
        data: the file's content.
        name: what to call it in an error.

    Raises:
        DamageError: when the content is not such a file.
    """
    try:
        tensors = safetensors.torch.load(data)
        size = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][_HEADER])
        numbers, order = header["numbers"], header["order"]
        # Copies: where a tensor lies in the file says how it is aligned, which a resumed run must not feel.
        return from_leaves({path: tensors[path].clone() if path in tensors else numbers[path] for path in order})
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamageError(f"{name} is damaged or not a rayfl tree file: {error}") from error


def check(tree: Mapping[str, Any]) -> None:
    """Makes sure that :func:`dumps` would take a tree.

    Raises:
        TypeError: naming the place where it would not.
    """
    for _ in _entries(tree):
        pass


def _entries(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves and empty dicts by path; refuses what would come back as something else."""
    for key, value in tree.items():
        if not isinstance(key, str) or "/" in key:
            raise TypeError(f"keys of a stored tree are strings without '/', got {key!r} below {prefix or '/'!r}")
        path = f"{prefix}{key}"
        if isinstance(value, Tensor):  # most are, and clients in large numbers are asked of
            yield path, value
        elif isinstance(value, Mapping) and value:
            yield from _entries(value, f"{path}/")
        elif isinstance(value, bool | int | float | Mapping):
            yield path, value
        else:
            raise TypeError(f"a stored tree holds tensors and numbers, {path!r} is a {type(value).__name__}")


def _copy_overlapping(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies what overlaps another leaf (a local model that starts as the received one): the format refuses it."""
    result = dict(tensors)
    end = 0
    for path, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            result[path] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return result
