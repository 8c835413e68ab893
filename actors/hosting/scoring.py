"""Evaluates models on the device of a host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from rayfl.data.backdoor import Backdoor
from rayfl.data.soundness import check_examples
from rayfl.diagnosis.busy_time import busy_seconds
from rayfl.diagnosis.device_errors import Pieces, check_context
from rayfl.engine.scoring.evaluation import evaluate, samples_at_a_time
from rayfl.engine.scoring.evaluation_together import ScoringRequest, evaluate_together
from rayfl.engine.scoring.input_attack import InputAttack
from rayfl.engine.scoring.sample_losses import sample_losses
from rayfl.errors import text_of
from rayfl.examples import Examples, InputSpec
from rayfl.metrics import Metric, Statistics
from rayfl.metrics.changed_inputs import ASR, CHANGED_SPLITS, ROBUST, with_changed
from rayfl.metrics.moments import moments_of
from rayfl.tasks.base import Predictor, Task
from rayfl.tasks.beside_training import TaskBesideTraining

_log = logging.getLogger(__name__)
SplitScores = dict[str, dict[str, Statistics]]
"""One client's statistics, by split and name of the predictor."""


class Scorer:
    """Evaluates predictors, in batches that fit the device's memory.

    Args:
        task: task of the experiment.
        device: device of the models and samples.
        spec: description of the samples.
        batch_size: samples at a time, if they fit.
        rows: maximum number of rows of a pretrained model's products at a time if clients are stacked; None for any.
        backdoor: whose trigger samples carry when they are scored once more (:data:`CHANGED_SPLITS`); None: no. The
            task then has measures of it.
        attack: what changes samples when they are scored once more, to mislead each predictor; None: no. The task then
            has measures of it.

    Attributes:
        busy_s: seconds of CPU or GPU time that clients' models took so far.
    """

    def __init__(
        self,
        task: Task,
        device: torch.device,
        spec: InputSpec,
        batch_size: int,
        rows: int | None = None,
        backdoor: Backdoor | None = None,
        attack: InputAttack | None = None,
    ) -> None:
        self._task = task
        self._device = device
        self._spec = spec
        self._batch_size = batch_size
        self._rows = rows
        self._backdoor = backdoor
        self._attack = attack
        self._pieces = Pieces("samples of an evaluation")
        self._clients = Pieces("clients of an evaluation")
        self._said: set[str] = set()
        self.busy_s = 0.0

    def score(
        self,
        predictors: Mapping[str, Predictor],
        examples: Examples,
        split: str,
        training: Examples | None = None,
    ) -> dict[str, Statistics]:
        """Returns the statistics of each predictor over samples on the device.

        Args:
            predictors: by name.
            examples: the samples.
            split: which they are.
            training: the training samples of the client whose samples they are; None where they are nobody's.
        """

        def scored(samples: Examples, attack: InputAttack | None = None) -> dict[str, Statistics]:
            own = split == "train"
            return evaluate(predictors, samples, self._task, self._batch_size, self._pieces, training, own, attack)

        found = scored(examples)
        if self._backdoor is not None and split in CHANGED_SPLITS[ASR]:
            found = _joined(found, ASR, scored(self._backdoor.triggered(examples)))
        if self._attack is not None and split in CHANGED_SPLITS[ROBUST]:
            attacked = scored(examples, self._attack)
            found = _joined(found, ROBUST, attacked)
            for name in attacked if len(examples) else ():
                if not attacked[name].n and name not in self._said:
                    self._said.add(name)
                    _log.warning("the robust accuracy of %r is unknown: what it predicts has no slope in inputs", name)
        return found

    def score_together(
        self,
        predictors: Mapping[int, Mapping[str, Predictor]],
        splits: Sequence[str],
        samples: Callable[[int], Mapping[str, Examples]],
    ) -> dict[int, SplitScores]:
        """Evaluates predictors in stacks of clients, as far as they can be stacked.

        An error leaves out a whole split. The caller then evaluates its clients one by one, and the client that caused
        the error raises it again.

        Args:
            predictors: predictors by client and name.
            splits: names of the splits to evaluate on.
            samples: returns a client's splits, on the device.

        Returns:
            Statistics by client, split and name, without those that could not be stacked.
        """
        found: dict[int, SplitScores] = {client: {} for client in predictors}
        with self._timed():
            for split in splits:
                asked = [ScoringRequest(own, samples(client)[split]) for client, own in predictors.items()]
                scores = self._stacked(asked)
                for metric, change in ((ASR, self._backdoor), (ROBUST, self._attack)):
                    if change is not None and split in CHANGED_SPLITS[metric]:
                        changed = self._stacked(asked, change)
                        scores = [_joined(own, metric, more) for own, more in zip(scores, changed, strict=True)]
                for client, statistics in zip(predictors, scores, strict=True):
                    found[client][split] = statistics
        return found

    def score_rest(
        self,
        predictors: Mapping[str, Predictor],
        splits: Sequence[str],
        samples: Mapping[str, Examples],
        scored: SplitScores,
    ) -> SplitScores:
        """Evaluates those predictors of a client that have no statistics yet; returns all, by split and name."""
        found: SplitScores = {}
        # A split that is not asked for is not read.
        training = samples["train"] if isinstance(self._task, TaskBesideTraining) else None
        for split in splits:
            known = scored.get(split, {})
            rest = {name: predictor for name, predictor in predictors.items() if name not in known}
            with self._timed() if rest else nullcontext():
                made = {**known, **(self.score(rest, samples[split], split, training) if rest else {})}
            found[split] = {name: made[name] for name in predictors}
        return found

    def losses(self, predictors: Mapping[str, Predictor], own: str, examples: Examples) -> SplitScores:
        """Returns the moments of the losses of training samples: of the global model, or of what a client has for it.

        Args:
            predictors: the client's.
            own: the row that is its method's personalized model, for a method without a global one.
            examples: the samples, on the device.
        """
        name = next((name for name in ("global", own) if name in predictors), next(iter(predictors)))
        task, rows, found = predictors[name].task or self._task, samples_at_a_time(self._batch_size, self._task), []

        def find(here: slice) -> None:
            found.append(sample_losses(predictors[name], task, examples[here], rows))

        with self._timed():
            self._pieces.over(len(examples), find)
        return {"train": {name: moments_of(np.concatenate([np.zeros(0), *found]))}}

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = busy_seconds(self._device)
        try:
            yield
        finally:
            self.busy_s += busy_seconds(self._device) - began

    def _stacked(
        self, asked: Sequence[ScoringRequest], change: Backdoor | InputAttack | None = None
    ) -> list[dict[str, Statistics]]:
        found: list[dict[str, Statistics]] = []
        try:
            self._clients.over(len(asked), lambda here: found.extend(self._together(asked[here], change)))
        except Exception as error:
            check_context(self._device, error)
            reason = (text_of(error).splitlines() or [type(error).__name__])[0]
            if reason not in self._said:
                self._said.add(reason)
                _log.warning("%d clients are scored one by one: %s", len(asked), reason)
            return [{} for _ in asked]
        return found

    def _together(
        self, asked: Sequence[ScoringRequest], change: Backdoor | InputAttack | None
    ) -> list[dict[str, Statistics]]:
        if isinstance(change, Backdoor):
            asked = [ScoringRequest(own, change.triggered(examples)) for own, examples in asked]
        attack = change if isinstance(change, InputAttack) else None
        return evaluate_together(asked, self._task, self._batch_size, self._rows, attack)

    def score_official(self, predictors: Mapping[str, Predictor], part: Examples, first: int) -> dict[str, Statistics]:
        """Returns the statistics of each predictor over a piece of the official test part.

        Args:
            predictors: predictors of the server's models.
            part: samples of the piece, on the CPU.
            first: number of its first sample.

        Raises:
            DataError: when a sample is not what the data set says.
        """
        check_examples(part, self._spec, "the official test part", first)
        total = {name: Statistics.empty(self._task.measures) for name in predictors}

        def add(here: slice) -> None:
            examples = part[here].to(self._device)
            for name, statistics in self.score(predictors, examples, "official").items():
                total[name] += statistics

        if self._task.measures.compares:
            add(slice(None))  # its batches are split where they are predicted, if need be
        else:
            self._pieces.over(len(part), add)
        return total


def _joined(
    plain: Mapping[str, Statistics], metric: Metric, changed: Mapping[str, Statistics]
) -> dict[str, Statistics]:
    """Returns the statistics of those predictors that have been scored on samples as they are and on changed ones."""
    return {name: with_changed(found, metric, changed[name]) for name, found in plain.items() if name in changed}
