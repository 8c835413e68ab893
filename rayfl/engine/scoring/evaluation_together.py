"""Scores predictors of many clients in the same forward passes; clients and points of their sweeps are stacked.

A client's samples are padded to the largest client of its stack; padding is masked in all sums. What cannot be stacked
is left to :func:`rayfl.engine.scoring.evaluation.evaluate`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayfl.engine.scoring.evaluation import samples_at_a_time
from rayfl.engine.scoring.input_attack import InputAttack
from rayfl.engine.scoring.masked_sums import check_sums, sums_twice
from rayfl.engine.scoring.mixtures import Mixture
from rayfl.engine.scoring.model_lines import Blocks, Line, lines_of
from rayfl.errors import MethodError
from rayfl.examples import Examples
from rayfl.metrics import Statistics
from rayfl.tasks.base import NetworkTask, Predictor, Task
from rayfl.tasks.texts import trimmer_of

CPU_STACK_BYTES = 1 << 26
"""Bytes of models and inputs that are stacked at a time on a CPU; few, for the sake of its caches."""
DEVICE_STACK_BYTES = 1 << 30
"""Bytes of models and inputs that are stacked at a time on another device."""
_REMEMBERED = 8
"""By what these are divided for slopes, for which what layers compute is remembered."""


class ScoringRequest(NamedTuple):
    """One client's predictors, and the samples to score them on."""

    predictors: Mapping[str, Predictor]
    examples: Examples


class _Part(NamedTuple):
    """The clients and samples of one forward pass: ``width`` samples of each client, from ``first`` on."""

    clients: range
    first: int
    width: int


def evaluate_together(
    asked: Sequence[ScoringRequest],
    task: Task,
    batch_size: int,
    most_rows: int | None = None,
    attack: InputAttack | None = None,
) -> list[dict[str, Statistics]]:
    """Computes mergeable statistics, by client and name, of all predictors that can be stacked; omits the others.

    Counts are those of scoring client by client; sums of losses and of confidences agree with these up to rounding.

    Args:
        asked: one per client.
        task: what is learned.
        batch_size: samples of a client at a time.
        most_rows: upper limit of the rows in a pretrained base's matrix products per pass; None: no limit.
        attack: what changes the samples of classes before they are scored, for each model by itself.

    Raises:
        MethodError: a user's own measures add up samples that do not count.
    """
    found: list[dict[str, Statistics]] = [{} for _ in asked]
    # Not for tasks with custom scoring, nor for networks whose predictions depend on the rest of the batch.
    if not isinstance(task, NetworkTask) or task.by_sample is None or task.network.batch_predictions:
        return found
    groups: dict[tuple[tuple[str, ...], Hashable], list[int]] = {}
    forms: dict[int, Hashable] = {}
    # Sorted by number of samples, so that clients of one stack need little padding.
    for i in sorted(range(len(asked)), key=lambda i: -len(asked[i].examples)):
        if len(asked[i].examples):
            names = _stackable(asked[i].predictors, task)
            models = (asked[i].predictors[name].models[0] for name in names)
            groups.setdefault((names, tuple(_form(model, forms) for model in models)), []).append(i)
    batch_size = samples_at_a_time(batch_size, task)
    scored: list[tuple[int, list[str]]] = []
    vectors: list[Tensor] = []
    tried: list[Tensor] = []
    with torch.no_grad():
        for (names, _), members in groups.items():
            own = [asked[i].examples for i in members]
            examples = [replace(one, y=task.measures.targets(one.y, one.group)) for one in own]
            for line in lines_of(names, [asked[i].predictors for i in members]):
                if line.shared or task.network.vectorizable:
                    vectors.append(_scored(line, examples, task, batch_size, most_rows, attack, tried))
                    scored += [(i, aliases) for i in members for aliases in line.names]
        rows = torch.cat(vectors).double().cpu().numpy() if vectors else ()
    for sums in tried:
        check_sums(task.by_sample, sums.double().cpu().numpy())
    for (i, aliases), row in zip(scored, rows, strict=True):
        found[i].update(dict.fromkeys(aliases, Statistics(row, task.measures)))
    return found


def _stackable(predictors: Mapping[str, Predictor], task: NetworkTask) -> tuple[str, ...]:
    """Returns the names of predictors that are a single model or a mixture (of models without buffers)."""

    def is_one(model: Any) -> bool:
        return not task.network.buffer_names if isinstance(model, Mixture) else not callable(model)

    return tuple(
        name
        for name, one in predictors.items()
        if one.combine is None and one.task is None and len(one.models) == 1 and is_one(one.models[0])
    )


def _form(model: Any, known: dict[int, Hashable]) -> Hashable:
    """Returns the names and shapes of a model's tensors; clients may differ in them. ``known`` caches them by id."""
    if isinstance(model, Mixture):
        return _form(model.start, known), _form(model.end, known)
    if id(model) not in known:
        known[id(model)] = tuple((name, leaf.shape) for name, leaf in model.items())
    return known[id(model)]


