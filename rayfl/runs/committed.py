"""The models of a run as a commit has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import pyarrow.compute as pc
import torch

from rayfl.aggregation.memory import without_memory
from rayfl.data.federated import FederatedDataset
from rayfl.engine.client import Client
from rayfl.engine.engine import Engine
from rayfl.engine.updates.trampoline import run_procedures
from rayfl.errors import ConfigError, RunError
from rayfl.examples import Examples
from rayfl.models.private_norm import PrivateNorm
from rayfl.params import Tree
from rayfl.runs.folder import RunFolder
from rayfl.runs.measured import Cohort
from rayfl.runs.participation import participants
from rayfl.runs.rows import named_model
from rayfl.storage.manifest import Manifest
from rayfl.system.unfinished import separated
from rayfl.tasks.base import Model, Predictor, Task
from rayfl.tracking.environment import starts_before

_CPU = torch.device("cpu")
_FILES_IN_MEMORY = 4


class CommittedModels:
    """Server and client models after a round, on the CPU.

    Args:
        run: the run.
        rounds_completed: after which round; None: the newest whole commit.

    Raises:
        RunError: when the commit is not kept, or the data have changed since.
    """

    def __init__(self, run: RunFolder, rounds_completed: int | None = None) -> None:
        self.run = run
        self.parts = run.parts
        self.manifest: Manifest = run.manifest(rounds_completed)
        self._files: dict[str, dict[int, Tree]] = {}
        self._served: tuple[Tree, tuple[Tree, Mapping[int, Tree]]] | None = None

    @property
    def rounds_completed(self) -> int:
        """The commit's round."""
        return self.manifest.rounds_completed

    @cached_property
    def server(self) -> Tree:
        """The server's tree."""
        content, _ = without_memory(self.run.store.read_server(self.manifest))
        server, _ = separated(content)
        return server

    @cached_property
    def engine(self) -> Engine:
        """Executes what predictors need (fine-tuning), client by client."""
        return Engine(self.parts.task, _CPU, self.run.config.engine.model_copy(update={"mode": "looped"}))

    @cached_property
    def idle(self) -> frozenset[int] | None:
        """The clients that train but had been in no round until then; None where it is not known who took part."""
        known = participants(self.run)
        if known is None:
            return None
        before = known.filter(pc.less_equal(known["round"], self.rounds_completed))
        return frozenset(range(self.parts.num_clients)) - frozenset(before["client"].to_pylist())

    @cached_property
    def _norm(self) -> PrivateNorm:
        """The parts of models that stay with their clients."""
        parts = self.parts
        return PrivateNorm(parts.task.network, parts.config.train.private_norm, parts.streams)

    def state(self, client: int) -> Tree:
        """A client's state; empty for one that has none (yet)."""
        file = self.manifest.states.get(client)
        if file is None:
            return {}
        if file.name not in self._files:
            while len(self._files) >= _FILES_IN_MEMORY:
                del self._files[next(iter(self._files))]
            self._files[file.name] = self.run.store.read_states(file)
        return dict(self._files[file.name][client])

    def client(self, client: int) -> Client:
        """A client as its method sees it in the evaluation after the commit's round.

        Raises:
            ConfigError: when there is no such client.
        """
        check_client(self.run, client)
        rounds = self.rounds_completed
        context = replace(self.parts.context, round=rounds - 1, final=_was_last(self.run, rounds))
        examples, public = self.dataset.load(client), self.dataset.load_public
        return Client(client, self.state(client), examples, self.parts.task, context, _CPU, public)

    @property
    def dataset(self) -> FederatedDataset:
        """Returns the clients with the samples that they have in the commit's round."""
        return self.parts.dataset_in(self.rounds_completed - 1)

    def predictors(self, client: int, server: Tree | None = None) -> dict[str, Predictor]:
        """The models of a client that an evaluation scores, by the name of their row.

        Args:
            client: the client's number.
            server: the server's tree, if not the committed one.
        """
        algorithm = self.run.config.algorithm
        tree = self.server if server is None else server
        if self._served is None or self._served[0] is not tree:
            self._served = (tree, algorithm.served(tree, self.parts.context))
        common, own = self._served[1]
        newcomer = client in self.parts.context.newcomers
        asked, given = self.client(client), {**common, **own.get(client, {})}
        if self._norm.names:
            given = self._norm.joined(given, asked.state, _CPU)
        procedure = (algorithm.newcomer_predictors if newcomer else algorithm.predictors)(asked, given)
        found: Any = run_procedures({client: procedure}, self.engine)[client]
        if isinstance(found, Exception):
            raise found
        return dict(found)

    def predictor(self, client: int, row: str) -> Predictor:
        """One of :meth:`predictors`; raises ConfigError when there is no such row, naming those there are."""
        found = self.predictors(client)
        if row not in found:
            raise ConfigError(
                f"--model: {self.run.config.algorithm.name} has no model {row!r} after round {self.rounds_completed} "
                f"in {self.run.uri}; there are {', '.join(found)}"
            )
        return found[row]

    def pooled(self, split: str, most: int, clients: Iterable[int] | None = None) -> Examples:
        """Samples of clients that train, together: all, or as many as asked drawn at random (stream ``inspection``).

        Raises:
            RunError: when there are none.
        """
        chosen = range(self.parts.num_clients) if clients is None else clients
        found = Examples.joined([self.dataset.load(client)[split] for client in chosen])
        if not len(found):
            raise RunError(f"{self.run.uri}: no samples in the split {split}")
        if len(found) > most:
            order = self.parts.streams.generator("inspection").permutation(len(found))[:most]
            found = found[torch.from_numpy(order).sort().values]
        return found


def _was_last(run: RunFolder, rounds: int) -> bool:
    """Returns whether a round was the last one when it was evaluated; the run may have been given more since."""
    if run.ended_early and rounds == run.rounds_completed:
        return True
    starts = starts_before(run.environment, rounds)
    planned = starts[-1].get("rounds") if starts else None
    return rounds == (planned if isinstance(planned, int) else run.config.train.rounds)


def single_model(predictor: Predictor, row: str) -> Model:
    """The one model that predicts; raises ConfigError where several do, or their outputs are combined."""
    models = predictor.built()
    if len(models) == 1 and predictor.combine is None:
        return models[0]
    how = f"{len(models)} models together"
    if len(models) == 1:
        rule = getattr(predictor.combine, "func", predictor.combine)  # of functools.partial
        name = getattr(rule, "__qualname__", type(rule).__name__)
        how = f"a model and what the method makes of its outputs ({name}), which no file of weights has"
    raise ConfigError(f"--model: {row!r} predicts with {how}; it is no single model, choose another row")


def personalized_predictor(models: CommittedModels, client: int, model: str | None) -> tuple[str, Predictor]:
    """A client's model by its row, and the row's name.

    Args:
        models: of the run.
        client: the client's number.
        model: a row; None: the method's personalized model.
    """
    cohort: Cohort = "unseen" if client in models.parts.context.newcomers else "all"
    row = named_model(models.run, model, models.predictors(client), models.rounds_completed, cohort)
    return row, models.predictor(client, row)


def task_of(predictor: Predictor, task: Task) -> Task:
    """The task of a predictor's models."""
    return task if predictor.task is None else predictor.task


def check_client(run: RunFolder, client: int) -> None:
    """Raises ConfigError unless there is such a client."""
    clients = run.parts.dataset.num_clients
    if not 0 <= client < clients:
        raise ConfigError(f"there is no client {client} in {run.uri}: they are numbered 0 to {clients - 1}")
