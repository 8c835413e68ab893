"""Who took part in the rounds of a run: what was recorded, or exactly, by drawing the cohorts again."""

from __future__ import annotations

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


def participants(run: Run) -> pa.Table | None:
    """Returns who took part in each completed round: round and client, ascending; None where that is not known exactly.

    The cohorts are drawn again, without the clients that failed and were left out; ``clients.parquet`` has only those
    with samples that were scored. It is not known of simulated devices, where who is asked depends on the virtual
    clock; of a fork, whose earlier rounds may have had cohorts of another size; of runs that do not record how many
    clients they have, or have lost rows of the table of those that were left out.
    """
    count, wanted = run.num_clients, run.content["train"].get("clients_per_round")
    simulated = run.content.get("system", {}).get("name", "none") != "none"
    begun = [int(entry.get("rounds_completed", 0)) for entry in run.environment[:1]]
    if count is None or wanted is None or simulated or begun != [0] or "skipped" in run.damage["lost"].to_pylist():
        return None
    absent = {(row["round"], row["client"]) for row in left_out(run.skipped).select(["round", "client"]).to_pylist()}
    train, privacy = run.content["train"], PrivacyConfig.model_validate(run.content.get("privacy", {}))
    streams = RandomStreams(run.seed, branch=branch_of(InitConfig.model_validate(run.content.get("init", {})), privacy))
    options = (wanted, train.get("min_clients_per_round"), train.get("sampling", "fixed"))
    found = [
        (round + 1, client)
        for round in range(run.rounds_completed)
        for client in cohort_of(streams, round, count, *options)
        if (round + 1, client) not in absent
    ]
    seen = attendance(run.clients).select(["round", "client"]).to_pylist()
    if not {(row["round"], row["client"]) for row in seen} <= set(found):
        return None
    rounds, clients = zip(*found, strict=True) if found else ((), ())
    return pa.table({"round": pa.array(rounds, pa.int32()), "client": pa.array(clients, pa.int32())})
