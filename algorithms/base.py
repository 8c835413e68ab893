"""The contract of a method: what the server does in a round, what a client does, and the objective.

A method object holds hyper-parameters only. What lives between rounds is ``server`` (a tree, on the driver)
and ``client.state`` (a tree, on the actor); both are checkpointed without the method's help. Code here and in
the methods is pure PyTorch: no Ray, no files, no logging.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from algorithms.clients import Clients as Clients
from algorithms.clients import Procedure as Procedure
from algorithms.parts.example_privacy import SamplesOfClients
from algorithms.parts.kept_models import KeptModels
from algorithms.parts.requirements import check_everyone as check_everyone
from algorithms.parts.requirements import check_head as check_head
from algorithms.parts.requirements import check_sgd as check_sgd
from algorithms.parts.requirements import check_traits
from algorithms.parts.settings import idle_settings
from algorithms.parts.settings import setting as setting
from algorithms.parts.token_weights import check_tokens, tokens_of
from algorithms.parts.unlabelled_samples import UnlabelledSamples
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import MethodError
from rayfl.objectives import loss
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task, Trait

Aggregation = Literal["samples", "uniform", "population", "tokens"]
"""Weights of a mean over clients."""


class Algorithm(SamplesOfClients, UnlabelledSamples, KeptModels, BaseModel):
    """Base of all methods.

    Class attributes:
        personalized: the row of the results that is the method's personalized model: one of :meth:`predictors`.
        personalized_later: whether first evaluations may lack that row, as one of fine-tuning; else that ends the run.
        sweep: prefix of rows ``<sweep>=<value>`` among which one is chosen, or None.
        citation: where the method is from.
        client_keeps: what a client keeps from round to round, in the paper's symbols; ``-`` for nothing.
        server_keeps: what the server keeps.
        mixes_architectures: whether clients may have different architectures (``model.candidates``).
        no_private_norm: values of ``train.private_norm`` that the method cannot have, and why.
        train_settings: options of the section ``train`` that are part of the method, with their values: what is left
            out gets them, another value is refused.
        asynchronous: whether the method is made for rounds without a barrier (``system.mode=buffered``), and no others:
            a client of the cohort may have begun from the server's tree of an earlier round.
        needs_everyone: why every client must be in every round, which no simulated device may then leave; else empty.
        averages_replies: whether the server averages messages of ``Clients.map``; of adapters its error is reported.
        needs: traits of a task (``rayfl.tasks.base.Trait``) that the method cannot do without, and why.
        newcomer: what a client has that takes no part in training (``evaluation.unseen_clients``), in symbols.
        no_newcomers: why such a client can have nothing; empty where it has something.
        no_privacy: why ``privacy``, ``compression`` and ``aggregator`` cannot be applied to its messages; else empty.
        own_rule: how the server weighs messages that it takes one by one (``Clients.each``), in place of
            ``aggregator``; attacks and ``compression`` are then possible in spite of ``no_privacy``. Else empty.
        keeps_target: whether clients keep a target network beside their model, with which BYOL compares.
        running_statistics: why those of batch normalization do not fit the models that are scored; else empty.
        reduced_precision: why forward passes in bfloat16 do not suit its steps; else empty.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    personalized: ClassVar[str] = "global"
    personalized_later: ClassVar[bool] = False
    sweep: ClassVar[str | None] = None
    citation: ClassVar[str] = ""
    client_keeps: ClassVar[str] = "-"
    server_keeps: ClassVar[str] = "w"
    mixes_architectures: ClassVar[bool] = False
    no_private_norm: ClassVar[Mapping[str, str]] = {}
    train_settings: ClassVar[Mapping[str, Any]] = {}
    asynchronous: ClassVar[bool] = False
    needs_everyone: ClassVar[str] = ""
    averages_replies: ClassVar[bool] = False
    needs: ClassVar[Mapping[Trait, str]] = {}
    newcomer: ClassVar[str] = "what a client never sampled has"
    no_newcomers: ClassVar[str] = ""
    no_privacy: ClassVar[str] = "its clients send something else than changes of one model, of which a mean is taken"
    own_rule: ClassVar[str] = ""
    keeps_target: ClassVar[bool] = False
    running_statistics: ClassVar[str] = ""
    reduced_precision: ClassVar[str] = ""

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses what would be lost: no commit has a method's attributes, and no other process sees them.

        Raises:
            MethodError: saying where it belongs.
        """
        if name in self.__private_attributes__:
            super().__setattr__(name, value)
            return
        raise MethodError(
            f"{type(self).__name__}.{name} cannot be set: a method holds hyper-parameters only. What a client keeps "
            "from round to round belongs into client.state, what the server keeps into what init and round return"
        )

    def needed(self) -> Mapping[Trait, str]:
        """Returns what the method needs of a task as it is configured, and why; by default :attr:`needs`."""
        return self.needs

    def everyone_needed(self) -> str:
        """Returns why every client must take part in every round, as configured; by default :attr:`needs_everyone`."""
        return self.needs_everyone

    def check_task(self, task: Task) -> None:
        """Refuses a task that the method cannot learn.

        Raises:
            ConfigError: naming the task, what it lacks, and the fix.
        """
        check_traits(self.name, self.needed(), task)

    def check(self, task: Task, context: RoundContext) -> None:
        """Refuses, before any actor starts, what the method cannot run with; RayflError names the field and the fix."""

    def remarks(self, context: RoundContext) -> Sequence[str]:
        """What a user may not expect of a run with these settings, a sentence each; logged before it starts."""
        return ()

    def idle_settings(self) -> list[str]:
        """Says of settings that have no effect beside the others, a sentence each; logged before a run starts."""
        return idle_settings(self)

    def check_data(self, task: Task, sizes: np.ndarray, public: int) -> None:
        """Refuses, before any actor starts, data that the method cannot run on.

        Args:
            task: what is learned.
            sizes: samples by client and split (K, 3): train, validation, test.
            public: unlabelled samples that belong to no client.

        Raises:
            rayfl.errors.RayflError: naming the field and the fix.
        """

    def course(self, round: int, rounds: int) -> Any:
        """What the method does in a round because of how many rounds there are; None where that makes no difference.

        A run may be given more rounds if this stays the same for all rounds that are done. A method that reads
        ``context.rounds`` returns here what it makes of it.

        Args:
            round: t, 0-indexed.
            rounds: T.
        """
        return None

    def course_of(self, task: Task, round: int, rounds: int) -> Any:
        """Returns :meth:`course` for a task, on whose architectures it may depend."""
        return self.course(round, rounds)

    def init(self, task: Task, context: RoundContext) -> Tree:
        """The server's tree before round 0."""
        return {"model": task.network.initialize(context.streams.integer("init.global"))}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        """One round on the server: returns the entries of ``server`` that change."""
        raise TypeError(f"{type(self).__name__} does not define a round")

    @property
    def takes_mean(self) -> bool:
        """Returns whether the server's ``model`` after a round is the weighted mean of what clients send, and no more.

        The section ``contribution`` values clients by means of some of these models.
        """
        return False

    def sent(self, server: Tree) -> Tree:
        """Returns what of the server's tree clients are sent in a round.

        Without a barrier it is kept for clients that began with it. First messages on simulated devices are as long.
        """
        return server

    def summed(self, server: Tree) -> Tree:
        """Returns what of the server's tree clients' messages are changes of: what is more is counted in epsilon.

        With noise of ``privacy.mechanism`` epsilon depends on how many numbers a message has.
        """
        return self.sent(server)

    @property
    def objective(self) -> Any:
        """Returns what a local step goes down: a sum of terms (:mod:`rayfl.objectives`).

        A method may have a function ``objective(self, model, batch, task, frozen, draw) -> scalar`` instead.
        """
        return loss()

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        """Returns how a client's training changed the last linear layer, for the variance of updates over the cohort.

        Args:
            trained: what the client sends back; its change may have any shape, and is None without such a layer.
            received: what was broadcast to all.
            task: names the layer.
        """
        return None

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """What of the server's tree an evaluation sends: to all clients, and by client (merged over the former).

        ``context.newcomers`` are the numbers of clients that take no part in training.
        """
        return server, {}

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        """The models worth a row that the server has without any client; none for a method that has no such model.

        Args:
            server: what :meth:`served` gives to all clients.
            task: what is learned.
        """
        return {"global": Predictor.of(server["model"])} if "model" in server else {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        """Every model of this client worth a row, given what it is :meth:`served`, before any local training."""
        return self.global_predictors(server, client.task)

    async def join(self, client: Client, server: Tree) -> Tree:
        """Returns what a newcomer does before it is scored, such as fitting a head; by default nothing.

        A newcomer takes no part in training (``evaluation.unseen_clients``). It has no state. What it puts into
        ``client.state`` is there for :meth:`predictors`, and is forgotten after the evaluation. Its
        ``train.local_epochs`` are ``evaluation.unseen_epochs``, if these are given.

        Args:
            client: the newcomer; ``client.id`` is ``context.num_clients`` or more.
            server: what :meth:`served` gives it.

        Returns:
            The entries of ``server`` that are others for this client from now on.
        """
        return {}

    @property
    def joins_for(self) -> str:
        """The option that says for how long :meth:`join` trains; empty where it trains nothing."""
        return "" if type(self).join is Algorithm.join else "train.local_epochs"

    async def newcomer_predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        """Every model of a newcomer worth a row: those of :meth:`predictors`, after :meth:`join`.

        With ``evaluation.unseen_epochs=0`` it does not join.
        """
        context = client.context
        if context.unseen_epochs is not None:
            train = context.train.model_copy(update={"local_epochs": context.unseen_epochs})
            client.context = replace(context, train=train)
        if context.unseen_epochs != 0:
            server = {**server, **await self.join(client, server)}
        return await self.predictors(client, server)


class Averaging(Algorithm):
    """A method whose server averages what its clients trained (the skeleton of federated averaging)."""

    newcomer: ClassVar[str] = "w"
    no_privacy: ClassVar[str] = ""

    aggregation: Aggregation = setting(
        "samples",
        "q_k",
        "weights of the mean: samples n_k / sum over the cohort; uniform 1/|S|; population n_k / sum over all clients, "
        "the rest staying on the old server model; tokens those that a language model learns, in place of samples",
    )

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        if self.aggregation == "tokens":
            check_tokens(task)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model = server["model"]
        rest = self.remainder(model, cohort, clients)
        return {"model": clients.mean(self.local_update, cohort, broadcast={"model": model}, also=rest)}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received model."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    @property
    def takes_mean(self) -> bool:
        return type(self).round is Averaging.round

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        before = received.get("model", {})
        moved = [name for name in task.network.head_names if name in trained and name in before]
        return torch.cat([(trained[name] - before[name]).flatten() for name in moved]) if moved else None

    def weighted(self, client: Client, tree: Tree) -> Weighted:
        """A client's contribution with the weight that ``aggregation`` gives it."""
        if self.aggregation == "tokens":
            return Weighted(tree, tokens_of(client))
        return Weighted(tree, 1 if self.aggregation == "uniform" else client.num_samples)

    def remainder(self, tree: Tree, cohort: Sequence[int], clients: Clients) -> Weighted | None:
        """Returns what stays on the old server value under ``population``: the mass of the clients not sampled."""
        if self.aggregation != "population":
            return None
        everyone = range(clients.context.num_clients)
        mass = int(clients.num_samples(everyone).sum() - clients.num_samples(cohort).sum())
        return Weighted(tree, mass) if mass else None
