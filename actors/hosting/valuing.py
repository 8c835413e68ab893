"""Values the clients of a round on a host: models of coalitions of them, evaluated on the server's samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import torch

from actors.hosting.equipment import Equipment
from actors.hosting.job import Job
from actors.hosting.outcomes import client_error
from rayfl.diagnosis.device_errors import ran_out_of_memory
from rayfl.errors import as_error
from rayfl.examples import Examples
from rayfl.params import Tree, weighted_sum
from rayfl.valuation.game import Utility
from rayfl.valuation.section import Measured

GLOBAL = "global"
"""The model of the server that is evaluated."""


class AbandonedError(Exception):
    """The job was given up before its end."""


def value_clients(own: Equipment, job: Job, given: Tree, abandoned: Callable[[], bool]) -> Tree:
    """Returns what :class:`rayfl.valuation.game.Valued` has, as a tree.

    Args:
        own: of the host; its context has the section ``contribution``.
        job: names the round.
        given: on the device: ``messages``, the model of each client by its id; ``weights`` of these in the mean;
            ``before`` and ``after``, the server's model before and after the round; ``server``, what else of its tree
            evaluations are sent.
        abandoned: whether nobody waits for the result any more.

    Raises:
        AbandonedError: nobody does.
        ClientError: a model cannot be evaluated.
    """
    section, task, context = own.context.contribution, own.engine.task, own.context
    assert isinstance(section, Measured)
    messages = [given["messages"][key] for key in sorted(given["messages"], key=int)]
    weights = [float(given["weights"][key]) for key in sorted(given["weights"], key=int)]
    metric = next(one for one in task.measures.metrics if section.metric in (None, one.name))

    def model_of(members: tuple[int, ...]) -> Tree:
        if not members:
            return given["before"]  # type: ignore[no-any-return]
        if len(members) == len(messages):
            return given["after"]  # type: ignore[no-any-return]
        whole = sum(weights[member] for member in members)
        chosen = [messages[member] for member in members]
        return weighted_sum(chosen, [weights[member] / whole for member in members])

    def worth(members: tuple[int, ...]) -> float:
        if abandoned():
            raise AbandonedError
        predictors = own.algorithm.global_predictors({**given["server"], "model": model_of(members)}, task)
        scores = own.scorer.score({GLOBAL: predictors[GLOBAL]}, samples, "validation")
        return metric.sign * scores[GLOBAL].metrics()[metric.name]

    own.running.turn_to("valuing the clients of the round")
    try:
        with torch.no_grad():
            samples = _samples(own, section)
            utility = Utility(worth, len(messages))
            found = section.valued(utility, context.streams.generator("contribution", job.round))
    except AbandonedError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) and ran_out_of_memory(error):
            raise
        raise client_error(as_error(error), "the valuation of the clients", job, own.algorithm) from error
    return {**asdict(found), "values": torch.from_numpy(found.values)}


def _samples(own: Equipment, section: Measured) -> Examples:
    if section.samples == "public":
        return own.samples.labelled_public()
    sizes, context = own.samples.sizes(["validation"]), own.context
    honest = [k for k in range(context.num_clients) if sizes[k] and k not in context.attackers]
    return own.samples.pooled(honest, "validation")
