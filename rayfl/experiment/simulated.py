"""Who takes part in the rounds of an experiment on simulated devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayfl.config.schema import ExperimentConfig
from rayfl.engine.round_context import RoundContext
from rayfl.randomness import RandomStreams
from rayfl.system.buffered import BufferedSchedule
from rayfl.system.config import NoSystem
from rayfl.system.devices import Device
from rayfl.system.schedule import Schedule


def schedule_of(
    config: ExperimentConfig,
    devices: Sequence[Device],
    labelled: np.ndarray,
    unlabelled: np.ndarray,
    context: RoundContext,
) -> Schedule | None:
    """Returns who takes part in which round; None without a simulated system, where all that are sampled do.

    Args:
        config: the experiment.
        devices: of the clients that may train.
        labelled: training samples by client, int64 of shape (K,), those that may train first.
        unlabelled: training samples without labels, likewise.
        context: of round 0.
    """
    system = config.system
    if isinstance(system, NoSystem):
        return None
    counts = zip(labelled[: context.num_clients].tolist(), unlabelled.tolist(), strict=False)
    samples = [config.algorithm.samples_in_steps(config.train, known, others) for known, others in counts]
    kind = BufferedSchedule if system.mode == "buffered" else Schedule
    return kind(system, devices, samples, context.cohort_size, RandomStreams(config.seed))
