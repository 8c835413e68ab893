"""Local training alone: no federation at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from algorithms.base import Algorithm, Clients, check_everyone, setting
from algorithms.parts.architectures import task_of
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task


class Local(Algorithm):
    """Local only: every client trains a model of its own on its own samples, and nothing is ever sent.

    The baseline that a personalized model has to beat. A client's update is that of federated averaging, started
    from its own v_k. With ``schedule`` ``sampled`` a client trains in the rounds it is sampled in, so that its
    compute is that of the federated methods, each time with empty momentum buffers. With ``all`` every client
    trains in every round, E T epochs with momentum that goes on from round to round: one long run of SGD. Clients may
    have different architectures (``model.candidates``), each a draw of the client's own.

    Server: nothing. Client: v_k, at first the common initial model, or its own draw. Down: nothing. Up: nothing.
    Evaluated: v_k; a client never sampled has its initial model.

    References:
        The baselines "NoFed" of Li, Zhan, Shao, Li, Song: FedPHP, ECML PKDD 2021 (schedule ``sampled``) and "Local
        Data Only" of Matsuda, Sasaki, Xiao, Onizuka: FedMe: Federated Learning via Model Exchange, SDM 2022
        (schedule ``all``).
    """

    name: Literal["local"] = "local"
    personalized: ClassVar[str] = "personalized"
    no_privacy: ClassVar[str] = "its clients send nothing, so that each has all privacy already"
    no_example_privacy: ClassVar[str] = "its clients send nothing, so that nobody learns of their samples"
    citation: ClassVar[str] = "baseline"
    client_keeps: ClassVar[str] = "v_k"
    server_keeps: ClassVar[str] = "-"
    newcomer: ClassVar[str] = "a model that it trains alone"
    mixes_architectures: ClassVar[bool] = True

    schedule: Literal["sampled", "all"] = setting(
        "sampled", "", "who trains in a round: the sampled clients, or all (needs train.clients_per_round=all)"
    )
    local_init: Literal["shared", "own"] = setting(
        "shared", "", "initial v_k: the initial model of the federated methods, or an own draw per client", kept=True
    )

    def check(self, task: Task, context: RoundContext) -> None:
        if self.schedule == "all":
            check_everyone("algorithm.schedule is all", context, otherwise=", or algorithm.schedule=sampled")
        if self.local_init == "own" and len(task.candidates) > 1:
            raise ConfigError("algorithm.local_init is own, which model.candidates does not have: set it to shared")

    def everyone_needed(self) -> str:
        return "with algorithm.schedule=all every client trains in every round" if self.schedule == "all" else ""

    def init(self, task: Task, context: RoundContext) -> Tree:
        return {}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        clients.map(self.local_update, cohort, broadcast={})
        return {}

    async def local_update(self, client: Client) -> Tree:
        """Trains v_k; uploads nothing."""
        keep, task = True if self.schedule == "all" else None, task_of(client)
        trained = await client.train(self._own(client), self.objective, keep_optimizer=keep, task=task)
        client.state["local"] = trained
        client.publish(personalized=Predictor.of(trained, task=task))
        return {}

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains alone, from its initial model."""
        await self.local_update(client)
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"personalized": Predictor.of(self._own(client), task=task_of(client))}

    def _own(self, client: Client) -> Tree:
        """v_k, the initial model until the client has trained."""
        stored: Tree | None = client.state.get("local")
        if stored is not None:
            return stored
        return client.initial_model(task_of(client)) if self.local_init == "shared" else client.fresh_model()
