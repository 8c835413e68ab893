"""Repeats one client's update of a finished round in this process, and compares it with what was committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.federation.federation import Federation
from actors.federation.hosts import Hosts
from actors.federation.single_client import NeedsOthersError, SingleClient
from actors.hosting.building import build_host
from actors.processes.pool import InlinePool
from algorithms.clients import Call, Replies
from cluster.rounds.interrupts import stop_requests
from cluster.run import inline_device, limited_threads
from rayfl.aggregation.memory import without_memory
from rayfl.aggregation.privacy import reference_of
from rayfl.engine.precision import arithmetic
from rayfl.errors import ConfigError, RayflError, RunError
from rayfl.params import Tree, leaves
from rayfl.results.schemas import metrics_of
from rayfl.results.summaries import defined
from rayfl.runs.folder import RunFolder
from rayfl.runs.inversion import Message
from rayfl.runs.participation import begun_after, left_out
from rayfl.runs.rows import where
from rayfl.storage.manifest import Manifest


@dataclass
class Replay:
    """The result of a replay.

    Attributes:
        client: id of the client.
        round: completed rounds, the replayed one included.
        whole: whether all clients of the round were repeated, or this client alone.
        compared: number of compared values, by what they belong to.
        differences: largest difference by path, where the bits differ.
        note: when the bits may differ without an error.
    """

    client: int
    round: int
    whole: bool = False
    compared: dict[str, int] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    note: str = ""

    def compare(self, what: str, found: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
        """Compares two trees to the bit."""
        mine, theirs = dict(leaves(found)), dict(leaves(recorded))
        self.compared[what] = len(theirs)
        for path in sorted({*mine, *theirs}):
            distance = _distance(mine.get(path), theirs.get(path))
            if distance is not None:
                self.differences[f"{what}/{path}"] = distance


def replay(run: RunFolder, round: int, client: int, whole: bool = False) -> Replay:
    """Repeats a client's part of a round, from the commit before.

    The client's committed state, its rows of the round in ``clients.parquet`` and, if the whole round is repeated, the
    server's tree are compared. The client is repeated alone if the round has a single call in which it takes part.
    Otherwise all clients of the round are repeated, and the server too.

    Args:
        run: the run; nothing is written to its folder.
        round: completed rounds, the one to replay included: 1 is the first.
        client: the client's number.
        whole: whether to repeat the whole round in any case.

    Raises:
        ConfigError: when there is no such round or client, or it took no part.
        RunError: when a needed commit is not kept, there is nothing to compare with, or the round is one of the run
            that a fork came from.
    """
    config, cohort = run.config, participants(run, round, client)
    before = run.manifest(round - 1) if round > 1 else None
    after = run.manifest(round)
    rows = where(run.clients, round=round, client=client, cohort="selected", phase="trained").to_pylist()
    if not rows and client not in after.states and not whole:
        raise RunError(
            f"{run.storage.uri}: client {client} has no state after round {round}, and no row of it "
            "(evaluation.cohort_every): nothing can be compared but the server's tree, with --whole-round"
        )
    splits = config.evaluation.splits if rows else ()
    threads, precision = config.cluster.threads_per_actor, config.engine.precision
    # With the handlers of a run, Ctrl-C is told apart from what a procedure raises.
    with limited_threads(threads), arithmetic(precision), stop_requests(0):
        done = None if whole else _alone(_RoundStart(run, before, round, cohort, splits), client)
        done = done or _together(_RoundStart(run, before, round, cohort, splits))
    result = Replay(client, round, done.server is not None, note=_note(done.vectorized))
    if client in after.states:
        committed = run.store.read_states(after.states[client])[client]
        result.compare("state", done.states.get(client, {}), committed)
    if rows:
        names = ["n", *(metric.name for metric in metrics_of(run.clients))]
        recorded = {f"{row['split']}/{row['model']}": {m: row[m] for m in names} for row in rows}
        scores = {
            f"{split}/{model}": {"n": statistics.n, **{m: defined(v) for m, v in statistics.metrics().items()}}
            for split, found in done.scores.get(client, {}).items()
            for model, statistics in found.items()
            if statistics.n
        }
        result.compare("rows", scores, recorded)
    if done.server is not None:
        result.compare("server", done.server, without_memory(run.store.read_server(after))[0])
    return result


def sent_message(run: RunFolder, round: int, client: int) -> Message:
    """Repeats a client's part of a round from the commit before, and returns what it received and what it sent.

    It needs no commit after the round, and none for the first one.

    Args:
        run: the run; nothing is written to its folder.
        round: completed rounds, the one to repeat included.
        client: the client's number.

    Raises:
        ConfigError: when there is no such round or client, it took no part, or what it sends is no change of a model.
        RunError: when a needed commit is not kept.
    """
    config, cohort = run.config, participants(run, round, client)
    before = run.manifest(round - 1) if round > 1 else None
    with limited_threads(config.cluster.threads_per_actor), arithmetic(config.engine.precision), stop_requests(0):
        stage = _RoundStart(run, before, round, cohort, ())
        listener = _Listening(stage.federation, client)
        with suppress(NeedsOthersError):
            stage.algorithm.round(stage.server, cohort, listener)
    if listener.message is None:
        raise ConfigError(f"invert: the clients of {config.algorithm.name} send no change of a model")
    return listener.message


class _RoundStart:
    """The server and the clients in the state before a round."""

    def __init__(
        self, run: RunFolder, before: Manifest | None, round: int, cohort: Sequence[int], splits: Sequence[str]
    ) -> None:
        config, parts = run.config, run.parts
        self.algorithm = config.algorithm
        self.cohort = cohort
        self.host = build_host(config, 0, inline_device(config.cluster.device), tell=print)
        clients, sizes = Hosts(InlinePool([self.host])), parts.check()
        self.federation = Federation(clients, parts.task, parts.context, sizes, samples_in=parts.samples_in)
        self.federation.adopt(before.states if before is not None else {})
        content = parts.initial_server() if before is None else run.store.read_server(before)
        self.server, remembered = without_memory(content)
        moved_norm = None if before is None else before.clip_norm
        recorded = where(run.cohorts, round=round).to_pylist() if parts.chosen else []
        repeats = {row["client"]: row["count"] for row in recorded if row["count"] > 1}
        begin = partial(self.federation.begin_round, round - 1, splits, cohort)
        begin(moved_norm=moved_norm, remembered=remembered, repeats=repeats)

    def done(self, server: Tree | None) -> _ReplayedRound:
        """Returns the states, scores and server after the round."""
        held = self.federation.held_states()
        return _ReplayedRound(held, self.federation.trained_scores, self.host.engine.vectorized, server)


@dataclass(frozen=True)
class _ReplayedRound:
    """A repeated round: states, scores of published models, and the server's tree if it is complete."""

    states: Mapping[int, Tree]
    scores: Mapping[int, Any]
    vectorized: bool
    server: Tree | None


