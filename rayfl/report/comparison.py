"""Methods side by side: a line per method and model, mean, spread over clients and over seeds, the best marked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rayfl.errors import ConfigError, RunError
from rayfl.naming.spelling import nearest
from rayfl.report.columns import Metric, metrics_for
from rayfl.report.definitions import told_apart
from rayfl.report.grouping import Group, check_same_data, group_runs
from rayfl.report.lines import DEFAULT, Line, Wanted, lines_of, undefined, with_best
from rayfl.report.rows import (
    RowKey,
    drawn_clients,
    final_by_key,
    lacking,
    scored_clients,
)
from rayfl.report.significance import PairTest, left_out, over_clients, over_seeds
from rayfl.results.personalized import FINETUNED_ROW
from rayfl.runs.loading import Run
from rayfl.runs.measured import Measured, Phase
from rayfl.runs.rows import PERSONALIZED


@dataclass(frozen=True)
class Comparison:
    """Several runs, compared.

    Attributes:
        groups: runs by configuration, without those that were never evaluated.
        lines: of the table.
        clients: tests over clients, finished groups only.
        seeds: tests over seeds, finished groups only.
        notes: what a reader should know, a sentence each.
        wanted: what is compared; its metrics are the columns.
        chosen: whether the columns were chosen, or are the task's.
    """

    groups: Sequence[Group]
    lines: Sequence[Line]
    clients: Sequence[PairTest]
    seeds: Sequence[PairTest]
    notes: Sequence[str]
    wanted: Wanted
    chosen: bool = False

    @property
    def tested(self) -> Metric:
        """Returns the metric that is tested."""
        return self.wanted.metrics[0]

    @property
    def measured(self) -> Measured:
        """Returns which evaluations the numbers are of."""
        return self.groups[0].runs[0].measured


def compare(runs: Sequence[Run], wanted: Wanted = DEFAULT) -> Comparison:
    """Compares runs.

    Raises:
        RunError: they were made on different data, two are the same experiment, or none was evaluated yet.
        ConfigError: no run has a row that was asked for.
    """
    check_same_data(runs)
    runs = [run.viewed(chosen=wanted.models[0] if _one_row(wanted) else "") for run in runs]
    evaluated = [run for run in runs if final_by_key(run)]
    notes = _gathered(
        (
            run,
            f"left out, {_who(run.measured)} were never evaluated on {run.measured.split} data{run.measured.when} "
            f"({run.rounds_completed} of {run.total_rounds} rounds are done){_at_another_moment(run)}",
        )
        for run in runs
        if not final_by_key(run)
    )
    if not evaluated:
        raise RunError(f"there is nothing to compare yet: {'; '.join(notes)}")
    notes += _gathered(
        (
            run,
            f"unfinished, {run.rounds_completed} of {run.total_rounds} rounds are done: shown after its last "
            "evaluation, but in no test, joined with no other seed, and never the best",
        )
        for run in evaluated
        if not run.finished
    )
    ends = [(run, next(iter(final_by_key(run).values()))["round"]) for run in evaluated if run.finished]
    if len({end for _, end in ends}) > 1:
        notes += _gathered(
            (run, f"its numbers are after round {end}, those of others after another") for run, end in ends
        )
    notes += _gathered((run, f"in no test and in no curve, {why}") for run in evaluated if (why := lacking(run)))
    notes += _gathered(
        (
            run,
            f"its clients fine-tuned the final model, but tests and curves are of its row {run.own.label!r}: "
            f"--model {FINETUNED_ROW} compares the fine-tuned models",
        )
        for run in evaluated
        if RowKey(FINETUNED_ROW, "") in final_by_key(run) and not run.chosen and run.own.model != FINETUNED_ROW
    )
    notes += _gathered((run, note) for run in runs for note in run.notes)
    chosen = bool(wanted.metrics)
    metrics, apart = told_apart(evaluated, wanted.metrics if chosen else metrics_for(evaluated))
    wanted, notes = replace(wanted, metrics=metrics), notes + apart
    groups = group_runs(evaluated)
    finished = [group for group in groups if group.finished]
    tested = wanted.metrics[0]
    clients = over_clients(finished, tested.column) if tested.by_client and tested.comparable else []
    others = _on_other_clients(evaluated)
    seeds = over_seeds(finished, tested.column) if tested.comparable and not others else []
    lines = [line for group in groups for line in lines_of(group, wanted)]
    lines = lines if others else with_best(lines, wanted.metrics)
    if not lines:
        raise RunError(f"there is nothing to compare: {'; '.join(notes)}")
    notes += others + _partners(finished, clients or seeds, tested)
    notes += [*left_out(clients, "clients"), *left_out(seeds, "seeds")]
    notes += undefined(lines, wanted.metrics)
    if any(metric.chosen for metric in wanted.metrics):
        notes.append(
            f"* best round: the best of all evaluations, chosen by the {runs[0].measured.split} data that the number "
            "is of, as some papers print it: not a fair estimate"
        )
        notes += _gathered(
            (
                run,
                f"no best round, evaluations before the last round are of {size} drawn clients, other ones each time "
                "(evaluation.clients): the best of them is that of the luckiest clients",
            )
            for run in evaluated
            if (size := drawn_clients(run)) is not None
        )
        counts = [len(run.rounds.filter(run.measured.rows)["round"].unique()) for run in evaluated]
        notes += _gathered(
            (run, f"its best round is of {count} evaluations, that of others of more or fewer: more have a better best")
            for run, count in zip(evaluated, counts, strict=True)
            if len(set(counts)) > 1
        )
    if any(line.key.selected_on.startswith("validation") for line in lines) and runs[0].measured.split == "validation":
        notes.append("rows that were chosen on validation data are shown on the same data: these numbers flatter them")
    return Comparison(groups, lines, clients, seeds, notes, wanted, chosen)


def _on_other_clients(runs: Sequence[Run]) -> list[str]:
    """Returns a note on finished runs whose means are over other clients than those of others on the same samples.

    Malicious clients are in no score (``attack``), and clients that failed are in none (``clients.on_error``).
    """
    scored: dict[tuple[str, int], dict[Run, frozenset[int]]] = {}
    for run in runs:
        if run.finished and run.partition_hash and run.measured.cohort != "selected":
            scored.setdefault((run.partition_hash, run.seed), {})[run] = scored_clients(run)
    return _gathered(
        (
            run,
            f"its means are over {len(clients)} clients, and those of others on the same samples are not over the same "
            "ones (attack, clients.on_error): no number is the best, and seeds are not tested; tests over clients are "
            "of those that two runs share",
        )
        for found in scored.values()
        if len(set(found.values())) > 1
        for run, clients in found.items()
    )


def check_models(runs: Sequence[Run], models: Sequence[str]) -> None:
    """Raises ConfigError for a row that no run has, naming those that there are."""
    found = dict.fromkeys(key.model for run in runs for key in final_by_key(run))
    known = list({PERSONALIZED: None} | found)
    for name in models:
        if found and name not in known:
            raise ConfigError(
                f"--model {name}: no run has such a row{nearest(name, known)}; there are {', '.join(known)}"
            )


def _one_row(wanted: Wanted) -> bool:
    return len(wanted.models) == 1 and wanted.models[0] != PERSONALIZED


def _gathered(notes: Iterable[tuple[Run, str]]) -> list[str]:
    """Returns notes with the runs that they are about; equal notes are one."""
    runs: dict[str, dict[str, None]] = {}
    for run, note in notes:
        runs.setdefault(note, {})[run.uri] = None
    return [f"{', '.join(uris)}: {note}" for note, uris in runs.items()]


def _who(measured: Measured) -> str:
    return {"all": "its clients", "selected": "its cohorts", "unseen": "its held-out clients"}[measured.cohort]


def _at_another_moment(run: Run) -> str:
    """Returns which other phase the run has been evaluated in, if it has."""
    other: Phase = "trained" if run.measured.phase == "received" else "received"
    measured = replace(run.measured, phase=other)
    return f"; --phase {other} has such evaluations" if final_by_key(run.viewed(measured=measured)) else ""


def _partners(groups: Sequence[Group], tests: Sequence[PairTest], tested: Metric) -> list[str]:
    paired = {label for test in tests for label in (test.first, test.second)}
    # What lacks the row itself is told apart.
    lonely = [group.label for group in groups if group.label not in paired and not any(map(lacking, group.runs))]
    if len(groups) < 2 or not lonely or not tested.alike:
        return []
    if tested.chosen:
        return ["no test: best rounds are not tested"]
    why = "no other method was run with the same seed on the same clients"
    if not tested.by_client:
        why = f"{tested.column} is one number of a run, and its test needs two seeds or more that another method has"
    return [f"no test with {', '.join(lonely)}: {why}"]
