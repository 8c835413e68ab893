"""How long Ray lets a job that is stopped finish."""

from __future__ import annotations

import math

from rayfl.config.cluster_section import ClusterConfig

_MARGIN_S = 60
"""Seconds for a job's last commit, after SIGTERM and the round's grace."""


def stop_wait_s(cluster: ClusterConfig) -> int:
    """Returns the seconds between SIGTERM and SIGKILL that a run needs, for ``RAY_JOB_STOP_WAIT_TIME_S``."""
    return math.ceil(cluster.stop_grace_s) + _MARGIN_S
