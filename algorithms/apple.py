"""APPLE: every client learns how much of each client's core model its personal model takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.mixture import parameters
from algorithms.parts.partial import part
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree, copy, map_leaves
from rayfl.tasks.base import Batch, Predictor, Task

_LAST = 1e-3
"""The share of the penalty that an exponential schedule has left where it ends."""


def mixture(core: Tree, relation: Tensor, cores: Tree, own: Tensor) -> Tree:
    """sum_{j != i} p_ij c_j + p_ii c_i, with the client's own core apart from the others.

    Args:
        core: c_i.
        relation: p_i, shape (K,).
        cores: c_j of all clients, stacked along dimension 0; row i is not read.
        own: one-hot vector of i, shape (K,). It leaves ``cores`` one tensor for clients that are trained together.
    """
    of_others, of_own = relation * (1 - own), (relation * own).sum()
    return map_leaves(
        lambda leaf, stack: of_own * leaf + torch.tensordot(of_others, stack, dims=1),
        core,
        {name: cores[name] for name in core},
    )


def draw_downloads(
    relation: Sequence[float], own: int, downloaded: Sequence[bool], count: int, base: float, generator: Any
) -> list[int]:
    """Whose cores a client downloads, ascending: first any that it never has, then by how much it takes of them.

    Args:
        relation: p_i.
        own: i.
        downloaded: whether the client ever downloaded c_j.
        count: M.
        base: of the others j is drawn in proportion to base^|p_ij|, without replacement.
        generator: of the client and round.
    """
    others = [j for j in range(len(relation)) if j != own]
    missing = [j for j in others if not downloaded[j]]
    chosen = [int(j) for j in generator.permutation(missing)[:count]]
    known = [j for j in others if downloaded[j]]
    places = min(count - len(chosen), len(known))
    if places:
        exponents = np.abs(np.array([relation[j] for j in known])) * math.log(base)
        weights = np.exp((exponents - exponents.max()).clip(min=-600))  # nobody's chance is rounded to zero
        chosen += [int(j) for j in generator.choice(known, places, replace=False, p=weights / weights.sum())]
    return sorted(chosen)


class APPLE(Algorithm):
    """APPLE (adaptive personalized cross-silo learning): personal models are learned sums of all clients' core models.

    The server has a core model c_j of every client. Client i takes all of them and trains its own core c_i and its
    relations p_i, a vector of K numbers without bounds, of

        w_i = sum_j p_ij c_j,    CE(w_i) + lambda(t) mu/2 ||p_i - p_0||^2,    p_0j = n_j / N

    both at the same steps, p_i with a learning rate of its own and without weight decay. lambda falls from 1 to 0 in
    the first ``relation_share`` of the rounds. The server replaces c_i. With ``peers`` a client downloads its own core
    and at most M others in a round after the first, in which all are the initial model, and keeps the older copies of
    the rest. Buffers (running statistics) are a client's own and are neither sent nor mixed.

    Server: c_1..c_K, p_0. Client: p_i, w_i, buffers; with ``peers`` also its copies of all cores. Down: all cores,
    p_0. Up: c_i; with ``peers`` also whose cores it wants. Evaluated: w_i as trained, or with ``fresh_peers`` of the
    newest cores (``personalized``), and c_i (``core``). A client never sampled has p_0 and the initial core. There is
    no global model.

    References:
        Luo, Wu: Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning, IJCAI 2022,
        Algorithm 1.
    """

    name: Literal["apple"] = "apple"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Luo & Wu, IJCAI 2022"
    client_keeps: ClassVar[str] = "p_k, w_k"
    server_keeps: ClassVar[str] = "c_1..c_K, p_0"
    keeps_models: ClassVar[bool] = True
    newcomer: ClassVar[str] = "-"
    no_newcomers: ClassVar[str] = (
        "its model is a mixture of the cores of clients that know each other, its own among them"
    )
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "a client's personal model is made of other clients' scales and shifts too"
    }

    relation_lr: float = setting(0.001, "eta_2", "learning rate of p_i; it follows train.schedule", ge=0)
    relation_penalty: float = setting(
        0.1, "mu", "weight of the distance of p_i from p_0", ge=0, unless={"relation_lr": (0,), "relation_share": (0,)}
    )
    penalty_half: bool = setting(
        True,
        "",
        "mu/2 (paper); false: mu (official code)",
        unless={"relation_lr": (0,), "relation_penalty": (0,), "relation_share": (0,)},
    )
    relation_schedule: Literal["exponential", "cosine"] = setting(
        "exponential",
        "lambda",
        "how the penalty falls: 1e-3^(t/L), or (cos(pi t/L) + 1)/2; 0 from t = L on",
        unless={"relation_lr": (0,), "relation_penalty": (0,), "relation_share": (0,)},
    )
    relation_share: float = setting(
        0.1,
        "L/T",
        "share of the rounds in which there is a penalty",
        ge=0,
        le=1,
        unless={"relation_lr": (0,), "relation_penalty": (0,)},
    )
    peers: int | None = setting(None, "M", "cores of others that a client downloads in a round; null: all", ge=0)
    peer_base: float = setting(
        1.5,
        "",
        "peers: least base b of the weights b^|p_ij| by which they are drawn",
        ge=1,
        unless={"peers": (None, 0)},
    )
    peer_growth: float = setting(
        1.0,
        "lambda_M",
        "peers: if larger, b is this times a core's mean number of downloads so far, t M / K",
        ge=0,
        unless={"peers": (None, 0)},
    )
    fresh_peers: bool = setting(
        False, "", "personalized model: of the newest cores, rather than as last trained", kept=True
    )

    def penalty_in(self, round: int, rounds: int) -> float:
        """lambda(t) of round t (0-indexed) of T."""
        length = self.relation_share * rounds
        if round >= length:
            return 0.0
        if self.relation_schedule == "cosine":
            return (math.cos(math.pi * round / length) + 1) / 2
        return float(_LAST ** (round / length))

    def course(self, round: int, rounds: int) -> Any:
        """lambda(t), where it weighs anything."""
        return self.penalty_in(round, rounds) if self.relation_penalty else None

    def limits(self, context: RoundContext) -> bool:
        """Returns whether clients download fewer cores than there are."""
        return self.peers is not None and self.peers < context.num_clients - 1

    def init(self, task: Task, context: RoundContext) -> Tree:
        core = parameters(task.network.initialize(context.streams.integer("init.global")), task)
        return {"cores": map_leaves(lambda leaf: torch.stack([leaf] * context.num_clients), core)}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        samples = clients.num_samples(range(clients.context.num_clients))
        shares, cores = torch.from_numpy(samples / samples.sum()), server["cores"]
        if self.limits(clients.context):
            payloads = self.downloads(cores, cohort, clients)
            trained = clients.map(self.limited_update, cohort, {"shares": shares}, payloads)
        else:
            trained = clients.map(self.local_update, cohort, {"shares": shares, "cores": cores})
        changed = map_leaves(torch.clone, cores)
        for i, core in trained.items():
            for name, leaf in core.items():
                changed[name][i] = leaf
        return {"cores": changed, "shares": shares}

    def downloads(self, cores: Tree, cohort: Sequence[int], clients: Clients) -> dict[int, Tree]:
        """A client's own core, and those of others that it asks for; in the first round nobody asks."""
        asked: dict[int, list[int]] = {i: [] for i in cohort}
        if clients.context.round:
            asked = {i: reply["wanted"].tolist() for i, reply in clients.map(self.wanted, cohort, {}).items()}
        sent = {j for i, chosen in asked.items() for j in (i, *chosen)}
        rows = {j: {name: leaf[j] for name, leaf in cores.items()} for j in sorted(sent)}
        return {i: {"core": rows[i], "peers": {str(j): rows[j] for j in chosen}} for i, chosen in asked.items()}

    async def wanted(self, client: Client) -> Tree:
        """Returns whose cores the client downloads."""
        context, count = client.context, self.peers or 0
        relation = client.state["relation"].tolist() if "relation" in client.state else [0.0] * context.num_clients
        seen = client.state["downloaded"].tolist() if "downloaded" in client.state else [False] * context.num_clients
        base = max(self.peer_base, self.peer_growth * client.round * count / context.num_clients)
        generator = context.streams.generator("peers", client.round, client.id)
        return {"wanted": torch.tensor(draw_downloads(relation, client.id, seen, count, base, generator)).long()}

    async def limited_update(self, client: Client, shares: Tensor, core: Tree, peers: Tree) -> Tree:
        """Brings the copies of the cores up to date as far as they were sent, and trains."""
        count = len(shares)
        stored: Tree = client.state.get("copies") or map_leaves(
            lambda leaf: torch.stack([leaf] * count), parameters(client.initial_model(), client.task)
        )
        copies = map_leaves(torch.clone, stored)
        seen = client.state.get("downloaded", torch.zeros(count, dtype=torch.bool)).clone()
        for j, model in peers.items():
            seen[int(j)] = True
            for name, leaf in model.items():
                copies[name][int(j)] = leaf
        client.state["copies"], client.state["downloaded"] = copies, seen
        return await self._trained(client, shares, core, copies)

    async def local_update(self, client: Client, shares: Tensor, cores: Tree) -> Tree:
        """Trains c_i and p_i; returns c_i."""
        return await self._trained(client, shares, {name: leaf[client.id] for name, leaf in cores.items()}, cores)

    async def _trained(self, client: Client, shares: Tensor, core: Tree, cores: Tree) -> Tree:
        network, train = client.task.network, client.context.train
        start = shares.to(next(iter(core.values())))
        own = _one_hot(client.id, start)
        rate = self.relation_lr * train.factor_in(client.round)
        trained = await client.train(
            {"core": self.whole(client, core), "relation": {"p": client.state.get("relation", start)}},
            self.objective,
            frozen={
                "cores": cores,
                "own": own,
                "start": start,
                "pull": self.penalty_in(client.round, client.context.rounds) * self.relation_penalty,
            },
            groups={"relation": ParameterGroup(lr=rate, weight_decay=0.0)},
        )
        core, relation = part(trained["core"], network.parameter_names), trained["relation"]["p"]
        if network.buffer_names:
            client.state["buffers"] = part(trained["core"], network.buffer_names)
        client.state["relation"] = relation
        personal = mixture(core, relation, cores, own)
        if not self.fresh_peers:
            client.state["personal"] = personal
        predictors = {"personalized": self.whole(client, personal), "core": self.whole(client, core)}
        client.publish(**{row: Predictor.of(model) for row, model in predictors.items()})
        return copy(core)

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """CE(sum_j p_ij c_j) + lambda mu/2 ||p_i - p_0||^2; c_i and p_i are trained."""
        core, relation = model["core"], model["relation"]["p"]
        mixed = mixture(parameters(core, task), relation, frozen["cores"], frozen["own"])
        distance = (relation - frozen["start"]).square().sum()
        weight = frozen["pull"] / 2 if self.penalty_half else frozen["pull"]
        found: Tensor = task.loss({**core, **mixed}, batch) + weight * distance
        return found

    def whole(self, client: Client, model: Tree) -> Tree:
        """A model with the client's buffers, the initial ones until it has trained."""
        network = client.task.network
        if not network.buffer_names:
            return model
        buffers = client.state["buffers"] if "buffers" in client.state else client.initial_model()
        return {**model, **part(buffers, network.buffer_names)}

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """Each client's own core, or all if personal models are made of the newest ones."""
        cores = server["cores"]
        if self.fresh_peers:
            return dict(server), {}
        return {}, {i: {"core": {name: leaf[i] for name, leaf in cores.items()}} for i in range(context.num_clients)}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        if not self.fresh_peers:
            core = server["core"]
            personal = dict(client.state.get("personal") or core)
        else:
            core = {name: leaf[client.id] for name, leaf in server["cores"].items()}
            personal = self._newest(client, core, server) if "shares" in server else dict(core)
        return {
            "personalized": Predictor.of(self.whole(client, personal)),
            "core": Predictor.of(self.whole(client, core)),
        }

    def _newest(self, client: Client, core: Tree, server: Tree) -> Tree:
        """sum_j p_ij c_j of the server's cores."""
        start = server["shares"].to(next(iter(core.values())))
        own = _one_hot(client.id, start)
        return mixture(core, client.state.get("relation", start), server["cores"], own)


def _one_hot(client: int, like: Tensor) -> Tensor:
    """1 in the place of a client and 0 elsewhere, shape (K,)."""
    found = torch.zeros_like(like)
    found[client] = 1
    return found
