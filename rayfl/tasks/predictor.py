"""Models worth a row in the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Model = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Predictor:
    """A model worth a row in the results; several models predict by their mean (in classification: probability).

    A model may be given as a function that makes it, called when it is scored: a sweep over many models of one
    client then never holds them all at once. What such a function makes is one scoring's own, so that ``combine`` may
    keep in it what the samples before, which come in their order, say for those after.

    Attributes:
        models: the models, or functions that return them.
        combine: None, or ``(models, x, task) -> predictions`` as the task makes them (log-probabilities of shape (b, C)
            in classification) for another prediction than the mean. Called without gradients; networks have to be run
            with ``training=False``.
        task: the models' task; None for the experiment's task (its first candidate).
        reads_asked: whether ``combine`` has a fourth argument: at which positions of a text a token is predicted, bool
            of shape (b, T), so that it can tell a prompt from its response; None where a sample is no text.
    """

    models: tuple[Model | Callable[[], Model], ...]
    combine: Callable[..., Tensor] | None = None
    task: Any = None
    reads_asked: bool = False

    @classmethod
    def of(
        cls,
        *models: Model | Callable[[], Model],
        combine: Callable[..., Tensor] | None = None,
        task: Any = None,
        reads_asked: bool = False,
    ) -> Predictor:
        """A predictor from one model or several."""
        return cls(models, combine, task, reads_asked)

    def built(self) -> list[Model]:
        """Returns the models, after calling those given as functions."""
        return [model() if callable(model) else model for model in self.models]

    def predictions(self, models: Sequence[Model], x: Tensor, task: Any, asked: Tensor | None = None) -> Tensor:
        """Returns what the built models predict, as the task's ``measures`` score it.

        Args:
            models: the result of :meth:`built`.
            x: inputs, shape (b, *input shape).
            task: stands in for :attr:`task` where that is None.
            asked: of texts, where a token is predicted; see :attr:`reads_asked`.
        """
        task = self.task or task
        if self.combine is not None:
            found = self.combine(models, x, task, asked) if self.reads_asked else self.combine(models, x, task)
            return task.score_of(found, x)  # type: ignore[no-any-return]
        predicted: Tensor = task.predictions(models, x)
        return predicted
