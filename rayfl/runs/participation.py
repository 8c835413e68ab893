"""Who took part in the rounds of a run: what was recorded, or exactly, by drawing the cohorts again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rayfl.config.beginning import InitConfig, branch_of
from rayfl.engine.updates.cohorts import cohort_of
from rayfl.messages.privacy import PrivacyConfig
from rayfl.randomness import RandomStreams
from rayfl.runs.loading import Run
from rayfl.runs.rows import attendance


def left_out(skipped: pa.Table) -> pa.Table:
    """Returns the rows of ``skipped.parquet`` of clients that had no part in a round; others were not evaluated."""
    return skipped.filter(pc.not_equal(skipped["procedure"], "predictors"))


def recorded_cohorts(content: Mapping[str, Any]) -> bool:
    """Returns whether the cohorts of a run, given its configuration, depend on more than the seed."""
    plain = {"selection": "uniform", "system": "none", "stages": "none"}
    return any(content.get(section, {}).get("name", usual) != usual for section, usual in plain.items())


def begun_after(run: Run) -> int | None:
    """Returns after which round a run has begun: a fork has the rounds before from another run; None if not known."""
    init = run.content.get("init", {})
    if init.get("what") == "commit":
        return int(init["round"])
    return next((int(entry.get("rounds_completed", 0)) for entry in run.environment), None)


def participants(run: Run) -> pa.Table | None:
    """Returns who took part in each completed round: round and client, ascending; None where that is not known exactly.

    Where cohorts depend on more than the seed (``selection``, simulated devices), they were recorded. Others are drawn
    again, without the clients that failed and were left out; ``clients.parquet`` has only those with samples that were
    scored. It is not known of a fork whose earlier rounds are not on record, as they may have had other cohorts; of
    older runs on simulated devices; of runs that do not record how many clients they have, or have lost rows of a table
    that tells.
    """
    count, wanted = run.num_clients, run.content["train"].get("clients_per_round")
    lost = {"skipped", "cohorts"} & {*run.damage["lost"].to_pylist()}
    begun = begun_after(run)
    if count is None or wanted is None or begun is None or lost:
        return None
    if recorded_cohorts(run.content):
        rows = run.cohorts.select(["round", "client"]).to_pylist()
        found = [(row["round"], row["client"]) for row in rows]
        if not set(range(1, begun + 1)) <= {round for round, _ in found}:
            return None
    elif begun:
        return None
    else:
        found = _drawn_again(run, count)
    seen = attendance(run.clients).select(["round", "client"]).to_pylist()
    if not {(row["round"], row["client"]) for row in seen} <= set(found):
        return None
    rounds, clients = zip(*found, strict=True) if found else ((), ())
    return pa.table({"round": pa.array(rounds, pa.int32()), "client": pa.array(clients, pa.int32())})


def _drawn_again(run: Run, clients: int) -> list[tuple[int, int]]:
    """Returns the rounds and their clients, without those that were left out, of a run of that many clients."""
    absent = {(row["round"], row["client"]) for row in left_out(run.skipped).select(["round", "client"]).to_pylist()}
    train, privacy = run.content["train"], PrivacyConfig.model_validate(run.content.get("privacy", {}))
    streams = RandomStreams(run.seed, branch=branch_of(InitConfig.model_validate(run.content.get("init", {})), privacy))
    options = (train["clients_per_round"], train.get("min_clients_per_round"), train.get("sampling", "fixed"))
    return [
        (round + 1, client)
        for round in range(run.rounds_completed)
        for client in cohort_of(streams, round, clients, *options)
        if (round + 1, client) not in absent
    ]
