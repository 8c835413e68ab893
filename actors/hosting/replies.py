"""Turns the outcome of a client's procedure into a result: checks, scores and converts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from actors.hosting.contract import check_predictors, check_sendable
from actors.hosting.equipment import Equipment
from actors.hosting.job import ClientResult, Job
from actors.hosting.scoring import SplitScores
from rayfl.aggregation.contributions import Inspected, Weighted, too_large
from rayfl.aggregation.magnitudes import Extremes, check_finite
from rayfl.data.sources.official import OFFICIAL_PIECE
from rayfl.engine.client import Client
from rayfl.errors import MethodError
from rayfl.metrics import Statistics
from rayfl.params import num_bytes, to_numpy
from rayfl.tasks.base import Predictor


def found_of(
    own: Equipment, job: Job, client: Client, outcome: Any, update: Any, scored: SplitScores, known: Extremes
) -> ClientResult:
    """Returns one client's checked result.

    Args:
        own: the host's equipment.
        job: job that was run.
        client: client that ran it.
        outcome: result of its procedure, or the exception that it raised.
        update: the client's part of the sums over updates, the error of computing it, or None.
        scored: scores of its predictors that are already known.
        known: known extremes of tensors, which need not be inspected again.

    Raises:
        Exception: the error of this client.
    """
    result, scorer, samples = ClientResult(), own.scorer, own.samples
    if isinstance(outcome, Exception):
        raise outcome
    if job.kind == "evaluate":
        check_predictors(outcome, job.procedure)
        if job.losses:
            result.scores = scorer.losses(outcome, own.algorithm.personalized, samples.of(client.id)["train"])
            return result
        found = scorer.score_rest(outcome, job.splits, samples.of(client.id), scored)
        if job.official:
            found["official"] = _scores_on_official(own, outcome)
        result.scores = found
        return result
    if job.kind in ("mean", "each"):
        if not isinstance(outcome, Weighted):
            raise MethodError(f"{job.procedure} must return Weighted to be averaged, got {type(outcome).__name__}")
        check_sendable(outcome.tree, job.procedure)
        if client.id in job.repeats:
            outcome = replace(outcome, weight=outcome.weight * job.repeats[client.id])
        contribution = Inspected.of(outcome, known)
        result.within = bool(outcome.within)  # of None, too
        if job.kind == "mean":
            result.contribution, result.group = contribution, outcome.group
        else:
            result.value = {"tree": to_numpy(outcome.tree), "weight": outcome.weight}
        if job.summands > 1 and not contribution.fits(job.summands if job.skips else 1):
            raise OverflowError(too_large(outcome))
        if job.counted:
            result.upload_bytes = num_bytes(outcome.tree) if outcome.size is None else outcome.size
    else:
        check_sendable(outcome, job.procedure)
        check_finite(outcome)
        result.value = to_numpy(outcome)
        if job.counted:
            result.upload_bytes = num_bytes(outcome)
    if isinstance(update, Exception):
        raise update
    if update is not None:
        result.update = Inspected.of(update, known)
        # The sums for the variance of updates have squared norms, which leave their range before messages do.
        if job.summands > 1 and not result.update.fits(job.summands if job.skips else 1):
            raise OverflowError(f"its update: {too_large(update)}")
    if client.published:
        check_predictors(client.published, f"{job.procedure} (client.publish)")
        result.scores = scorer.score_rest(client.published, job.splits, samples.of(client.id), scored)
    return result


def _scores_on_official(own: Equipment, predictors: Mapping[str, Predictor]) -> dict[str, Statistics]:
    """The statistics, on the whole official test part, of a client's models that are not the server's own."""
    assert own.official is not None
    mine = {name: predictor for name, predictor in predictors.items() if name != "global"}
    total = {name: Statistics.empty(own.engine.task.measures) for name in mine}
    part = own.official()
    for first in range(0, len(part), OFFICIAL_PIECE):
        piece = own.samples.official(first, partial(part.load, first, first + OFFICIAL_PIECE))
        for name, statistics in own.scorer.score(mine, piece, "official").items():
            total[name] += statistics
    return total
