"""FedALT: an individual adapter of each client next to the mean of all others', mixed for every row of an input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.adapters import adapters_of, check_adapters, check_no_magnitudes
from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.models.pretrained.mixing import mixed_by_rows, side_by_side
from rayfl.params import Tree, copy, num_bytes
from rayfl.tasks.base import Batch, Model, Predictor, Task


class FedALT(Algorithm):
    """FedALT: individual adapters that are never averaged, next to a frozen mean of everybody else's.

    Client k goes on training its individual adapter theta_k = (A_k, B_k), next to the rest-of-world adapter
    R_k = (A_R, B_R), which stays as it is, and a mixer G_k of every layer, which weighs the two for each row x,

        y = W x + p_1 s B_k A_k x + p_2 s B_R A_R x,    p = softmax(G_k x)
        R_k = 1/(K - 1) sum_{j != k} theta_j

    over the adapters of all K clients as last sent; those of clients that never were sampled are the initial ones.
    A head that is trained is individual, and is not mixed.

    Server: theta_1..theta_K. Client: theta_k, at first the initial adapter, G_k, at first an own draw, and its head.
    Down: R_k. Up: theta_k. Evaluated: both adapters, mixed, with the newest R_k (``personalized``). There is no global
    model.

    References:
        Bian, Wang, Zhang, Xu: FedALT: Federated Fine-Tuning Through Adaptive Local Training with Rest-of-World LoRA,
        AAAI 2026 (arXiv:2503.11880).
    """

    name: Literal["fedalt"] = "fedalt"
    personalized: ClassVar[str] = "personalized"
    averages_replies: ClassVar[bool] = True
    citation: ClassVar[str] = "Bian et al., AAAI 2026"
    client_keeps: ClassVar[str] = "theta_k, G_k, head"
    server_keeps: ClassVar[str] = "theta_1..theta_K"
    keeps_models: ClassVar[bool] = True
    newcomer: ClassVar[str] = (
        "the mean of all adapters in place of R_k, and an adapter, mixer and head after a local update"
    )

    own_share: float | None = setting(
        None, "p_1", "share of the individual adapter in every layer and row; null: what the mixer says", ge=0, le=1
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_adapters("FedALT", task.network)
        check_no_magnitudes("FedALT", task.network, "a layer has two adapters, whose sum has other row norms than each")

    def init(self, task: Task, context: RoundContext) -> Tree:
        return {"initial": adapters_of(super().init(task, context)["model"], task.network)}

    def kept_of_client(self, task: Task, clients: int) -> int:
        return num_bytes(adapters_of(task.network.initialize(0), task.network))

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        rest = self.rest(server, cohort, clients.context.num_clients)
        trained = clients.map(self.local_update, cohort, {}, {client: {"rest": rest[client]} for client in cohort})
        return {"own": {**server.get("own", {}), **{str(client): own for client, own in trained.items()}}}

    @staticmethod
    def rest(server: Tree, clients: Sequence[int], everyone: int) -> dict[int, Tree]:
        """R_k of some clients; of numbers from ``everyone`` on, which have sent nothing, the mean of all.

        Args:
            server: the server's tree.
            clients: k.
            everyone: K.
        """
        own: Tree = server.get("own", {})
        initial: Tree = server["initial"]
        silent = everyone - len(own)
        if everyone == 1:
            return dict.fromkeys(clients, initial)
        total = ExactSum()
        for contribution in (*map(Weighted, own.values()), *([Weighted(initial, silent)] if silent else [])):
            total.add(contribution)

        def mean(client: int) -> Tree:
            if client >= everyone:
                return total.mean()
            return total.mean_without(Weighted(own.get(str(client), initial)))

        return {client: mean(client) for client in clients}

    async def local_update(self, client: Client, rest: Tree) -> Tree:
        """Trains the individual adapter, the mixer and the head; returns the adapter."""
        trained = await client.train(self.individual(client), self.objective, frozen={"rest": rest})
        client.state.update(trained)
        client.publish(personalized=Predictor.of(self.mixed(trained, rest)))
        return copy(adapters_of(trained["own"], client.task.network))

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """CE of both adapters, mixed; the rest-of-world adapter is not trained."""
        return task.loss(self.mixed(model, frozen["rest"]), batch)

    def mixed(self, model: Mapping[str, Any], rest: Model) -> Tree:
        """The client's model with both adapters.

        Args:
            model: ``own``, and ``mixer`` unless ``own_share`` is set.
            rest: R_k.
        """
        if self.own_share is None:
            return mixed_by_rows(model["own"], rest, model["mixer"])
        share = torch.full((1, 1), self.own_share, device=next(iter(rest.values())).device)
        adapters = side_by_side([{name: model["own"][name] for name in rest}, rest], torch.cat([share, 1 - share], 1))
        return {**model["own"], **adapters}

    def individual(self, client: Client) -> Tree:
        """What is the client's own: its adapter and head (``own``) and, unless ``own_share`` is set, its ``mixer``."""
        own = client.state["own"] if "own" in client.state else client.initial_model()
        if self.own_share is not None:
            return {"own": own}
        return {"own": own, "mixer": client.state["mixer"] if "mixer" in client.state else self.first_mixer(client)}

    @staticmethod
    def first_mixer(client: Client) -> Tree:
        """G_k by layer, shape (2, i), before any training: uniform within 1/sqrt(i)."""
        generator = client.context.streams.generator("init.mixer", client=client.id)
        like = next(iter(client.initial_model().values()))
        return {
            site: torch.from_numpy(generator.uniform(-1, 1, (2, inputs)) / inputs**0.5).to(like)
            for site, inputs in client.task.network.sites.items()
        }

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        clients = [*range(context.num_clients), *context.newcomers]
        rest = self.rest(server, clients, context.num_clients)
        return {}, {k: {"rest": adapter} for k, adapter in rest.items()}

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.local_update(client, server["rest"])
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"personalized": Predictor.of(self.mixed(self.individual(client), server["rest"]))}