def _together(stage: _RoundStart) -> _ReplayedRound:
    """Repeats the whole round."""
    changed = stage.federation.play(stage.algorithm, stage.server, stage.cohort)
    return stage.done({**stage.server, **changed})


def _alone(stage: _RoundStart, client: int) -> _ReplayedRound | None:
    """Repeats one client's part of the round; None if that needs the other clients."""
    clients = SingleClient(stage.federation, client)
    try:
        stage.algorithm.round(stage.server, stage.cohort, clients)
    except NeedsOthersError:
        return None
    except RayflError:
        if clients.asked and stage.federation.context.one_by_one:  # a rule that may need more messages than one
            return None
        raise
    except Exception:
        # A method may fail because it got one reply in place of many. An error of another cause is raised again when
        # the whole round is repeated.
        if clients.asked:
            return None
        raise
    return stage.done(None) if clients.asked else None


class _Listening(SingleClient):
    """The clients of a round up to the first message that one of them sends."""

    message: Message | None = None

    def call(self, call: Call) -> Replies:
        if call.kind != "map" and self._client in call.clients:
            # One by one, for a sum would not say what the client has sent.
            reply = self._federation.call(replace(call.of([self._client]), kind="each")).values[self._client]
            try:
                received = reference_of(reply["tree"], call.broadcast)
            except ValueError as error:
                raise ConfigError(f"invert: {call.procedure} {error}") from error
            self.message = Message(_flat(received), _flat(reply["tree"]))
        raise NeedsOthersError


def _flat(tree: Tree) -> dict[str, Tensor]:
    return {path.rpartition("/")[2]: leaf.detach().cpu().clone() for path, leaf in leaves(tree)}


def participants(run: RunFolder, round: int, client: int | None = None) -> list[int]:
    """Returns the clients sampled in a round without those that were left out.

    Args:
        run: the run.
        round: completed rounds, this one included.
        client: one that must be among them; None for any.

    Raises:
        ConfigError: when there is no such round, or the client took no part.
        RunError: when it is not known who did, or the round is one of the run that a fork came from.
    """
    if not 1 <= round <= run.config.train.rounds:
        raise ConfigError(f"--round: {run.storage.uri} has rounds 1 to {run.config.train.rounds}, not {round}")
    if round <= (begun := begun_after(run) or 0):
        raise RunError(f"{run.storage.uri} begins after round {begun}: earlier ones are those of another run")
    if run.parts.schedule is not None:
        raise RunError("rounds on simulated devices cannot be replayed: who was asked depends on the virtual clock")
    absent = set(where(left_out(run.skipped), round=round)["client"].to_pylist())
    sampled = where(run.cohorts, round=round)["client"].to_pylist() if run.parts.chosen else run.parts.cohort(round - 1)
    cohort = [one for one in sampled if one not in absent]
    # A method may train others than those that were sampled for it (DRFA).
    known = sorted({*cohort, *where(run.clients, round=round, cohort="selected")["client"].to_pylist()})
    if client is not None and client not in known:
        others = ", ".join(map(str, known))
        raise ConfigError(f"--client: client {client} took no part in round {round}; those who did: {others}")
    return cohort


def _note(vectorized: bool) -> str:
    if vectorized:
        return "vectorised clients have the same bits only if the same ones are stacked together, others up to rounding"
    return "on other hardware, or with other versions of rayfl or libraries than the run's, the last bits may differ"


def _distance(found: Any, recorded: Any) -> float | None:
    """Returns the largest difference, None for equal bits (inf where there is nothing to compare)."""
    if found is None and recorded is None:
        return None
    if isinstance(found, Tensor) and isinstance(recorded, Tensor):
        if found.shape != recorded.shape or found.dtype != recorded.dtype:
            return float("inf")
        exact = torch.float32 if found.dtype is torch.bfloat16 else found.dtype  # NumPy has no bfloat16
        a, b = (leaf.detach().cpu().contiguous().to(exact).numpy() for leaf in (found, recorded))
        same = a.tobytes() == b.tobytes()
        return None if same else float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
    if isinstance(found, int | float) and isinstance(recorded, int | float):
        same = found == recorded or (found != found and recorded != recorded)
        return None if same else abs(float(found) - float(recorded))
    return float("inf")
