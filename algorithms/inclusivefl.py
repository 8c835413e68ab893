"""InclusiveFL: models of several depths that share their layers, and learn their last one from deeper models, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.depth_clients import DepthClients
from algorithms.parts.exits import Exits, Parts, classified, mean_of_holders, parts_of
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.models.depths import Stage
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait


class InclusiveFL(DepthClients):
    """InclusiveFL: models of several depths share their layers, and deeper ones teach the shallow ones' last layer.

    The model of depth i of D has the first ceil(i S / D) of the network's S stages (a stage is a layer with what
    follows it up to the next one, or a residual block) and one classifier of its own after them; that of depth D is the
    network. Its last stage is its own, too (``own_last``): it has to do what a deeper model does in several. The other
    stages are those of all depths. A client trains the model of its depth by its one classifier.

    The server takes the mean of each tensor over the clients of the cohort that have it; a tensor that nobody has stays
    as it is. Of the last stage L_i of the model of depth i < D it goes, with g_i = w - mean its pseudo-gradient,

        w <- w - (beta m_i + (1 - beta) g_i)

    where m_i, at first 0, is what the next deeper model of depth j has last moved by in the stages from L_i to its own
    last one,

        m_i = mean of g_j over the stages L_i, ..., L_j

    of those whose tensors are of the same shapes as in L_i; g_j of L_i itself always is.

    Server: w, of each smaller depth the last stage and the classifier, and m_i. Client: nothing. Down: the model of the
    client's depth. Up: the same, trained. Evaluated: w (``global``), and the model of the client's depth
    (``submodel``); with ``score_sizes`` the models of all depths (``size=i``).

    References:
        Liu, Wu, Wu, Wang, Lyu, Chen, Xie: No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices,
        KDD 2022.
    """

    name: Literal["inclusivefl"] = "inclusivefl"
    citation: ClassVar[str] = "Liu et al., KDD 2022"
    server_keeps: ClassVar[str] = "w, L_i, m_i"
    newcomer: ClassVar[str] = "the model of its depth"
    needs: ClassVar[Mapping[Trait, str]] = {"features": "models of unlike depths have classifiers of their own"}

    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_k", "weights of the mean of a tensor, relative to their sum over the clients that have it"
    )
    own_last: bool = setting(
        True, "", "whether models of unlike depths have a last stage of their own, which deeper ones teach", kept=True
    )
    momentum_share: float = setting(
        0.2,
        "beta",
        "share of the deeper model's change in that of the last stage",
        ge=0,
        le=1,
        only={"own_last": (True,)},
    )
    score_sizes: bool = setting(False, "", "whether the models of all depths have rows of results")

    def init(self, task: Task, context: RoundContext) -> Tree:
        model, exits = super().init(task, context)["model"], self.exits(task)
        drawn = exits.drawn(next(iter(model.values())), context.streams.generator("init.exits"))
        server: Tree = {"model": model, "exits": drawn}
        if self.own_last and exits.count > 1:
            smaller = range(1, exits.count)
            last = {depth: _last(exits, depth).names for depth in smaller}
            server["last"] = {_key(depth, name): model[name] for depth in smaller for name in last[depth]}
            taught = [depth for depth in smaller if self._deeper(depth, exits.count) is not None]
            names = [(depth, name) for depth in taught for name in _parameters(_last(exits, depth), task)]
            if names:  # a tree without leaves is not stored
                server["momentum"] = {_key(depth, name): model[name] * 0 for depth, name in names}
        return server

    def _deeper(self, depth: int, count: int) -> int | None:
        """The next of the clients' depths; None for the deepest."""
        return min((one for one in self.those(count) if one > depth), default=None)

    def model_of(self, server: Tree, exits: Exits, depth: int) -> Parts:
        """The model of a depth.

        Args:
            server: the server's tree.
            exits: the network with its classifiers.
            depth: 1 to D.
        """
        parts = exits.cut(parts_of(server), depth)
        own = {name: leaf for name, leaf in parts["exits"].items() if name.startswith(f"{depth}.")}
        if self._owns(exits, depth):
            last = {name: server["last"][_key(depth, name)] for name in _last(exits, depth).names}
            parts["model"] = {**parts["model"], **last}
        return {"model": parts["model"], "exits": own}

    def _owns(self, exits: Exits, depth: int) -> bool:
        """Whether the model of a depth has a last stage that is in no other."""
        return self.own_last and depth < exits.count

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        exits, context = self.exits(clients.task), clients.context
        depths = {client: self.depth(client, context, exits.count) for client in cohort}
        sent = {depth: self.model_of(server, exits, depth) for depth in sorted(set(depths.values()))}
        payloads: dict[int, Tree] = {client: {**sent[depth]} for client, depth in depths.items()}
        replies = clients.means(self.local_update, cohort, {}, payloads)
        means = {int(depth): parts_of(mean) for depth, mean in replies.items()}
        own = [1] * len(cohort) if self.aggregation == "uniform" else clients.num_samples(cohort).tolist()
        weights = dict.fromkeys(sent, 0)
        for client, weight in zip(cohort, own, strict=True):
            weights[depths[client]] += weight
        found: Tree = {"model": {}, "exits": {**parts_of(server)["exits"]}}
        for name, level in exits.levels(parts_of(server))["model"].items():
            having = [d for d in means if d >= level and not (self._owns(exits, d) and name in _last(exits, d).names)]
            those = [means[depth]["model"][name] for depth in having]
            found["model"][name] = mean_of_holders(server["model"][name], those, [weights[d] for d in having])
        for mean in means.values():
            found["exits"] |= mean["exits"]
        return {**found, **self._taught(server, sent, means, exits, clients.task)} if "last" in server else found

    def _taught(
        self, server: Tree, sent: Mapping[int, Parts], means: Mapping[int, Parts], exits: Exits, task: Task
    ) -> Tree:
        """The last stages of the smaller models, and the momenta for the next round."""
        last, known, beta = dict(server["last"]), server.get("momentum", {}), self.momentum_share
        momentum = dict(known)
        for depth, mean in means.items():
            for name in _last(exits, depth).names if self._owns(exits, depth) else ():
                key, moved = _key(depth, name), mean["model"][name]
                if key in known:
                    moved = last[key] - (beta * known[key] + (1 - beta) * (last[key] - moved))
                last[key] = moved
        for depth in range(1, exits.count):
            deeper = self._deeper(depth, exits.count)
            if deeper is None or deeper not in means:
                continue
            names = _parameters(_last(exits, depth), task)
            before, after = sent[deeper]["model"], means[deeper]["model"]
            shapes = [before[name].shape for name in names]
            found: list[list[Tensor]] = []
            for stage in exits.between(depth, deeper):
                others = _parameters(stage, task)
                if [before[name].shape for name in others] == shapes:
                    found.append([before[name] - after[name] for name in others])
            for place, name in enumerate(names):
                total = found[0][place]
                for one in found[1:]:
                    total = total + one[place]
                momentum[_key(depth, name)] = total / len(found)
        return {"last": last, "momentum": momentum} if momentum else {"last": last}

    async def local_update(self, client: Client, model: Tree, exits: Tree) -> Weighted:
        """Trains the model of the client's depth."""
        network = self.exits(client.task)  # found here, once for each process: no network can be made inside a step
        trained = await client.train({"model": model, "exits": exits}, self.objective)
        client.publish(local=classified(parts_of(trained), network.count, -1))
        depth = self.depth(client.id, client.context, network.count)
        weight = 1 if self.aggregation == "uniform" else client.num_samples
        return Weighted(trained, weight, group=str(depth))

    @property
    def objective(self) -> Sum:
        """The loss of the one classifier."""
        return function(self._loss)

    def _loss(self, trained: Tree, batch: Batch, task: Task, frozen: object, draw: object) -> Tensor:
        logits = self.exits(task).logits(parts_of(trained), batch.x, training=True, mask=batch.mask)
        return task.loss_of(logits[-1], batch)

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        found, exits = {"global": Predictor.of(server["model"])}, self.exits(task)
        for depth in range(1, exits.count + 1) if self.score_sizes else ():
            found[f"size={depth}"] = classified(self.model_of(server, exits, depth), exits.count, -1)
        return found

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        exits = self.exits(client.task)
        own = self.model_of(server, exits, self.depth(client.id, client.context, exits.count))
        return {**self.global_predictors(server, client.task), "submodel": classified(own, exits.count, -1)}


def _last(exits: Exits, depth: int) -> Stage:
    """The last stage of the model of a depth."""
    return exits.between(depth, depth)[0]


def _parameters(stage: Stage, task: Task) -> list[str]:
    """The parameters of a stage, in its order."""
    return [name for name in stage.names if name in task.network.parameter_names]


def _key(depth: int, name: str) -> str:
    return f"{depth}.{name}"
