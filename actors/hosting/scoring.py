"""Scores models on the device of one host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from rayfl.data.soundness import check_examples
from rayfl.diagnosis.device_errors import Pieces, check_context
from rayfl.engine.evaluation import evaluate
from rayfl.engine.evaluation_together import ScoringRequest, evaluate_together
from rayfl.engine.tasks import Predictor, Task
from rayfl.errors import text_of
from rayfl.examples import Examples, InputSpec
from rayfl.metrics import Statistics

_log = logging.getLogger(__name__)
SplitScores = dict[str, dict[str, Statistics]]
"""One client's statistics, by split and name of the predictor."""


class Scorer:
    """Scores predictors, in batches that the device's memory has room for.

    Args:
        task: what is learned.
        device: where models and samples are.
        spec: what the samples are.
        batch_size: samples at a time, if there is room.
        rows: most rows of a pretrained model's products at a time where clients are stacked; None: any.
    """

    def __init__(
        self, task: Task, device: torch.device, spec: InputSpec, batch_size: int, rows: int | None = None
    ) -> None:
        self._task = task
        self._device = device
        self._spec = spec
        self._batch_size = batch_size
        self._rows = rows
        self._pieces = Pieces("samples of an evaluation")
        self._clients = Pieces("clients of an evaluation")
        self._said: set[str] = set()

    def score(self, predictors: Mapping[str, Predictor], examples: Examples) -> dict[str, Statistics]:
        """The statistics of each predictor over samples on the device."""
        return evaluate(predictors, examples, self._task, self._batch_size, self._pieces)

    def score_together(
        self,
        predictors: Mapping[int, Mapping[str, Predictor]],
        splits: Sequence[str],
        samples: Callable[[int], Mapping[str, Examples]],
    ) -> dict[int, SplitScores]:
        """The statistics, by client, split and name, of what can be scored in stacks of clients; the rest is left out.

        An error leaves out a whole split: scored alone, the client that it is the fault of raises it again.

        Args:
            predictors: by client and name.
            splits: on which to score them.
            samples: a client's splits, on the device.
        """
        found: dict[int, SplitScores] = {client: {} for client in predictors}
        for split in splits:
            asked = [ScoringRequest(own, samples(client)[split]) for client, own in predictors.items()]
            for client, statistics in zip(predictors, self._stacked(asked), strict=True):
                found[client][split] = statistics
        return found

    def score_rest(
        self,
        predictors: Mapping[str, Predictor],
        splits: Sequence[str],
        samples: Mapping[str, Examples],
        scored: SplitScores,
    ) -> SplitScores:
        """The statistics of one client by split and name: what was scored already, and the rest scored alone."""
        found: SplitScores = {}
        for split in splits:
            known = scored.get(split, {})
            rest = {name: predictor for name, predictor in predictors.items() if name not in known}
            made = {**known, **(self.score(rest, samples[split]) if rest else {})}
            found[split] = {name: made[name] for name in predictors}
        return found

    def _stacked(self, asked: Sequence[ScoringRequest]) -> list[dict[str, Statistics]]:
        found: list[dict[str, Statistics]] = []
        try:
            self._clients.over(len(asked), lambda here: found.extend(self._together(asked[here])))
        except Exception as error:
            check_context(self._device, error)
            reason = (text_of(error).splitlines() or [type(error).__name__])[0]
            if reason not in self._said:
                self._said.add(reason)
                _log.warning("%d clients are scored one by one: %s", len(asked), reason)
            return [{} for _ in asked]
        return found

    def _together(self, asked: Sequence[ScoringRequest]) -> list[dict[str, Statistics]]:
        return evaluate_together(asked, self._task, self._batch_size, self._rows)

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
