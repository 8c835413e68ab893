"""pFedGraph: the server learns, for every client, how much of each client's model its own mixture takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.mixture import parameters
from algorithms.parts.partial import part
from algorithms.parts.settings import limits_without_effect
from algorithms.parts.simplex import Array, project_onto_simplex
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.objectives import loss
from rayfl.params import Tree, squared_norm, weighted_sum
from rayfl.params import inner_product as product
from rayfl.tasks.base import Batch, Predictor, Task

_LEAST_SQUARE = 1e-24
"""The least ||w||^2 that is divided by."""


def cosines(changes: Sequence[Sequence[Tensor]]) -> Array:
    """cos(delta_i, delta_j) of every pair, 0 where one of them is zero; shape (m, m).

    Args:
        changes: delta of each client, tensor by tensor. They are read one tensor of all clients at a time.
    """
    gram = np.zeros((len(changes), len(changes)))
    for leaves in zip(*changes, strict=True):
        rows = torch.stack([leaf.flatten() for leaf in leaves]).double()
        gram += (rows @ rows.T).cpu().numpy()
    lengths = np.sqrt(np.diag(gram))
    apart = lengths[:, None] * lengths[None, :]
    found: Array = np.divide(gram, apart, out=np.zeros_like(gram), where=apart > 0)
    np.fill_diagonal(found, lengths > 0)  # 1 without the rounding
    return found


def mixing_weights(distances: Array, shares: Array, weight: float) -> Array:
    """Row i is the a of the simplex with the least sum_j a_j d_ij + alpha ||a - p||^2.

    That is the projection of p - d_i / (2 alpha) onto the simplex.

    Args:
        distances: d, shape (m, m).
        shares: p, shape (m,).
        weight: alpha > 0.
    """
    return project_onto_simplex(shares - distances / (2 * weight), 1.0)


class PFedGraph(Algorithm):
    """pFedGraph: clients collaborate along a graph that the server infers from their updates and sizes.

    With delta_i = w_i - w_0, the change since the initial model, d_ij = -cos(delta_i, delta_j) and p_j = n_j / sum n,
    all over the cohort, client i's mixture is

        u_i = sum_j a_ij w_j,    a_i = argmin over the simplex of sum_j a_j d_ij + alpha ||a - p||^2.

    In its next round the client starts from u_i, and is drawn to the direction of its neighbours' models:

        CE(w) - lambda <s_i, w> / ||w||,    s_i = sum_j a_ij w_j / ||w_j||

    In its first round it trains w_0 on CE alone. Norms and products are over all parameters; buffers (running
    statistics) are mixed with the same weights. A row a_i stays until client i is sampled again.

    Server: w_i of all clients that have trained, w_0, a. Client: nothing. Down: u_i and s_i; w_0 in a client's first
    round. Up: w_i. Evaluated: w_i, or with ``evaluate`` ``mixed`` u_i (``personalized``; then w_i is ``local``); after
    training w_i and u_i as received (``mixture``). A client never sampled has w_0. There is no global model.

    References:
        Ye, Ni, Wu, Chen, Wang: Personalized Federated Learning with Inferred Collaboration Graphs, ICML 2023,
        Algorithm 1.
    """

    name: Literal["pfedgraph"] = "pfedgraph"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Ye et al., ICML 2023"
    server_keeps: ClassVar[str] = "w_1..w_K, w_0, a"
    keeps_models: ClassVar[bool] = True
    newcomer: ClassVar[str] = "a model that it trains alone: the graph does not know it"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "the direction s_i is one of all parameters, scales and shifts of other clients among them"
    }

    graph_weight: float = setting(0.8, "alpha", "pull of the weights towards p; large: federated averaging", gt=0)
    measure: Literal["all", "classifier"] = setting(
        "all", "", "parameters whose changes are compared: all, or those of the classifier block"
    )
    snap_above: float | None = setting(
        0.9, "", "cosines above this count as 1 (official code); null: none do", ge=-1, le=1
    )
    alignment_weight: float = setting(0.01, "lambda", "weight of the direction's term", ge=0)
    alignment: Literal["towards", "code"] = setting(
        "towards",
        "",
        "towards: to the neighbours' direction; code: away from it, the sign of the official code",
        unless={"alignment_weight": (0,)},
    )
    local_steps: int | None = setting(
        None, "", "mini-batches of a local update (official code: 400); null: train.local_epochs", ge=0
    )
    evaluate: Literal["trained", "mixed"] = setting(
        "trained", "", "personalized model: w_i, or u_i of the models as they are then"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.measure == "classifier" and not self.measured(task.network):
            raise ConfigError(
                "algorithm.measure is classifier, of which this model trains nothing: set algorithm.measure=all"
            )

    def measured(self, network: Network) -> tuple[str, ...]:
        """Names of the parameters whose changes are compared."""
        trained = set(network.parameter_names)
        names = network.parameter_names if self.measure == "all" else network.classifier_names
        return tuple(name for name in names if name in trained)

    def init(self, task: Task, context: RoundContext) -> Tree:
        graph = torch.zeros(context.num_clients, context.num_clients, dtype=torch.float64)
        return {**super().init(task, context), "graph": graph}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        initial, own = server["model"], server.get("own", {})
        fresh = {i: {"model": initial} for i in cohort if str(i) not in own}
        known = [i for i in cohort if i not in fresh]
        payloads = fresh | {i: self.collaborated(server["graph"][i].tolist(), own, initial) for i in known}
        trained = clients.map(self.local_update, cohort, {}, payloads)
        changes = [[leaf - initial[name] for name, leaf in parts["measured"].items()] for parts in trained.values()]
        graph, members = server["graph"].clone(), list(trained)
        samples = clients.num_samples(members).astype(np.float64)
        weights = mixing_weights(self.distances(cosines(changes)), samples / samples.sum(), self.graph_weight)
        for i, row in zip(members, weights, strict=True):
            graph[i] = 0
            graph[i, members] = torch.from_numpy(row)
        return {"own": {**own, **{str(i): parts for i, parts in trained.items()}}, "graph": graph}

    def distances(self, cosine: Array) -> Array:
        """d_ij, minus the cosines."""
        return -cosine if self.snap_above is None else np.where(cosine > self.snap_above, -1.0, -cosine)

    def collaborated(self, row: Sequence[float], own: Tree, initial: Tree) -> Tree:
        """A client's mixture u_i, and its direction s_i if that is of use."""
        weights = {i: weight for i, weight in enumerate(row) if weight}
        parts = [own[str(i)] for i in weights]
        sent = {"model": weighted_sum([_whole(one, initial) for one in parts], list(weights.values()))}
        if self.alignment_weight:
            vectors = [{**one["measured"], **one.get("others", {})} for one in parts]
            lengths = [max(float(squared_norm(vector)), _LEAST_SQUARE) ** 0.5 for vector in vectors]
            shares = [weight / length for weight, length in zip(weights.values(), lengths, strict=True)]
            sent["direction"] = weighted_sum(vectors, shares)
        return sent

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return limits_without_effect("local_steps", self.local_steps, context.train)

    async def local_update(self, client: Client, model: Tree, direction: Tree | None = None) -> Tree:
        """Trains the received mixture; returns the parameters that are compared, the ``others``, and buffers."""
        network = client.task.network
        reads = {} if direction is None else {"direction": direction}
        objective = loss() if direction is None else self.objective
        trained = await client.train(model, objective, frozen=reads or None, steps=self.local_steps)
        client.publish(personalized=Predictor.of(trained), mixture=Predictor.of(model))
        names = self.measured(network)
        rest = [name for name in network.parameter_names if name not in names]
        groups = {"measured": names, "others": rest, "buffers": network.buffer_names}
        return {group: part(trained, members) for group, members in groups.items() if members}

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """CE(w) - lambda <s, w> / ||w||, or plus lambda of it."""
        sign = -1 if self.alignment == "towards" else 1
        found: Tensor = task.loss(model, batch)
        return found + sign * self.alignment_weight * along(parameters(model, task), frozen["direction"])

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """Each client's model; to be mixed, those of its neighbours too."""
        own, initial = server.get("own", {}), server["model"]
        models = {int(i): _whole(parts, initial) for i, parts in own.items()}
        found: dict[int, Tree] = {i: {"own": model} for i, model in models.items()}
        if self.evaluate == "mixed":
            for i in found:
                weights = {j: weight for j, weight in enumerate(server["graph"][i].tolist()) if weight}
                found[i]["neighbours"] = {str(j): models[j] for j in weights}
                found[i]["weights"] = {str(j): weight for j, weight in weights.items()}
        return {"model": initial}, found

    @property
    def joins_for(self) -> str:
        return "train.local_epochs" if self.local_steps is None else "algorithm.local_steps"

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains from the initial model, as every client does at first."""
        found = await self.local_update(client, server["model"])
        return {"own": _whole(found, server["model"])}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        own = server["own"] if "own" in server else server["model"]
        if self.evaluate == "trained":
            return {"personalized": Predictor.of(own)}
        neighbours = server.get("neighbours", {"": own})
        mixed = weighted_sum(list(neighbours.values()), list(server.get("weights", {"": 1.0}).values()))
        return {"personalized": Predictor.of(mixed), "local": Predictor.of(own)}


def along(model: Tree, direction: Tree) -> Tensor:
    """<s, w> / ||w||, whose gradient s / ||w|| - <s, w> w / ||w||^3 is orthogonal to w; a scalar."""
    length = squared_norm(model).clamp_min(_LEAST_SQUARE).sqrt()
    return product(model, {name: direction[name] for name in model}) / length


def _whole(parts: Tree, like: Tree) -> Tree:
    """The model, its tensors in the order of another's."""
    model = {**parts["measured"], **parts.get("others", {}), **parts.get("buffers", {})}
    return {name: model[name] for name in like}
