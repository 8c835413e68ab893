"""Scores predictors of many clients in the same passes: clients, and the points of their sweeps, are stacked.

Samples of a client are padded to those of the largest in its stack, and the padding is left out of all sums. What
cannot be stacked is left to :func:`rayfl.engine.evaluation.evaluate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from rayfl.engine.classification import Classification
from rayfl.engine.mixtures import Mixture
from rayfl.engine.tasks import Model, Predictor, Task
from rayfl.examples import Examples
from rayfl.metrics import Statistics, outcomes, summed
from rayfl.metrics.classification import ClassificationMeasures

_CPU_BYTES, _DEVICE_BYTES = 1 << 26, 1 << 30
"""Models and inputs that are stacked at a time; few on CPUs, for the sake of their caches."""


class Asked(NamedTuple):
    """Which predictors are to be scored on which samples, for one client."""

    predictors: Mapping[str, Predictor]
    examples: Examples


@dataclass(frozen=True)
class _Line:
    """Points on a line between two models of each client.

    Attributes:
        starts: by client.
        ends: by client; the starts where there is but that point.
        coefficients: by point and client, how far it is from the start to the end.
        names: by point, of the predictors that it is.
    """

    starts: tuple[Model, ...]
    ends: tuple[Model, ...]
    coefficients: list[tuple[float, ...]]
    names: list[list[str]]

    def add(self, coefficients: tuple[float, ...], name: str) -> None:
        """Adds a point, unless it is there."""
        if coefficients not in self.coefficients:
            self.coefficients.append(coefficients)
            self.names.append([])
        self.names[self.coefficients.index(coefficients)].append(name)

    @property
    def shared(self) -> bool:
        """Returns whether it is but one model, the same for all clients."""
        models = {id(model) for model in (*self.starts, *self.ends)}
        return len(models) == 1


class _Part(NamedTuple):
    """Clients and rows of samples that are scored in one pass: ``width`` rows of each, from ``first`` on."""

    clients: range
    first: int
    width: int


def evaluate_together(
    asked: Sequence[Asked], task: Task, batch_size: int, most_rows: int | None = None
) -> list[dict[str, Statistics]]:
    """The mergeable statistics of what can be scored in stacks, by client and name; others are left out.

    Counts are those of scoring client by client; sums of losses and of confidences agree with these up to rounding.

    Args:
        asked: by client.
        task: what is learned.
        batch_size: samples of a client at a time.
        most_rows: of the base's products in a pass, for networks that say how many a sample makes; None: any.
    """
    found: list[dict[str, Statistics]] = [{} for _ in asked]
    measures = task.measures
    # Of other measures the sums are others; and a prediction may depend on the batch in which it is made.
    plain = type(measures) is ClassificationMeasures and not measures.further
    if not isinstance(task, Classification) or not plain or task.network.batch_predictions:
        return found
    groups: dict[tuple[str, ...], list[int]] = {}
    # Those with as many samples side by side, so that there is little padding.
    for i in sorted(range(len(asked)), key=lambda i: -len(asked[i].examples)):
        if len(asked[i].examples):
            groups.setdefault(_stackable(asked[i].predictors, task), []).append(i)
    scored: list[tuple[int, list[str]]] = []
    vectors: list[Tensor] = []
    with torch.no_grad():
        for names, members in groups.items():
            examples = [asked[i].examples for i in members]
            for line in _lines(names, [asked[i].predictors for i in members]):
                if line.shared or task.network.vectorizable:
                    vectors.append(_scored(line, examples, task, batch_size, most_rows))
                    scored += [(i, aliases) for i in members for aliases in line.names]
        rows = torch.cat(vectors).cpu().numpy() if vectors else ()
    for (i, aliases), row in zip(scored, rows, strict=True):
        found[i].update(dict.fromkeys(aliases, Statistics.from_vector(row, measures)))
    return found


def _stackable(predictors: Mapping[str, Predictor], task: Task) -> tuple[str, ...]:
    """The names of those that are one model each: as it is, or a mixture (of models without buffers)."""

    def is_one(model: Any) -> bool:
        return not task.network.buffer_names if isinstance(model, Mixture) else not callable(model)

    return tuple(
        name
        for name, one in predictors.items()
        if one.combine is None and one.task is None and len(one.models) == 1 and is_one(one.models[0])
    )


def _lines(names: Sequence[str], rows: Sequence[Mapping[str, Predictor]]) -> list[_Line]:
    """The lines on which the predictors lie; a model that begins or ends others' line is a point of it."""
    found: dict[Any, _Line] = {}
    plain: dict[str, tuple[Any, ...]] = {}
    for name in names:
        models: tuple[Any, ...] = tuple(row[name].models[0] for row in rows)
        if not any(isinstance(model, Mixture) for model in models):
            plain[name] = models
            continue
        lines = [(m.start, m.end, m.coefficient) if isinstance(m, Mixture) else (m, m, 0.0) for m in models]
        starts, ends, coefficients = zip(*lines, strict=True)
        key = tuple(map(id, (*starts, *ends)))
        found.setdefault(key, _Line(starts, ends, [], [])).add(coefficients, name)
    for name, models in plain.items():
        ids = tuple(map(id, models))
        for line in found.values():
            if ids in (tuple(map(id, line.starts)), tuple(map(id, line.ends))):
                line.add((float(ids != tuple(map(id, line.starts))),) * len(models), name)
                break
        else:
            found[ids * 2] = line = _Line(models, models, [], [])
            line.add((0.0,) * len(models), name)
    return list(found.values())


