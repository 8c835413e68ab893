"""Trims columns of padding from batches of texts.

A batch's width is its longest text, rounded up to one of few sizes (:func:`bucket`) so that shapes repeat. The samples
of a batch do not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rayfl.examples import lengths_of
from rayfl.metrics.language import IGNORED
from rayfl.tasks.base import Task


def bucket(count: int) -> int:
    """Rounds up to one of 1, 2, 3, 4, 6, 8, 12, 16, ...: by less than half."""
    power = next_power(count)
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def next_power(count: int) -> int:
    """Rounds up to a power of two."""
    return 1 << max(count - 1, 0).bit_length()


@dataclass(frozen=True)
class PaddingTrimmer:
    """Trims columns at the end of batches of texts.

    Attributes:
        padding: the token that fills texts up.
        targets: whether there is a target at each position, to be trimmed likewise.
    """

    padding: int
    targets: bool

    def lengths(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns how many columns each text needs, int64 of shape (n,), on the CPU.

        Args:
            x: tokens, int64 of shape (n, T), or (n, texts, T) where a sample is several texts.
            y: targets, n rows.
        """
        needed = lengths_of(x, self.padding)
        if self.targets and len(y):
            places = torch.arange(1, y.shape[-1] + 1, device=y.device)
            needed = torch.maximum(needed, ((y != IGNORED) * places).amax(-1))
        return needed.flatten(1).amax(1).cpu() if needed.dim() > 1 else needed.cpu()

    def width(self, lengths: Tensor, most: int) -> int:
        """Returns the number of columns of a batch.

        Args:
            lengths: of its texts.
            most: T, the number of columns before.
        """
        return min(bucket(max(1, int(lengths.max()))) if lengths.numel() else 1, most)

    def cut(self, x: Tensor, y: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a batch with only the columns it needs; in new memory if any is trimmed."""
        width = self.width(lengths, x.shape[-1])
        if width == x.shape[-1]:
            return x, y
        return x[..., :width].contiguous(), y[..., :width].contiguous() if self.targets else y


def trimmer_of(task: Task) -> PaddingTrimmer | None:
    """Returns a task's trimmer; None if models must see all columns, or texts are not padded."""
    # A custom task's ``network`` may be any object.
    paddings = {getattr(candidate.network, "padding", None) for candidate in task.candidates}
    padding = paddings.pop()
    if padding is None or paddings:
        return None
    return PaddingTrimmer(padding, getattr(task, "target", None) in ("tokens", "preference"))
