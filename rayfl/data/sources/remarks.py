"""What is odd about data of a user's own: they may train on something else than is meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rayfl.data.sources.targets import VOID, mask_classes
from rayfl.data.tables import TableColumns
from rayfl.metrics.language import IGNORED

_SHOWN = 8
_PIXEL_VALUES = 64
"""Vectors of this many whole numbers from 0 to 255, or more, look like images that were made flat."""
_LARGEST_PIXEL = 255
_MANY_NUMBERS = 10
"""A category of fewer numbers and of something else may well be one."""
_MANY_VALUES = 20
"""A category of fewer values may well have one for most rows of a small table."""
_SCALED = 10.0
"""Images whose values are larger were not brought to about [0, 1] or mean 0 and standard deviation 1."""


class Remark(NamedTuple):
    """One thing to be warned of.

    Attributes:
        text: what was found, and what says that it is meant.
        scale: whether it is about the scale of the inputs, which ``transform.normalize`` mends.
    """

    text: str
    scale: bool = False


def remarks_on(
    x: np.ndarray, y: np.ndarray, num_classes: int, counted: bool, integers: bool, unused: Sequence[str] = ()
) -> list[Remark]:
    """Looks at all samples.

    Args:
        x: inputs of shape (N, ...), uint8 standing for x / 255, or float32 as they are.
        y: labels of shape (N,), in [0, num_classes); or masks of shape (N, ...).
        num_classes: how many classes there are said to be.
        counted: whether that is what the labels themselves made it (the largest plus 1).
        integers: whether the inputs were lists of integers.
        unused: columns that may be inputs, and are none.
    """
    found = [*on_columns(unused), *on_labels(y, num_classes, counted), *_on_channels(x.shape[1:])]
    return found if x.dtype == np.uint8 or not x.size else [*found, *_on_inputs(x, integers)]


def on_texts(cut: int, inner: int, shape: Sequence[int], fix: str = "say so with dataset.padding") -> list[Remark]:
    """Names texts that are not read as they are.

    Args:
        cut: how many were cut.
        inner: how many have the token that fills up before other tokens.
        shape: of all texts: how many, and their tokens.
        fix: what says that another token fills up, or none.
    """
    found = []
    if cut:
        text = f"{cut} of {shape[0]} texts are longer than {shape[1]} tokens and were cut: raise dataset.length to keep"
        found.append(Remark(f"{text} them whole"))
    if inner:
        found.append(
            Remark(
                f"{inner} of {shape[0]} rows have the token that fills rows up before other tokens, and there it is a "
                "token like them: rows are filled up on the right; if another token fills them up, or none does, " + fix
            )
        )
    return found


def on_columns(unused: Sequence[str]) -> list[Remark]:
    """Names columns of numbers that were left out; nothing where there are none."""
    if not unused:
        return []
    shown = ", ".join(unused[:_SHOWN]) + (f", ... ({len(unused)} in all)" if len(unused) > _SHOWN else "")
    be = "is" if len(unused) == 1 else "are"
    return [
        Remark(
            f"the inputs are the columns whose names begin with x, and {shown} {be} left out: name the inputs with "
            "dataset.x=[NAME, NAME, ...], these columns among them or not"
        )
    ]


def on_categories(columns: TableColumns, rows: int) -> list[Remark]:
    """Names columns that are categories and hardly meant to be: numbers with some odd values, and names of rows.

    Args:
        columns: what the columns are.
        rows: how many rows there are.
    """
    found = []
    for begin, size in columns.ranges:
        name = columns.names[begin].partition("=")[0]
        values = [title.removeprefix(f"{name}=") for title in columns.names[begin : begin + size]]
        odd = [value for value in values if not _is_number(value)]
        like = sum(_is_number(value.replace(",", "")) for value in values)
        if odd and like >= max(_MANY_NUMBERS, size / 2):
            found.append(
                Remark(
                    f"column {name!r} is text, since {odd[0]!r} is no number, and its {size} values are categories: to "
                    "have numbers, leave fields without one empty (dataset.missing), and write 1234.5 for 1,234.5"
                )
            )
        elif size >= _MANY_VALUES and 2 * size > rows:
            found.append(
                Remark(
                    f"column {name!r} has {size} different texts in {rows} rows, so most rows have a category of their "
                    "own: leave it out of dataset.x if it only names rows; if models should read the text, name it "
                    "alone and set dataset.tokenizer"
                )
            )
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def on_labels(y: np.ndarray, num_classes: int, counted: bool) -> list[Remark]:
    """Names classes without samples; arguments as for :func:`remarks_on`."""
    masks = y.ndim > 1
    present = mask_classes(y, "y") if masks else np.unique(y)
    if len(present) == 1:
        return [Remark(f"all {len(y)} samples have the label {present[0]}: a model that always says so is never wrong")]
    from_one = len(present) == num_classes - 1 and present[0] == 1
    if len(present) == num_classes or not (counted or from_one):
        return []  # before all classes are listed: a user may say that there are very many
    missing = np.setdiff1d(np.arange(num_classes), present)
    meant = "" if not counted else f", or dataset.num_classes={num_classes}, if they are meant"
    if masks and present[-1] == VOID:
        meant += (
            f"; if {VOID} stands for pixels that do not count, set dataset.ignore={VOID} (in arrays: {IGNORED} there)"
        )
    return [
        Remark(
            f"the labels are {_listed(present)}, which makes {num_classes} classes, but {_listed(missing)} "
            f"{'has' if len(missing) == 1 else 'have'} no sample: set dataset.labels=renumbered to number them 0 to "
            f"{len(present) - 1}{meant}"
        )
    ]


def _on_channels(shape: Sequence[int]) -> list[Remark]:
    if len(shape) != 3 or shape[2] not in (1, 3, 4) or shape[0] <= 4 or (shape[2] == 1 and shape[0] != shape[1]):
        return []
    rows, columns, channels = shape
    return [
        Remark(
            f"images have channels first, so the shape {tuple(shape)} means {rows} channels of {columns} x {channels} "
            f"pixels: if there are {channels} channels, transpose the images to {(channels, rows, columns)}"
        )
    ]


def _on_inputs(x: np.ndarray, integers: bool) -> list[Remark]:
    low, high = float(x.min()), float(x.max())
    image = x.ndim > 3
    if low >= 0 and 1 < high <= _LARGEST_PIXEL and (image or x[0].size >= _PIXEL_VALUES) and _whole(x):
        return [
            Remark(
                f"all inputs are whole numbers from {low:g} to {high:g}, as pixels are, and models see them as they "
                "are: give them as uint8, which stands for x / 255, divide them, or set transform.normalize",
                scale=True,
            )
        ]
    if image and max(-low, high) > _SCALED:
        return [
            Remark(
                f"the images have values from {low:g} to {high:g}, and models see them as they are: scale them to "
                "[0, 1], or set transform.normalize",
                scale=True,
            )
        ]
    if integers:
        return [
            Remark(
                f"the inputs are lists of integers from {low:g} to {high:g}: they are taken as vectors of numbers, not "
                "as tokens; store them as float32 to say that this is meant"
            )
        ]
    return []


def _whole(x: np.ndarray) -> bool:
    """Returns whether all values are whole; sample by sample, as the first mostly tells."""
    return all(bool((row == np.floor(row)).all()) for row in x)


def _listed(values: Sequence[int] | np.ndarray) -> str:
    shown = ", ".join(str(int(value)) for value in values[:_SHOWN])
    return shown if len(values) <= _SHOWN else f"{shown}, ... ({len(values)} in all)"
