"""What the driver keeps of a run from round to round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import pyarrow as pa

from rayfl.aggregation.memory import with_memory, without_memory
from rayfl.config.own_code import own_name
from rayfl.errors import RunError
from rayfl.experiment.parts import Parts
from rayfl.params import Tree
from rayfl.results.contributions import CONTRIBUTIONS_SCHEMA
from rayfl.results.schemas import COHORTS_SCHEMA, same_data
from rayfl.results.tables import ResultTables
from rayfl.storage.manifest import CLIP_NORM, ENDED_EARLY
from rayfl.system.schedule import Clock
from rayfl.system.unfinished import Unfinished, separated


@dataclass
class Progress:
    """The state of a run after some rounds.

    Attributes:
        rounds_completed: number of completed rounds.
        server: the server's tree.
        tables: results so far.
        bytes_down: bytes sent to clients so far.
        bytes_up: bytes received from clients so far.
        clock: virtual time of a simulated system.
        unfinished: updates under way, if rounds have no barrier.
        ended_early: whether the run has ended before its last round (``early_stopping``).
        moved_norm: the clipping norm of the next round, where it is not the first one (``privacy.target_quantile``).
        remembered: what the rule of the section ``aggregator`` needs in the next round.
    """

    rounds_completed: int
    server: Tree
    tables: ResultTables
    bytes_down: int = 0
    bytes_up: int = 0
    clock: Clock = field(default_factory=Clock)
    unfinished: Unfinished = field(default_factory=Unfinished)
    ended_early: bool = False
    moved_norm: float | None = None
    remembered: Tree = field(default_factory=dict)

    def over(self, rounds: int) -> bool:
        """Returns whether a run of that many rounds is finished."""
        return self.ended_early or self.rounds_completed >= rounds

    @classmethod
    def after(
        cls,
        rounds_completed: int,
        content: Tree,
        tables: ResultTables,
        counters: Mapping[str, int | float],
    ) -> Progress:
        """Returns the progress after some rounds, with what :attr:`counters` and :attr:`server_file` gave then."""
        content, remembered = without_memory(content)
        server, unfinished = separated(content)
        return cls(
            rounds_completed,
            server,
            tables,
            **{name: int(counters.get(name, 0)) for name in ("bytes_down", "bytes_up")},
            clock=Clock(**{name: int(counters.get(f"clock_{name}", 0)) for name in asdict(Clock())}),
            unfinished=unfinished,
            ended_early=bool(counters.get(ENDED_EARLY)),
            moved_norm=counters.get(CLIP_NORM),
            remembered=remembered,
        )

    @property
    def server_file(self) -> Tree:
        """What the server's file has: its tree, updates under way, and what a rule of aggregation remembers."""
        return with_memory(self.unfinished.beside(self.server), self.remembered)

    @property
    def counters(self) -> dict[str, int | float]:
        """What a manifest has beside files: bytes, the virtual time, whether the run has ended early, a norm."""
        clock = {f"clock_{name}": value for name, value in asdict(self.clock).items() if value}
        ended = {ENDED_EARLY: 1} if self.ended_early else {}
        moved = {} if self.moved_norm is None else {CLIP_NORM: self.moved_norm}
        return {"bytes_down": self.bytes_down, "bytes_up": self.bytes_up, **clock, **ended, **moved}


def empty_tables(parts: Parts) -> ResultTables:
    """Returns the tables of an experiment without rows."""
    method = parts.config.algorithm
    return ResultTables(
        parts.dataset.names,
        method.sweep,
        parts.partition_hash,
        personalized=method.personalized,
        measures=parts.task.measures,
        simulated=parts.schedule is not None,
        buffered=parts.buffered,
        method=own_name(method),
        adapters=bool(parts.task.network.sites),
        adaptive=parts.config.privacy.target_quantile is not None,
        unseen=parts.num_unseen,
        content=parts.dataset.content_hash(),
        cohorts=COHORTS_SCHEMA.empty_table() if parts.chosen else None,
        contributions=CONTRIBUTIONS_SCHEMA.empty_table() if parts.context.keeps_messages else None,
    )


def check_same_data(recorded: pa.Schema, tables: ResultTables, uri: str) -> None:
    """Raises RunError unless results of a run are of the data that its configuration gives now.

    Args:
        recorded: schema of a table of the run.
        tables: empty ones of today's configuration.
        uri: the run's folder.
    """
    if not same_data(recorded.metadata, tables.metadata):
        raise RunError(
            f"the results in {uri} are of other data than the configuration gives now: the data set's files or the "
            "partition's file have changed. Restore them, or choose another name"
        )
