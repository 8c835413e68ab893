"""Tasks whose evaluation compares a client's samples with those that it trains on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from rayfl.examples import Examples
from rayfl.tasks.base import Model, NetworkTask
from rayfl.tasks.predictor import Predictor

Pass = tuple[Callable[[Tensor], Tensor], int]
"""Makes rows of samples of these numbers, int64 of shape (b,), in evaluation mode; and how many samples there are."""


class TaskBesideTraining(NetworkTask):
    """A task whose samples are scored beside the client's training samples.

    An evaluation runs the passes of :meth:`passes` in batches, and hands their rows to :meth:`assessed`.
    """

    @abstractmethod
    def passes(
        self, predictor: Predictor, models: Sequence[Model], examples: Examples, training: Examples
    ) -> Sequence[Pass]:
        """Returns what an evaluation computes of single samples.

        Args:
            predictor: what is scored.
            models: its models, built.
            examples: the samples.
            training: the client's training samples.

        Raises:
            MethodError: the predictor cannot be scored in this task.
        """

    @abstractmethod
    def assessed(self, rows: Sequence[Tensor], examples: Examples, training: Examples, own: bool) -> Tensor:
        """Returns the sums of the measures, float64 of shape (``size``,).

        Args:
            rows: what each of the passes made of all of its samples, at least one of ``examples``.
            examples: the samples.
            training: the client's training samples.
            own: whether the samples are the training samples.
        """
