"""Who learns from which labels: what a run with unlabelled samples cannot have, and what it says of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from rayfl.errors import ConfigError

if TYPE_CHECKING:
    from rayfl.experiment.parts import Parts

_log = logging.getLogger("rayfl")


def check_labels(parts: Parts) -> None:
    """Refuses methods that cannot learn from the labels there are, and says which samples they learn from.

    Args:
        parts: data set and method.

    Raises:
        ConfigError: naming the option and the fix.
    """
    labelled, algorithm = parts.config.labelled, parts.config.algorithm
    if labelled.at == "server" and not algorithm.learns_without_labels:
        raise ConfigError(
            f"labelled.at is server, so that clients have no labels, but {algorithm.name} needs some there: set "
            "labelled.at=clients, or choose a method whose server has them, such as semifl"
        )
    known = parts.dataset.sizes()[: parts.num_clients, 0]
    hidden = parts.dataset.unlabelled_sizes()[: parts.num_clients]
    if not hidden.any():
        if algorithm.learns_unlabelled:
            _log.warning(
                "algorithm: %s learns from samples without labels, and there are none: set labelled.share, for "
                "instance to 0.1",
                algorithm.name,
            )
        return
    total, count = int(known.sum() + hidden.sum()), int(known.sum())
    if algorithm.learns_unlabelled:
        _log.info("labelled: %d of %d training samples keep their labels", count, total)
    else:
        _log.warning(
            "labelled: %s trains on the %d of %d training samples that keep their labels, and not on the others",
            algorithm.name, count, total,
        )  # fmt: skip
    raised = np.flatnonzero((known + hidden) * labelled.share < 1 - 1e-9)
    if labelled.at == "clients" and labelled.per_class is None and len(raised):
        _log.warning(
            "labelled: share %g is less than one sample of %d of %d clients, which keep the label of one",
            labelled.share, len(raised), len(known),
        )  # fmt: skip
