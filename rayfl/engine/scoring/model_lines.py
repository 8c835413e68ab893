"""Interpolated models of many clients, computed as stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayfl.engine.scoring.mixtures import Mixture
from rayfl.tasks.base import Model, Predictor


@dataclass(frozen=True)
class Line:
    """Points on a line between two models of each client.

    Attributes:
        starts: one model per client.
        ends: one model per client; the starts if that is the only point.
        coefficients: by point and client, the position between start (0) and end (1).
        names: by point, the names of the predictors at that point.
    """

    starts: tuple[Model, ...]
    ends: tuple[Model, ...]
    coefficients: list[tuple[float, ...]]
    names: list[list[str]]

    def add(self, coefficients: tuple[float, ...], name: str) -> None:
        """Adds a predictor: as a new point, or under a point with the same coefficients."""
        if coefficients not in self.coefficients:
            self.coefficients.append(coefficients)
            self.names.append([])
        self.names[self.coefficients.index(coefficients)].append(name)

    @property
    def shared(self) -> bool:
        """Returns whether the line is a single model that all clients share."""
        models = {id(model) for model in (*self.starts, *self.ends)}
        return len(models) == 1


def lines_of(names: Sequence[str], rows: Sequence[Mapping[str, Predictor]]) -> list[Line]:
    """Groups predictors into lines; a model that is the start or end of a line becomes a point on it."""
    found: dict[Any, Line] = {}
    plain: dict[str, tuple[Any, ...]] = {}
    for name in names:
        models: tuple[Any, ...] = tuple(row[name].models[0] for row in rows)
        if not any(isinstance(model, Mixture) for model in models):
            plain[name] = models
            continue
        lines = [(m.start, m.end, m.coefficient) if isinstance(m, Mixture) else (m, m, 0.0) for m in models]
        starts, ends, coefficients = zip(*lines, strict=True)
        key = tuple(map(id, (*starts, *ends)))
        found.setdefault(key, Line(starts, ends, [], [])).add(coefficients, name)
    for name, models in plain.items():
        ids = tuple(map(id, models))
        for line in found.values():
            if ids in (tuple(map(id, line.starts)), tuple(map(id, line.ends))):
                line.add((float(ids != tuple(map(id, line.starts))),) * len(models), name)
                break
        else:
            found[ids * 2] = line = Line(models, models, [], [])
            line.add((0.0,) * len(models), name)
    return list(found.values())


class Blocks:
    """Computes the models of some clients at all points of a line.

    Args:
        line: the line.
        device: where the models are.
    """

    def __init__(self, line: Line, device: torch.device) -> None:
        self._line = line
        first = line.starts[0]
        self._shapes = {name: leaf.shape for name, leaf in first.items()}
        if len({leaf.dtype for leaf in first.values()}) != 1:
            raise TypeError("models with leaves of several types cannot be stacked")
        self._one_start = all(model is first for model in line.starts)
        self._start = self._flat(line.starts[:1]) if self._one_start else None
        self._weights = torch.tensor(line.coefficients, dtype=next(iter(first.values())).dtype).t().to(device)
        self._last: tuple[range, dict[str, Tensor]] = (range(0), {})

    def of(self, clients: range) -> dict[str, Tensor]:
        """Returns, by name, tensors of shape (clients x points, *shape)."""
        if self._last[0] != clients:
            self._last = (range(0), {})  # before others take memory
            self._last = clients, self._made(slice(clients.start, clients.stop))
        return self._last[1]

    def _made(self, here: slice) -> dict[str, Tensor]:
        starts, ends = self._line.starts[here], self._line.ends[here]
        block = self._flat(starts) if self._start is None else self._start
        block = block[:, None]
        if any(start is not end for start, end in zip(starts, ends, strict=True)):
            block = torch.lerp(block, self._flat(ends)[:, None], self._weights[here, :, None])
        block = block.expand(len(starts), -1, -1).flatten(0, 1)
        found, begin = {}, 0
        for name, shape in self._shapes.items():
            found[name] = block[:, begin : begin + shape.numel()].view(len(block), *shape)
            begin += shape.numel()
        return found

    def _flat(self, models: Sequence[Model]) -> Tensor:
        """Returns models as rows of one matrix."""
        return torch.cat([model[name].reshape(-1) for model in models for name in self._shapes]).view(len(models), -1)