def _scored(
    line: _Line, examples: Sequence[Examples], task: Classification, batch_size: int, most_rows: int | None
) -> Tensor:
    """The statistics by client and point, shape (clients x points, size of a vector of statistics).

    What a pass leaves is a few numbers a sample; they are added up in the end, for all passes at once.
    """
    points, device = len(line.coefficients), examples[0].x.device
    each = task.network.rows_per_sample
    limit = most_rows // each if most_rows and each else None
    parts = list(_parts(line, examples, batch_size, limit))
    blocks = _Blocks(line, device)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    order = torch.cat([_rows_of(part, examples, points) for part in parts]).to(device)
    labels = torch.cat([one.y for one in examples])
    starts = np.cumsum([0, *(len(one) for one in examples)])
    labels = labels.index_select(0, order + torch.from_numpy(_offsets(parts, starts, points)).to(device))
    begin = 0
    for part in parts:
        shape = (len(part.clients) * points, part.width)
        stop = begin + shape[0] * shape[1]
        inputs = torch.cat([examples[k].x for k in part.clients]).index_select(0, order[begin:stop])
        if line.shared:
            predicted = task.predictions([line.starts[0]], inputs)
        else:
            predicted = _predicted(task, blocks.of(part.clients), inputs.view(*shape, *inputs.shape[1:])).flatten(0, 1)
        found.append(outcomes(predicted, labels[begin:stop]))
        begin = stop
    chosen, top, hits = (torch.cat(column) for column in zip(*found, strict=True))
    place, mask = _places(parts, examples, points)
    place = place.to(device)
    return summed(chosen[place], top[place], hits[place], mask.to(device))


def _parts(line: _Line, examples: Sequence[Examples], batch_size: int, limit: int | None) -> Iterator[_Part]:
    """What is scored pass by pass; clients are sorted by their samples, of which ``limit`` are in a pass at most."""
    points, row = len(line.coefficients), examples[0].x[:1].nbytes
    model = 0 if line.shared else sum(leaf.nbytes for leaf in line.starts[0].values())
    most = _CPU_BYTES if examples[0].x.device.type == "cpu" else _DEVICE_BYTES
    begin = 0
    while begin < len(examples):
        size = len(examples[begin])
        each = points * (model + min(size, batch_size) * row)
        count = most // max(each, 1)
        if limit is not None:
            count = min(count, limit // (points * min(size, batch_size)))
        clients = range(begin, min(begin + max(count, 1), len(examples)))
        for first in range(0, size, batch_size):
            having = [k for k in clients if len(examples[k]) > first]
            yield _Part(range(begin, begin + len(having)), first, min(size - first, batch_size))
        begin = clients.stop


def _rows_of(part: _Part, examples: Sequence[Examples], points: int) -> Tensor:
    """Returns where a part's samples are among those of its clients; padding repeats a client's last sample."""
    rows = torch.arange(part.first, part.first + part.width)
    before, found = 0, []
    for k in part.clients:
        size = len(examples[k])
        found.append((before + rows.clamp(max=size - 1)).repeat(points))
        before += size
    return torch.cat(found)


def _offsets(parts: Sequence[_Part], starts: np.ndarray, points: int) -> np.ndarray:
    """Returns where the samples of each part's first client begin among everybody's, by entry of the parts' rows."""
    return np.concatenate([np.full(len(p.clients) * points * p.width, starts[p.clients.start]) for p in parts])


def _places(parts: Sequence[_Part], examples: Sequence[Examples], points: int) -> tuple[Tensor, Tensor]:
    """Returns where the samples of each client and point are among all that was scored, and which are no padding."""
    sizes = [len(one) for one in examples]
    place = np.zeros((len(sizes), points, max(sizes)), np.int64)
    begin = 0
    for clients, first, width in parts:
        count = len(clients) * points * width
        place[clients.start : clients.stop, :, first : first + width] = np.arange(begin, begin + count).reshape(
            len(clients), points, width
        )
        begin += count
    mask = np.arange(max(sizes)) < np.array(sizes)[:, None, None]
    mask = np.broadcast_to(mask, place.shape)
    return torch.from_numpy(place).flatten(0, 1), torch.from_numpy(mask.copy()).flatten(0, 1)


class _Blocks:
    """Makes the models of some clients and all points of a line.

    Args:
        line: the line.
        device: where the models are.
    """

    def __init__(self, line: _Line, device: torch.device) -> None:
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
        """By name, tensors of shape (clients x points, *shape)."""
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
        """Models as rows."""
        return torch.cat([model[name].reshape(-1) for model in models for name in self._shapes]).view(len(models), -1)


_OF_PREDICTIONS = ("predictions", "log_probabilities", "predicted")
"""What the written-out prediction supposes."""


def _predicted(task: Classification, models: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Log-probabilities, shape (models, b, C), of stacked models for inputs of shape (models, b, *input shape)."""
    plain = all(getattr(type(task), name) is getattr(Classification, name) for name in _OF_PREDICTIONS)
    layers = task.chain(models) if plain else None
    if layers is None:
        found: Tensor = vmap(lambda model, inputs: task.predictions([model], inputs))(dict(models), x)
        return found
    read = x.flatten(2)
    for place, (weight, bias) in enumerate(layers):
        read = torch.bmm(read, weight.mT) if bias is None else torch.baddbmm(bias[:, None], read, weight.mT)
        if place < len(layers) - 1:
            read = read.relu_()
    result: Tensor = read.log_softmax(-1)
    return result
