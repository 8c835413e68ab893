"""What figures that evaluate models share: which samples, and losses at many points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from rayfl.engine.scoring.evaluation import evaluate
from rayfl.errors import ConfigError
from rayfl.examples import Examples
from rayfl.runs.committed import CommittedModels
from rayfl.runs.folder import RunFolder
from rayfl.tasks.base import Model, Predictor, Task

SAMPLES = 2000
"""How many samples a figure uses unless told otherwise."""


def losses(
    models: CommittedModels, task: Task, model_at: Callable[[np.ndarray], Model], points: np.ndarray, examples: Examples
) -> np.ndarray:
    """The mean loss of a model at each of many points, by the evaluation of the run.

    Args:
        models: say how many samples a forward pass has.
        task: of the models.
        model_at: the model at a point, made when it is needed.
        points: shape (p, ...).
        examples: samples.

    Returns:
        Shape (p,).
    """
    size = models.run.config.evaluation.batch_size
    found = [evaluate({"": Predictor.of(model_at(point))}, examples, task, size)[""].loss for point in points]
    return np.array(found)


def need_whole_models(runs: Sequence[RunFolder], kind: str) -> None:
    """Raises ConfigError for a run whose server has no model that could predict."""
    for run in runs:
        if (policy := run.config.train.private_norm) != "none":
            raise ConfigError(
                f"{run.uri}: with train.private_norm={policy} each client has normalization layers of its own, so that "
                f"there is no one model for all samples that {kind} could draw"
            )


def check_counts(points: int, fewest: int, samples: int) -> None:
    """Raises ConfigError for too few points or samples."""
    if points < fewest:
        raise ConfigError(f"--points: {points} is too few for a surface, take {fewest} or more")
    check_samples(samples)


def check_samples(samples: int) -> None:
    """Raises ConfigError for no samples."""
    if samples < 1:
        raise ConfigError(f"--samples: at least one is needed, not {samples}")


def check_number(clients: Iterable[int], wanted: int, why: str) -> None:
    """Raises ConfigError unless the right number of different clients is named."""
    if len(set(clients)) != wanted:
        raise ConfigError(f"--clients: name {wanted} different clients, {why}")
