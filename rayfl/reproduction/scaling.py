"""How a run of a paper's table is scaled down: fewer rounds, epochs and clients, with everything that depends on them.

The quick form of a run with T rounds, K clients and E local epochs has

- T / 5 rounds, at least 30 and at most 100, never more than T;
- one local epoch; other passes of a method (fine-tuning, heads, personal models) shrink like it, but do not vanish;
- at most 50 clients where they come with the data (writers, roles); where rayfl divides the data, all K remain, since
  fewer would each have more samples;
- a tenth of the clients in a round, at least 5, so that in few rounds nearly all have been there; methods in which all
  take part keep that.

What counts rounds inside a method keeps its share of the run (FLOCO's assignment, FedMe's clusterings). SuPerFed's
start is a share already, but at most 0.4, the value of the paper's text: later, too few clients would come to train a
local model before the end. The learning rate falls as far in the fewer rounds, and all clients are scored five times.
Model, data, learning rate, batch size and the weights of penalties stay as they are, and so does what a table's rows
differ in (starts, local epochs).
"""

from __future__ import annotations

import math
from typing import Any, Literal

from rayfl.config.schema import ExperimentConfig
from rayfl.data.partitions.base import NaturalPartition

Scale = Literal["quick", "paper"]

_ROUNDS = (30, 100)
_ROUNDS_SHARE, _COHORT_SHARE = 5, 10
_NATURAL_CLIENTS = 50
_COHORT = 5
_EVALUATIONS = 5
_LATEST_START = 0.4
_ROUND_FIELDS = ("assignment_round", "cluster_rounds")
_EPOCHS = "_epochs"


def scaled(config: ExperimentConfig, scale: Scale, rounds: int | None = None) -> dict[str, Any]:
    """Returns what changes a run of the paper's size into one of another, as overrides by dotted path.

    Args:
        config: the run as in the paper.
        scale: ``paper`` changes nothing but what follows from ``rounds``.
        rounds: T of the scaled run; None: as the scale has it.

    Returns:
        Overrides for ``rayfl.config.loading.load_config``; empty where nothing changes.
    """
    changes = _of_rounds(config, rounds or scaled_rounds(config.train.rounds, scale))
    return changes if scale == "paper" else {**changes, **_of_clients(config), **_of_epochs(config)}


def scaled_rounds(rounds: int, scale: Scale) -> int:
    """T of a scaled run, from the paper's."""
    if scale == "paper":
        return rounds
    least, most = _ROUNDS
    return min(rounds, max(least, min(most, rounds // _ROUNDS_SHARE)))


def scaled_window(window: tuple[int, int], paper_rounds: int, rounds: int) -> tuple[int, int]:
    """Returns the first and last round of a run that stand where a paper's rounds stand in its own run.

    Args:
        window: the first and last of the paper's completed rounds, of which it prints the mean.
        paper_rounds: T of the paper.
        rounds: T of the run.
    """
    first = math.floor((window[0] - 1) * rounds / paper_rounds) + 1
    return first, max(first, math.floor(window[1] * rounds / paper_rounds))


def _of_rounds(config: ExperimentConfig, rounds: int) -> dict[str, Any]:
    before = config.train.rounds
    if rounds == before:
        return {}
    changes: dict[str, Any] = {"train.rounds": rounds, "evaluation.every": max(1, rounds // _EVALUATIONS)}
    if config.train.lr_decay != 1:
        changes["train.lr_decay"] = round(config.train.lr_decay ** (before / rounds), 6)
    if config.train.schedule is not None:
        changes["train.schedule"] = config.train.schedule.stretched(before, rounds).model_dump(mode="json")
    if config.evaluation.cohort_every > 1:
        changes["evaluation.cohort_every"] = changes["evaluation.every"]
    for name in _ROUND_FIELDS:
        value = getattr(config.algorithm, name, None)
        if isinstance(value, int):
            changes[f"algorithm.{name}"] = value * rounds // before
        elif value:
            changes[f"algorithm.{name}"] = [one * rounds // before for one in value]
    return changes


def _of_epochs(config: ExperimentConfig) -> dict[str, Any]:
    epochs = config.train.local_epochs
    changes: dict[str, Any] = {"train.local_epochs": 1}
    for name in type(config.algorithm).model_fields:
        value = getattr(config.algorithm, name)
        if name.endswith(_EPOCHS) and isinstance(value, int) and value > 0:
            changes[f"algorithm.{name}"] = max(1, round(value / epochs))
    start = getattr(config.algorithm, "start", 0.0)
    if isinstance(start, float) and start > _LATEST_START:
        changes["algorithm.start"] = _LATEST_START
    return changes


def _of_clients(config: ExperimentConfig) -> dict[str, Any]:
    partition, changes = config.partition, dict[str, Any]()
    clients = getattr(partition, "num_clients", None)
    if isinstance(partition, NaturalPartition):
        clients = min(clients or _NATURAL_CLIENTS, _NATURAL_CLIENTS)
        changes["partition.num_clients"] = clients
    if config.train.clients_per_round != "all" and clients is not None:
        changes["train.clients_per_round"] = min(clients, max(_COHORT, math.ceil(clients / _COHORT_SHARE)))
    return changes
