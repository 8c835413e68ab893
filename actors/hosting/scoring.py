"""Scores models on the device of one host."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rayfl.data.soundness import check_examples
from rayfl.diagnosis.device_errors import Pieces
from rayfl.engine.evaluation import evaluate
from rayfl.engine.tasks import Predictor, Task
from rayfl.examples import Examples, InputSpec
from rayfl.metrics import Statistics


class Scorer:
    """Scores predictors, in batches that the device's memory has room for.

    Args:
        task: what is learned.
        device: where models and samples are.
        spec: what the samples are.
        batch_size: samples at a time, if there is room.
    """

    def __init__(self, task: Task, device: torch.device, spec: InputSpec, batch_size: int) -> None:
        self._task = task
        self._device = device
        self._spec = spec
        self._batch_size = batch_size
        self._pieces = Pieces("samples of an evaluation")

    def score(self, predictors: Mapping[str, Predictor], examples: Examples) -> dict[str, Statistics]:
        """The statistics of each predictor over samples on the device."""
        return evaluate(predictors, examples, self._task, self._batch_size, self._pieces)

    def score_official(self, predictors: Mapping[str, Predictor], part: Examples, first: int) -> dict[str, Statistics]:
        """The statistics of each predictor over a piece of the official test part.

        Args:
            predictors: of the server's models.
            part: samples, on the CPU.
            first: the number of the first of them.

        Raises:
            DataError: when a sample is not what the data set says.
        """
        check_examples(part, self._spec, "the official test part", first)
        total = {name: Statistics.empty(self._task.measures) for name in predictors}

        def add(here: slice) -> None:
            examples = Examples(part.x[here].to(self._device), part.y[here].to(self._device))
            for name, statistics in self.score(predictors, examples).items():
                total[name] += statistics

        self._pieces.over(len(part), add)
        return total
