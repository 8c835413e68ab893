"""Whether samples are what models can read, and train on: found when they are read, before they reach a device.

No method is blamed for them then. An index out of range is an error of one client on a CPU. On a GPU it ends the
context of the process, with all clients in it.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor, isfinite

from rayfl.data.graphs import check_graphs
from rayfl.errors import DataError
from rayfl.examples import Examples, InputSpec, Target
from rayfl.metrics.language import IGNORED


def check_examples(examples: Examples, spec: InputSpec, whose: str, first: int = 0) -> None:
    """Makes sure that labels, tokens and groups are in the range that their data set names.

    Args:
        examples: on the CPU.
        spec: of the data set.
        whose: what to call them in messages.
        first: the number of the first sample.

    Raises:
        DataError: naming the sample.
    """
    if len(examples.x) != len(examples.y):
        raise DataError(f"{whose}: {len(examples.x)} samples have {len(examples.y)} labels")
    check_targets(examples.y, spec, whose, first)
    check_inputs(examples.x, spec, whose, first)
    if spec.groups:
        group = examples.group
        if group is None or group.shape != (len(examples),):
            found = "no groups" if group is None else f"groups of the shape {tuple(group.shape)}"
            raise DataError(
                f"{whose}: {found}, but the data set says that each of the {len(examples)} samples is of one of "
                f"{len(spec.groups)}"
            )
        _check_range(group, len(spec.groups), f"{whose}: the group", "groups", first)


def unfit_targets(y: np.ndarray, target: Target) -> np.ndarray:
    """Returns which numbers cannot be targets: labels other than 0 and 1, values that are not finite, and of survival
    times below 0 or not finite and events other than 0 and 1; bool of the shape of ``y``.

    Args:
        y: of shape (n, D), of forecasts (n, 2, D).
        target: what they are.
    """
    found: np.ndarray = ~np.isfinite(y) if target in ("values", "forecast") else (y != 0) & (y != 1)
    if target == "survival":
        found[:, 0] = ~(np.isfinite(y[:, 0]) & (y[:, 0] >= 0))
    return found


SURVIVAL = ("a finite time of at least 0", "1 (the event was seen at that time) or 0 (it was not seen until then)")
"""What the two targets of survival must be."""


_AT_PLACES = {
    "tokens": ("a token to predict", "tokens"),
    "preference": ("a token to predict", "tokens"),
    "mask": ("a class of the mask", "classes"),
    "nodes": ("a class of a node", "classes"),
}
"""What targets at several places of a sample are, and what they are chosen from."""


def check_targets(y: Tensor, spec: InputSpec, whose: str, first: int = 0) -> None:
    """Makes sure that targets are what their data set says: classes and tokens in range, labels 0 or 1, numbers finite.

    Arguments and errors are as for :func:`check_examples`.
    """
    if spec.target == "class":
        _check_range(y, spec.num_classes, f"{whose}: the label", "classes", first)
        return
    if spec.target == "ranking":
        _check_range(y, 1, f"{whose}: the place of the chosen item", "place", first)
        return
    if spec.target in ("tokens", "preference", "mask", "nodes"):
        what, kind = _AT_PLACES[spec.target]
        _check_range(y.masked_fill(y == IGNORED, 0), spec.num_classes, f"{whose}: {what}", kind, first)
        return
    wrong = unfit_targets(y.numpy(), spec.target)
    if wrong.any():
        sample, *places = (int(axis[0]) for axis in wrong.nonzero())
        place = places[-1]
        must = "0 or 1" if spec.target == "labels" else "finite: remove the sample, or mend it"
        if spec.target == "survival":
            must = SURVIVAL[place]
        raise DataError(
            f"{whose}: target {place} of sample {first + sample} is {float(y[sample, *places])}, but must be {must}"
        )


def check_inputs(x: Tensor, spec: InputSpec, whose: str, first: int = 0) -> None:
    """Makes sure that tokens are in range and graphs are sound; arguments, errors as for :func:`check_examples`."""
    if spec.kind == "tokens":
        _check_range(x, spec.vocabulary, f"{whose}: a token", "tokens", first)
    if spec.kind == "graph":
        check_graphs(x, whose, first)


def check_finite(x: Tensor, whose: str) -> None:
    """Raises DataError, naming the sample, for inputs of shape (n, ...) that hold NaN or an infinity."""
    if x.is_floating_point() and not isfinite(x).all():
        sample = int((~isfinite(x.flatten(1))).any(1).nonzero()[0])
        raise DataError(f"{whose}: x of sample {sample} holds a value that is not finite; remove or mend it")


def check_own(examples: Examples, spec: InputSpec, whose: str) -> None:
    """Makes sure that samples of a user's own data set have the shape that it names, and that they are finite.

    Args:
        examples: on the CPU.
        spec: of the data set.
        whose: what to call them in messages.

    Raises:
        DataError: naming the sample, counted from 0.
    """
    x, y = examples.x, examples.y
    if tuple(x.shape[1:]) != tuple(spec.shape) or tuple(y.shape) != (len(x), *spec.target_shape):
        raise DataError(
            f"{whose}: x has the shape {tuple(x.shape)} and y {tuple(y.shape)}, but the data set says that an input "
            f"has {tuple(spec.shape)}" + ("" if spec.target == "class" else f" and a target {spec.target_shape}")
        )
    check_finite(x, whose)


def _check_range(indices: Tensor, count: int, what: str, kind: str, first: int) -> None:
    if not indices.numel():
        return
    least, most = (int(bound) for bound in indices.aminmax())
    if least >= 0 and most < count:
        return
    wrong = (indices < 0) | (indices >= count)
    place = tuple(int(axis[0]) for axis in wrong.nonzero(as_tuple=True))
    raise DataError(
        f"{what} of sample {first + place[0]} is {int(indices[place])}, but the data set says that it has {count} "
        f"{kind}, 0 to {count - 1}"
    )
