"""Models that are points on a line between two others, made when they are needed."""

from __future__ import annotations

from dataclasses import dataclass

from rayfl.engine.tasks import Model, Task
from rayfl.params import interpolate


@dataclass(frozen=True, eq=False, slots=True)
class Mixture:
    """The model ``(1 - coefficient) start + coefficient end``, exact at 0 and at 1, with the buffers of the start.

    Called, it makes the model. It can also be read: the points of a sweep, of many clients, are then made and scored
    together (:mod:`rayfl.engine.evaluation_together`).

    Attributes:
        start: a model.
        end: a model of the same network.
        coefficient: where on the line.
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
