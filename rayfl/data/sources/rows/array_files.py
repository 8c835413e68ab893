"""Files of one array each, such as scans: NumPy's and NIfTI's, brought to one shape and scale."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from rayfl.errors import DataError
from rayfl.metrics.language import IGNORED

Fit = Literal["none", "crop", "resize"]
_NIFTI = (".nii", ".nii.gz")
_INTERPOLATION = {2: "bilinear", 3: "trilinear"}
_CHANNELS_LAST = 4
"""Axes of a NIfTI file of several channels, which are its last axis."""


def is_nifti(path: Path) -> bool:
    """Returns whether a file's name says that it is NIfTI."""
    return path.name.lower().endswith(_NIFTI)


def read_array(path: Path) -> np.ndarray:
    """The array of a file as it is stored; of NIfTI its values after the header's slope and intercept.

    Raises:
        DataError: the file is missing or damaged, or of another kind; or nibabel is not installed.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist; paths in a table are relative to the table's folder")
    if path.suffix.lower() != ".npy" and not is_nifti(path):
        raise DataError(f"{path}: its name ends neither in .npy nor in {' or '.join(_NIFTI)}: convert the file")
    load = np.load
    if is_nifti(path):
        try:
            load = import_module("nibabel").load
        except ImportError:
            raise DataError(f"{path} needs the package nibabel: pip install 'rayfl[nifti]'") from None
    try:
        opened = load(path)
        found = np.asarray(opened.dataobj) if is_nifti(path) else opened
    except Exception as error:  # whatever the libraries raise of damaged files
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}; get the file again") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iufb":
        raise DataError(f"{path} holds {getattr(found, 'dtype', type(found).__name__)}; needed is an array of numbers")
    return found


def read_input(path: Path, places: int | None = None) -> np.ndarray:
    """An input, channels first: float32, or uint8 of NumPy's files.

    Args:
        path: the file.
        places: axes of its mask, one less than the input has; an input of as many axes gets one channel. None: a NumPy
            array is taken as it is.

    Raises:
        DataError: as :func:`read_array`; or of other axes, or with a value that is not finite.
    """
    found = read_array(path)
    if is_nifti(path):
        found = np.moveaxis(found, -1, 0) if found.ndim == _CHANNELS_LAST else found[np.newaxis]
    elif found.ndim == places:
        found = found[np.newaxis]
    if places is not None and found.ndim != places + 1:
        raise DataError(
            f"{path} has the shape {found.shape}, but its mask has {places} axes; an input has as many, or one more "
            "for channels (the first of a .npy file, the last of a NIfTI file)"
        )
    if found.dtype == np.uint8 and not is_nifti(path):
        return found
    with np.errstate(over="ignore"):  # what is too large is named below
        found = found.astype(np.float32)
    if not np.isfinite(found).all():
        raise DataError(f"{path} holds a value that is not finite in float32: mend it, or remove its row")
    return found


def read_mask(path: Path) -> np.ndarray:
    """A mask, int16 of shape (H, W) or (H, W, D); masks in NIfTI files are often stored as floats.

    Raises:
        DataError: as :func:`read_array`; or there is a value that is no class.
    """
    found = read_array(path)
    if found.ndim not in (2, 3):
        raise DataError(f"{path} has the shape {found.shape}; a mask has two or three axes, a class at each place")
    wrong = ((found < 0) & (found != IGNORED)) | (found >= 2**15) | (found != np.floor(found))
    if wrong.any():
        raise DataError(
            f"{path} has the value {found[wrong][0]:g}; the values of a mask are classes, numbers from 0 to "
            f"{2**15 - 1}, and {IGNORED} where none counts"
        )
    return found.astype(np.int16)


def fitted(array: np.ndarray, sides: Sequence[int], how: Fit, outside: float | None, path: Path) -> np.ndarray:
    """An array whose last axes have the wanted sides.

    Args:
        array: an input of shape (channels, ...), or a mask.
        sides: the wanted sides.
        how: ``crop`` cuts out the middle, and fills up around it; ``resize`` interpolates, linearly between the
            values of an input, and takes the nearest class of a mask; ``none`` changes nothing.
        outside: what fills a mask up; None is an input, which its smallest value fills up.
        path: the array's file, for messages.

    Raises:
        DataError: it has other sides and ``how`` is ``none``, or another number of axes.
    """
    own = array.shape[-len(sides) :]
    if own == tuple(sides):
        return array
    if how == "none" or array.ndim < len(sides) or (how == "resize" and len(sides) not in _INTERPOLATION):
        raise DataError(
            f"{path} has the shape {array.shape}, but {' x '.join(map(str, sides))} is needed: bring all files to one "
            "shape, or set dataset.shape and dataset.fit=crop or resize (of images and volumes)"
        )
    if how == "resize":
        return _resized(array, sides, mask=outside is not None)
    for axis, (size, wanted) in enumerate(zip(own, sides, strict=True), array.ndim - len(sides)):
        if (start := (size - wanted) // 2) >= 0:
            array = array.take(range(start, start + wanted), axis)
        else:
            missing = wanted - size
            width = [(0, 0)] * array.ndim
            width[axis] = (missing // 2, missing - missing // 2)
            array = np.pad(array, width, constant_values=array.min() if outside is None else outside)
    return array


def _resized(array: np.ndarray, sides: Sequence[int], mask: bool) -> np.ndarray:
    tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
    # Two axes more than sides: samples and channels.
    tensor = tensor.view(*[1] * (len(sides) + 2 - array.ndim), *array.shape)
    mode = "nearest-exact" if mask else _INTERPOLATION[len(sides)]
    found = F.interpolate(tensor, size=tuple(sides), mode=mode)
    found = found.view(*array.shape[: array.ndim - len(sides)], *sides)
    return found.numpy() if array.dtype == np.float32 else found.round().numpy().astype(array.dtype)


def scaled(x: np.ndarray, scale: Literal["none", "sample"] | tuple[float, float]) -> np.ndarray:
    """An input as it is (``none``), with mean 0 and standard deviation 1 of its own values (``sample``; 0 where all are
    the same), or cut off at two values, which become 0 and 1.
    """
    if scale == "none":
        return x
    if scale == "sample":
        x = x.astype(np.float32)
        std = x.std(dtype=np.float64)
        found = (x - x.mean(dtype=np.float64)) / (std if std > 0 else 1)
    else:
        low, high = scale
        found = (np.clip(x, low, high) - low) / (high - low)
    return np.asarray(found, dtype=np.float32)
