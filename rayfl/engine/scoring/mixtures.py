"""Models interpolated between two others, computed when they are needed."""

from __future__ import annotations

from dataclasses import dataclass

from rayfl.params import interpolate
from rayfl.tasks.base import Model, Task


@dataclass(frozen=True, eq=False, slots=True)
class Mixture:
    """The model ``(1 - coefficient) start + coefficient end``, exact at 0 and at 1, with the buffers of the start.

    Calling it computes the model. Stacked evaluation reads its attributes instead, to compute and score the points of
    many clients' sweeps together (:mod:`rayfl.engine.scoring.evaluation_together`).

    Attributes:
        start: a model.
        end: a model of the same network.
        coefficient: position on the line, 0 at the start and 1 at the end.
        task: tells parameters from buffers.
    """

    start: Model
    end: Model
    coefficient: float
    task: Task

    def __call__(self) -> Model:
        names = self.task.network.parameter_names
        start, end = ({name: model[name] for name in names} for model in (self.start, self.end))
        return {**self.start, **interpolate(start, end, self.coefficient)}
