"""The jobs of a SLURM array: one for each seed, or one for each experiment of a sweep."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rayfl.errors import ConfigError
from rayfl.sweeps.space import parse_space

_MOST = 1000
"""Maximum number of jobs of an array: SLURM's MaxArraySize is 1001 by default."""


def split_sweep(run: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Splits the words of a sweep into common ones and those of each experiment.

    Args:
        run: a preset or file, and overrides as after ``rayfl sweep``.

    Returns:
        The words that all experiments have, and a list of overrides for each experiment, the first varying slowest.

    Raises:
        ConfigError: for values that are drawn at random, and for fewer than two experiments or too many.
    """
    space = parse_space(run[1:])
    if space.random:
        raise ConfigError(f"--sweep: {space.random[0]} is drawn at random, but the jobs of an array have given values")
    points = space.points(None, 0)
    if not 2 <= len(points) <= _MOST:
        raise ConfigError(f"--sweep: an array has 2 to {_MOST} jobs, and these are {len(points)} experiments")
    plain = [word for word in run[1:] if word.partition("=")[0] not in space.varied]
    varied = [[f"{path}={_text(point[path])}" for path in space.varied] for point in points]
    return [*run[:1], *plain], varied


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
