"""Targets that a user gives as an array: what they must be for what is learned of them."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from rayfl.data.soundness import SURVIVAL, unfit_targets
from rayfl.errors import DataError
from rayfl.examples import Target
from rayfl.metrics.language import IGNORED

Wanted = Literal["auto", "class", "labels", "values", "tokens", "mask", "survival"]
"""What is to be read as targets; ``auto``: what the task learns from."""

WANTED = (
    "What is learned of the samples: class, one of several; labels, each 0 or 1; values, numbers to predict; tokens, "
    "the next one at each position; mask, a class at each pixel; survival, a time and whether the event was seen then; "
    "auto: what the section task learns from."
)


def as_targets(y: np.ndarray, target: Target, whose: str, count: int, clients: np.ndarray | None = None) -> np.ndarray:
    """Targets of the task's type: labels, values and survival float32 of shape (N, D), masks as they are, others
    int64.

    Args:
        y: as a user gives them.
        target: what they are.
        whose: what to call them in messages, such as ``dataset my_module:f: y``.
        count: N, how many samples there are.
        clients: the samples' clients, for messages.

    Raises:
        DataError: naming the sample, its client and the fix.
    """
    kinds = {"labels": "iufb", "values": "iuf", "survival": "iuf", "mask": "iub"}.get(target, "iu")
    dimensions = {"class": (1,), "values": (1, 2), "mask": (3, 4)}.get(target, (2,))
    wide = target == "survival" and y.shape[1:] != (2,)
    if y.dtype.kind not in kinds or y.ndim not in dimensions or len(y) != count or wide:
        raise DataError(f"{whose} has the type {y.dtype} and the shape {y.shape}; {_needed(y, target, count)}")
    if target in ("class", "tokens"):
        return y.astype(np.int64)
    if target == "mask":  # as small as they are: they become int64 client by client
        return y.astype(np.uint8) if y.dtype.kind == "b" else y
    with np.errstate(over="ignore"):  # what is too large is named below
        values = y.reshape(len(y), -1).astype(np.float32)
    wrong = unfit_targets(values, target)
    if wrong.any():
        sample, place = (int(axis[0]) for axis in np.nonzero(wrong))
        owner = "" if clients is None else f" (client {str(clients[sample])!r})"
        must = "must be finite: remove the sample, or mend it" if target == "values" else "must be 0 or 1"
        if target == "survival":
            must = f"must be {SURVIVAL[place]}"
        raise DataError(f"{whose}: target {place} of sample {sample}{owner} is {values[sample, place]}, but {must}")
    return values


def no_pairs(target: Target) -> None:
    """Raises DataError where pairs of answers, chosen items, forecasts or nodes are asked of a source without them."""
    if target == "preference":
        raise DataError(
            "dataset: pairs of a preferred and another answer are read by dataset=preferences (or made up by "
            "synthetic_preferences); choose one of these, or set another task"
        )
    if target == "ranking":
        raise DataError(
            "dataset: what users chose is read by dataset=interactions (or made up by synthetic_interactions); choose "
            "one of these, or a function of your own that returns a Samples, or set another task"
        )
    if target == "forecast":
        raise DataError(
            "dataset: windows of series are cut by dataset=series (or made up by synthetic_series); choose one of "
            "these, or a function of your own that returns a rayfl.data.series.SeriesDataset, or set another task"
        )
    if target == "nodes":
        raise DataError(
            "dataset: graphs with a class of each node are read by dataset=node_graph (or made up by "
            "synthetic_subgraphs); choose one of these, or a FederatedDataset of your own, or set another task"
        )


VOID = 255
"""What 8-bit masks often have where no class is known (or for everything that is no background)."""
_MASKS = "; for a class at each pixel set task=segmentation"


def _needed(y: np.ndarray, target: Target, n: int) -> str:
    if target == "class":
        several = {2: "; for several labels set task=multilabel", 3: _MASKS, 4: _MASKS}.get(y.ndim, "")
        other = {"f": "; to predict numbers set task=regression", "U": "; number the classes, from 0"}
        return f"needed are integers of shape ({n},), one class a sample{several}{other.get(y.dtype.kind, '')}"
    if target == "labels":
        return (
            f"needed are 0 and 1 of shape ({n}, L), one column a label; for one class a sample set task=classification"
        )
    if target == "values":
        return f"needed are numbers of shape ({n},) or ({n}, D)"
    if target == "survival":
        return f"needed are numbers of shape ({n}, 2): a time of at least 0, and 1 if the event was seen then, else 0"
    if target == "mask":
        return (
            f"needed are masks, integers of shape ({n}, H, W) or ({n}, H, W, D), a class at each pixel, -100 where "
            "none counts"
        )
    return f"needed are tokens, integers of shape ({n}, T), -100 where none is asked for"


def check_masks(x: np.ndarray, y: np.ndarray, classes: int, whose: str, clients: np.ndarray | None) -> None:
    """Makes sure that masks fit their images, and name classes.

    Args:
        x: images of shape (N, channels, ...).
        y: masks of shape (N, ...).
        classes: how many there are.
        whose: what to call them in messages.
        clients: the samples' clients, for messages.

    Raises:
        DataError: naming the sample, its client and the fix.
    """
    if x.shape[2:] != y.shape[1:]:
        raise DataError(
            f"{whose}: x has the shape {x.shape} and y {y.shape}; needed are images (N, channels, H, W[, D]) and masks "
            "(N, H, W[, D]) of the same sides"
        )
    for sample, mask in enumerate(y):
        wrong = ((mask < 0) & (mask != IGNORED)) | (mask >= classes)
        if wrong.any():
            owner = "" if clients is None else f" (client {str(clients[sample])!r})"
            found = int(mask[wrong][0])
            fix = "return as many classes as there are, or set dataset.labels=renumbered"
            if found == VOID:
                fix += f"; if {VOID} stands for pixels that do not count, return int16 with {IGNORED} there"
            raise DataError(
                f"{whose}: y of sample {sample}{owner} has a pixel of class {found}, but with num_classes={classes} "
                f"classes are 0 to {classes - 1}: {fix}"
            )


def mask_classes(y: np.ndarray, whose: str) -> np.ndarray:
    """Returns which classes masks have at some pixel that counts, ascending.

    Raises:
        DataError: no pixel counts.
    """
    found = set[int]().union(*(np.unique(mask).tolist() for mask in y)) - {IGNORED}
    if not found:
        raise DataError(f"{whose}: no pixel of any mask counts, all are {IGNORED}: nothing can be learned")
    return np.array(sorted(found))


MOST_COUNTED = 2**15
"""More classes than this are taken only where a user says how many there are."""


def check_counted(y: np.ndarray, whose: str) -> None:
    """Refuses labels whose largest makes more classes than anybody means.

    Args:
        y: labels of shape (N,), where nobody said how many classes there are.
        whose: what to call them in messages.

    Raises:
        DataError: naming the row.
    """
    row = int(y.argmax())
    if y[row] >= MOST_COUNTED:
        raise DataError(
            f"{whose}: row {row} has the label {y[row]}, which makes {y[row] + 1} classes: mend the row, set "
            f"dataset.labels=renumbered to number the labels that occur, or dataset.num_classes={y[row] + 1}, if that "
            "many classes are meant"
        )


IGNORE = "Of masks: the value of pixels that do not count, such as 255; null: only -100 does not."


def without(y: np.ndarray, ignored: int | None) -> np.ndarray:
    """Masks with ``IGNORED`` in place of a value; None: as they are."""
    return y if ignored is None else np.where(y == ignored, np.int16(IGNORED), y)


def ranked(y: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Masks whose classes are numbered from 0 by their rank, int16; pixels that do not count stay so.

    Args:
        y: masks.
        present: their classes, see :func:`mask_classes`.
    """
    return np.where(y == IGNORED, IGNORED, np.searchsorted(present, y)).astype(np.int16)


def next_tokens(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of texts: what is read at a position, and the token that follows.

    Args:
        x: tokens of shape (N, T + 1).

    Returns:
        Both of shape (N, T).
    """
    return x[:, :-1], x[:, 1:]


def count_of(value: Any, targets: np.ndarray, target: Target, whose: str) -> int:
    """The number of outputs, given by a user or, of labels, values and survival, left to the targets (None).

    Raises:
        DataError: it is no number, or not that of the targets.
    """
    if target in ("labels", "values", "survival"):
        columns = 1 if target == "survival" else targets.shape[1]
        if value is not None and value != columns:
            if target == "survival":
                raise DataError(
                    f"{whose}: the third of what it returns is {value!r}, but task=survival has one output, the risk: "
                    "give None or 1"
                )
            raise DataError(
                f"{whose}: y has {columns} columns, but the third of what it returns is {value!r}: give None, or, if "
                "each is a class, set task=classification"
            )
        return int(columns)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise DataError(f"{whose}: num_classes is {value!r}; needed is an integer of at least 1")
    return int(value)
