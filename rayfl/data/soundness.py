"""Samples that no model can be trained on: found when they are read, so that no method is blamed for them."""

from __future__ import annotations

import torch

from rayfl.data.federated import Examples, InputSpec
from rayfl.errors import DataError


def check_finite(x: torch.Tensor, place: str) -> None:
    """Raises DataError, naming the sample, for inputs of shape (n, ...) that hold NaN or an infinity."""
    if x.is_floating_point() and not torch.isfinite(x).all():
        sample = int((~torch.isfinite(x.flatten(1))).any(1).nonzero()[0])
        raise DataError(f"{place}: x of sample {sample} holds a value that is not finite; remove or mend it")


def check_sound(examples: Examples, spec: InputSpec, client: str, split: str) -> None:
    """Makes sure that samples are what a data set says that it has.

    Args:
        examples: of one client and split, on the CPU.
        spec: shape of the inputs and number of classes.
        client: the client's name.
        split: ``train``, ``validation`` or ``test``.

    Raises:
        DataError: naming the client and, counted from 0 within the split, the sample.
    """
    place = f"dataset: client {client!r}, {split}"
    x, y = examples.x, examples.y
    if tuple(x.shape[1:]) != tuple(spec.shape) or y.shape != x.shape[:1]:
        raise DataError(
            f"{place}: x has the shape {tuple(x.shape)} and y {tuple(y.shape)}, but the data set says that an input "
            f"has {tuple(spec.shape)}"
        )
    check_finite(x, place)
    wrong = (y < 0) | (y >= spec.num_classes)
    if wrong.any():
        sample = int(wrong.nonzero()[0])
        raise DataError(
            f"{place}: the label of sample {sample} is {int(y[sample])}, but the data set says that it has "
            f"{spec.num_classes} classes, 0 to {spec.num_classes - 1}"
        )
