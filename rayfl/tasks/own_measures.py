"""What is wrong with a user's own measures, found out before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rayfl.errors import ConfigError, text_of
from rayfl.metrics.measures import Measures

_SETS = 2


def check_measures(measures: Measures, where: str) -> None:
    """Has measures make metrics of two sets without samples, which clients may have, too.

    Args:
        measures: a user's own.
        where: whose they are, for messages.

    Raises:
        ConfigError: ``values`` fails, lacks a metric, or returns something else than one number for each set.
    """
    place = f"{where}: {type(measures).__name__}.values"
    with np.errstate(all="ignore"):
        try:
            found = measures.values(np.zeros((_SETS, measures.size)))
        except Exception as error:  # user code may raise anything
            raise ConfigError(
                f"{place} fails for sums that are 0, in an array of NumPy (a client without samples has such): "
                f"{type(error).__name__}: {text_of(error)}"
            ) from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{place} must return the metrics by name, got {type(found).__name__}")
    for metric in measures.metrics:
        if metric.name not in found:
            raise ConfigError(f"{place} lacks the metric {metric.name!r} of metrics")
        value = found[metric.name]
        if not isinstance(value, np.ndarray) or value.shape != (_SETS,) or value.dtype.kind not in "fiub":
            what = f"shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
            raise ConfigError(
                f"{place}: {metric.name!r} of sums of shape ({_SETS}, {measures.size}) must be an array of numbers of "
                f"shape ({_SETS},), got {what}"
            )
