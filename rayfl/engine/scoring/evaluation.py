"""Scores predictors on one client's splits, in large batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rayfl.diagnosis.device_errors import Pieces
from rayfl.engine.scoring.input_attack import InputAttack
from rayfl.examples import Examples, InputSpec
from rayfl.metrics import Statistics
from rayfl.tasks.base import Model, Predictor, Task
from rayfl.tasks.beside_training import TaskBesideTraining
from rayfl.tasks.texts import trimmer_of

_ROWS = 1 << 14
"""Positions of a pass where there are outputs at each: what a model remembers of them should fit into memory."""
_PIXELS = 1 << 18
"""Pixels of a pass where each has a class: a map of 16 channels is then of 16 MiB."""


def samples_at_a_time(batch_size: int, task: Task) -> int:
    """Returns the batch size of evaluation: smaller for networks with outputs at each position.

    Args:
        batch_size: upper limit.
        task: what is learned.
    """
    spec: InputSpec | None = getattr(task, "spec", None)
    if spec is not None and spec.target in ("mask", "nodes"):
        return min(batch_size, max(_PIXELS // math.prod(spec.places), 1))
    # A custom task's ``network`` may be any object.
    each = task.network.rows_per_sample * task.inputs_per_sample if getattr(task.network, "output_rows", None) else 0
    return min(batch_size, max(_ROWS // each, 1)) if each else batch_size


def evaluate(
    predictors: Mapping[str, Predictor],
    examples: Examples,
    task: Task,
    batch_size: int,
    pieces: Pieces | None = None,
    training: Examples | None = None,
    own: bool = False,
    attack: InputAttack | None = None,
) -> dict[str, Statistics]:
    """Computes the mergeable statistics of each predictor over ``examples``.

    The batches are consecutive and of fixed size, so the sums do not depend on who evaluates. Measures that compare
    samples are given the predictions of all batches together.

    Args:
        predictors: by name.
        examples: the samples.
        task: what the predictors are given.
        batch_size: samples at a time.
        pieces: splits batches when the device runs out of memory.
        training: the client's training samples, for tasks that compare with them; None: it has none.
        own: whether ``examples`` are these.
        attack: what changes the samples of classes before they are scored, for each predictor by itself. Predictors
            whose predictions have no slope have statistics of no samples.
    """
    pieces, totals = pieces or Pieces("samples of an evaluation"), {}
    batch_size = samples_at_a_time(batch_size, task)
    targets = task.measures.targets(examples.y, examples.group)
    batches = [
        (_aligned(examples.x[start : start + batch_size]), targets[start : start + batch_size])
        for start in range(0, len(examples), batch_size)
    ]
    if (trimmer := trimmer_of(task)) is not None:
        batches = [trimmer.cut(x, y, trimmer.lengths(x, y)) for x, y in batches]
    with torch.no_grad():
        if isinstance(task, TaskBesideTraining) and batches:
            beside = Examples(examples.x[:0], examples.y[:0]) if training is None else training
            for name, predictor in predictors.items():
                passes = task.passes(predictor, predictor.built(), examples, beside)
                rows = [_passed(*one, batch_size, pieces, examples.x.device) for one in passes]
                totals[name] = Statistics.from_vector(task.assessed(rows, examples, beside, own), task.measures)
            return totals
        for name, predictor in predictors.items():
            if not batches:  # models need not be made
                totals[name] = Statistics.empty(task.measures)
                continue
            models = predictor.built()
            if task.measures.compares:
                rows = [part for x, _ in batches for part in _predicted(predictor, models, x, task, pieces)]
                vector = task.measures.statistics(torch.cat(rows), targets)
                totals[name] = Statistics.from_vector(vector, task.measures)
                continue
            parts = [part for x, y in batches for part in _scored(predictor, models, x, y, task, pieces, attack)]
            totals[name] = Statistics.from_vector(torch.stack(parts).sum(0).cpu().numpy(), task.measures)
    return totals


def _scored(
    predictor: Predictor,
    models: Sequence[Model],
    x: Tensor,
    y: Tensor,
    task: Task,
    pieces: Pieces,
    attack: InputAttack | None,
) -> list[Tensor]:
    """Returns the statistics of one batch, or of the parts it was split into."""
    parts = list[Tensor]()

    def score(here: slice) -> None:
        inputs: Tensor | None = x[here]
        if attack is not None:
            labels = task.measures.classes_of(y[here])
            inputs = attack.moved(x[here], labels, lambda at: predictor.predictions(models, at, task))
        if inputs is None:
            parts.append(torch.zeros(task.measures.size, dtype=torch.float64, device=y.device))
        else:
            parts.append(task.statistics(predictor, models, inputs, y[here]))

    pieces.over(len(y), score)
    return parts


def _predicted(predictor: Predictor, models: Sequence[Model], x: Tensor, task: Task, pieces: Pieces) -> list[Tensor]:
    """Returns the predictions for one batch, or for the parts it was split into."""
    parts = list[Tensor]()
    pieces.over(len(x), lambda here: parts.append(predictor.predictions(models, x[here], task)))
    return parts


def _passed(
    function: Callable[[Tensor], Tensor], count: int, batch_size: int, pieces: Pieces, device: torch.device
) -> Tensor:
    """Returns the rows of a pass over ``count`` samples."""
    parts = list[Tensor]()
    for first in range(0, max(count, 1), batch_size):
        numbers = torch.arange(first, min(first + batch_size, count), device=device)
        pieces.of(numbers, lambda part: parts.append(function(part)))
        if not count:
            parts.append(function(numbers))
    return torch.cat(parts)


def _aligned(x: Tensor) -> Tensor:
    """Returns an aligned copy on CPUs (a slice's alignment would change the last bits); elsewhere ``x`` itself."""
    return x.clone() if x.device.type == "cpu" else x