def _scored(
    line: Line,
    examples: Sequence[Examples],
    task: NetworkTask,
    batch_size: int,
    most_rows: int | None,
    attack: InputAttack | None,
    tried: list[Tensor],
) -> Tensor:
    """Computes statistics by client and point, shape (clients x points, statistics).

    Each pass leaves a few numbers per sample, which are summed once, after all passes. ``tried`` is given sums of
    padded samples to check.
    """
    points, device = len(line.coefficients), examples[0].x.device
    each = task.network.rows_per_sample * task.inputs_per_sample
    limit = most_rows // each if most_rows and each else None
    memory = CPU_STACK_BYTES if device.type == "cpu" else DEVICE_STACK_BYTES
    memory //= 1 if attack is None else _REMEMBERED
    parts = list(_parts(line, examples, task, batch_size, limit, memory))
    blocks = Blocks(line, device)
    found: list[tuple[Tensor, ...]] = []
    sizes = np.array([len(one) for one in examples])
    rows = torch.from_numpy(np.concatenate([_rows_of(part, sizes, points) for part in parts], 1))
    # Targets at each position are large, so they are gathered pass by pass, like inputs.
    trimmer, whole = trimmer_of(task), examples[0].y.dim() > 1
    targets = torch.empty(0) if whole else torch.cat([one.y for one in examples]).index_select(0, rows[1].to(device))
    if trimmer is not None:
        texts, asked = (torch.cat([getattr(one, name) for one in examples]) for name in ("x", "y"))
        lengths = trimmer.lengths(texts, asked).index_select(0, rows[1])
        del texts, asked
    order, begin = rows[0].to(device), 0
    for part in parts:
        shape = (len(part.clients) * points, part.width)
        here = slice(begin, begin + shape[0] * shape[1])
        own = [(examples[k], slice(part.first, part.first + part.width)) for k in part.clients]
        x = torch.cat([one.x[its] for one, its in own]).index_select(0, order[here])
        y = torch.cat([one.y[its] for one, its in own]).index_select(0, order[here]) if whole else targets[here]
        if trimmer is not None:
            x, y = trimmer.cut(x, y, lengths[here])
        if not line.shared:
            x, y = (one.view(*shape, *one.shape[1:]) for one in (x, y))
        models = line.starts[0] if line.shared else blocks.of(part.clients)
        if attack is not None:
            x = _attacked(attack, task, models, x, y, not line.shared)
        found.append(task.outcomes(models, x, y, stacked=not line.shared))
        begin = here.stop
    place, mask = (one.to(device) for one in _places(parts, examples, points))
    measures = task.by_sample
    assert measures is not None
    columns = [torch.cat(column) for column in zip(*found, strict=True)]
    if sizes.min() < sizes.max() and (twice := sums_twice(measures, columns)) is not None:
        tried.append(twice)
    return measures.added([column[place] for column in columns], mask)


def _attacked(
    attack: InputAttack, task: NetworkTask, models: Mapping[str, Tensor], x: Tensor, y: Tensor, stacked: bool
) -> Tensor:
    def predicted(at: Tensor) -> Tensor:
        return task.stacked_predictions(models, at).flatten(0, 1) if stacked else task.predictions([models], at)

    moved = attack.moved(x, task.measures.classes_of(y.flatten(0, 1) if stacked else y), predicted)
    if moved is None:
        raise MethodError("evaluation.adversarial: what models predict has no slope in their inputs")
    return moved


def _parts(
    line: Line, examples: Sequence[Examples], task: NetworkTask, batch_size: int, limit: int | None, memory: int
) -> Iterator[_Part]:
    """Yields the forward passes, of at most ``limit`` samples each; clients are sorted by their number of samples.

    Samples count once for each point of the line.
    """
    points, row = len(line.coefficients), examples[0].x[:1].nbytes + _outputs(task, examples[0])
    if limit is not None:
        batch_size = max(min(batch_size, limit // points), 1)
    model = 0 if line.shared else sum(leaf.nbytes for leaf in line.starts[0].values())
    begin = 0
    while begin < len(examples):
        size = len(examples[begin])
        each = points * (model + min(size, batch_size) * row)
        count = memory // max(each, 1)
        if limit is not None:
            rows = task.network.rows_per_sample * task.inputs_per_sample
            further = task.network.rows_per_model / max(rows, 1)  # rows, as samples
            count = min(count, int(limit // (points * (min(size, batch_size) + further))))
        clients = range(begin, min(begin + max(count, 1), len(examples)))
        for first in range(0, size, batch_size):
            having = [k for k in clients if len(examples[k]) > first]
            yield _Part(range(begin, begin + len(having)), first, min(size - first, batch_size))
        begin = clients.stop


def _outputs(task: NetworkTask, examples: Examples) -> int:
    """Returns the bytes of one sample's predictions, if all are computed at once."""
    positions = examples.y[0].numel() if task.target in ("tokens", "mask", "preference", "nodes") else 1
    if task.target == "ranking":
        positions = examples.x[0].numel()
    return 0 if task.network.output_rows is not None else 4 * positions * task.network.head_shape[0]


def _rows_of(part: _Part, sizes: np.ndarray, points: int) -> np.ndarray:
    """Returns the indices of a pass's samples, in its own clients and in all clients; padding repeats the last sample.

    Args:
        part: which samples.
        sizes: number of samples by client.
        points: number of points on the line.

    Returns:
        int64 of shape (2, clients x points x width).
    """
    own = np.minimum(sizes[part.clients.start : part.clients.stop] - part.first, part.width)
    ends = np.cumsum(sizes)[part.clients.start : part.clients.stop]
    first = np.stack([np.cumsum(own) - own, ends - sizes[part.clients.start : part.clients.stop] + part.first])
    rows = first[:, :, None] + np.minimum(np.arange(part.width), own[:, None] - 1)
    return np.repeat(rows[:, :, None], points, axis=2).reshape(2, -1)


def _places(parts: Sequence[_Part], examples: Sequence[Examples], points: int) -> tuple[Tensor, Tensor]:
    """Returns the position of each client's and point's samples among all scored rows, and a mask without padding."""
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
