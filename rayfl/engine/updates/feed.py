"""The mini-batches of a stack of clients, padded to the largest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rayfl.engine.updates.requests import TrainRequest
from rayfl.params import leaves
from rayfl.tasks.texts import PaddingTrimmer


class Feed:
    """Gathers the batches of all clients of each step from one concatenated tensor.

    Args:
        ranked: the clients' requests, those with most steps first.
        device: where the batches are gathered.
        trimmer: trims columns of padding tokens; None if they must stay.
    """

    def __init__(
        self, ranked: Sequence[TrainRequest], device: torch.device, trimmer: PaddingTrimmer | None = None
    ) -> None:
        self._x = torch.cat([request.examples.x for request in ranked])
        self._y = torch.cat([request.examples.y for request in ranked])
        self._cutter = trimmer
        self._lengths = None if trimmer is None else trimmer.lengths(self._x, self._y)
        steps = np.array([request.plan.steps for request in ranked])
        sizes = {stop - start for bounds in {one.plan.bounds for one in ranked} for start, stop in pairwise(bounds)}
        shape = (int(steps.max()), len(ranked), max(sizes, default=0))
        offsets = np.cumsum([0, *(len(request.examples) for request in ranked[:-1])])
        # Positions, in (steps, clients, batch), of the concatenated samples of all clients.
        slots = [_slots(request.plan.bounds) for request in ranked]
        used = [len(request.plan.order) for request in ranked]
        where = tuple(
            torch.from_numpy(np.concatenate(column))
            for column in (
                [step for step, _ in slots],
                [np.repeat(np.arange(len(ranked)), used)],
                [place for _, place in slots],
            )
        )
        # padding repeats the client's first sample (or another client's): finite values that the mask removes
        first = torch.from_numpy(np.minimum(offsets, len(self._x) - 1))
        index = first[None, :, None].repeat(shape[0], 1, shape[2])
        index[where] = torch.cat([one.plan.order for one in ranked]) + torch.from_numpy(np.repeat(offsets, used))
        self._steps = steps
        self._places, self._index = index, index.to(device)
        self.masks = None
        if len(sizes) > 1:
            mask = torch.zeros(shape, dtype=self._float_type(ranked[0]))
            mask[where] = 1
            # avoids 0/0 in the unused means of finished clients
            mask[torch.from_numpy(np.arange(shape[0])[:, None] >= steps)] = 1
            self.masks = mask.to(device)
        changed = [request.variations for request in ranked if request.variations is not None]
        self._augmentation = changed[0].augmentation.on(device) if changed else None
        self._drawn = {}
        for name, drawn in changed[0].drawn.items() if changed else ():
            values = drawn.new_zeros(*shape, *drawn.shape[1:])
            values[where] = torch.cat([one.drawn[name] for one in changed])
            self._drawn[name] = values.to(device)

    @staticmethod
    def _float_type(request: TrainRequest) -> torch.dtype:
        kind: torch.dtype = next(leaf.dtype for _, leaf in leaves(request.trainable))
        return kind

    def active(self, step: int) -> int:
        """Returns how many of the ranked clients have steps left."""
        return int((self._steps > step).sum())

    def first_padded(self) -> tuple[int, int] | None:
        """Returns the first step and client whose mini-batch has padding; None where none has."""
        if self.masks is None:
            return None
        places = (self.masks == 0).any(-1).nonzero().tolist()
        return (places[0][0], places[0][1]) if places else None

    def batch(self, step: int | Tensor, active: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns x (active, b, *shape), y (active, b), mask (active, b) or None."""
        index = of_step(self._index, step, active)
        x, y = self._of_step(step, active)
        x, y = x[index], y[index]
        if self._augmentation is not None:
            drawn = {name: of_step(values, step, active).flatten(0, 1) for name, values in self._drawn.items()}
            changed = self._augmentation.both(x.flatten(0, 1), y.flatten(0, 1), drawn)
            x, y = (one.view(*index.shape, *one.shape[1:]) for one in changed)
        return x, y, None if self.masks is None else of_step(self.masks, step, active)

    def _of_step(self, step: int | Tensor, active: int) -> tuple[Tensor, Tensor]:
        """Returns the samples to gather from; with padding columns trimmed if the host knows the step's number."""
        if self._cutter is None or self._lengths is None or isinstance(step, Tensor):
            return self._x, self._y
        width = self._cutter.width(self._lengths[self._places[step, :active]], self._x.shape[-1])
        return self._x[..., :width], self._y[..., :width] if self._cutter.targets else self._y


def of_step(values: Tensor, step: int | Tensor, active: int) -> Tensor:
    """Returns a step's values of the first clients.

    Args:
        values: shape (steps, clients, ...).
        step: its number; or a device tensor, int64 of shape (1,), that is read when the step runs.
        active: how many clients.
    """
    if isinstance(step, Tensor):
        return values[:, :active].index_select(0, step)[0]
    return values[step, :active]


@lru_cache
def _slots(bounds: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns each sample's step and its position in the mini-batch; cached by bounds."""
    sizes = np.diff(bounds)
    steps = np.repeat(np.arange(len(sizes)), sizes)
    return steps, np.arange(len(steps)) - np.asarray(bounds)[steps]
