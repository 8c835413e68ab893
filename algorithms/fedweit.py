"""FedWeIT: parameters shared by all, sparse ones for each stage of a client, and a weighted sum of what others had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.decomposed import based, by_row, composed, merged, shared_names, transferred
from algorithms.parts.masks import kept_count
from algorithms.parts.partial import part
from algorithms.parts.prototypes import class_counts
from algorithms.parts.requirements import without_stages
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import Sum, function
from rayfl.params import Tree, copy, map_leaves, num_bytes
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait

_OWN_SHARE = 3
_MANY_PEERS = 10
"""As many clients' weights as no warning is due for."""
_NEVER_SENT = "it never sends what normalization layers have, and clients keep it for each stage"


class FedWeIT(Algorithm):
    """FedWeIT (weighted inter-client transfer): shared parameters, sparse ones of a stage, and those of others.

    For data that change over rounds (the section ``stages``). Of every layer's weights below the head a client has

        theta_s = B sigmoid(m_s) + A_s + sum_j alpha_sj A_j

    in stage s. B are those of all clients, m_s has a number for each unit (the first dimension), and A_s are a few
    parameters of the client's own. A_j are those that R other clients had at the end of the stage before, which the
    server passes on. Biases, the head and normalization layers are the client's own for each stage, and begin as
    in the initial model; m_s begins as 0, A_s as B / 3, and alpha_sj as 1/R. In a round a client trains B, m_s, A_s,
    alpha_s, those of its own, and A_i of all its earlier stages i, on

        CE(theta_s) + lambda_1 sum_{i <= s} ||A_i||_1 + mu ||m_s||_1 + lambda_2 sum_{i < s} ||b_i - c_i||^2
        b_i = B sigmoid(m_i) + A_i

    c_i is what b_i was as stage s began, so that earlier stages keep what they were. It sends the rows of B of the
    units whose m_s are largest in size, a share rho left out in each layer. The server takes the mean of each row over
    those who send it, and a client keeps its own in the place of rows that nobody has sent. Elements of A_s up to
    lambda_1 in size count as 0, where models are scored and where A_s is sent. A class is scored by the parameters of
    the last stage in which the client had samples of it.

    Server: B, which of its rows have been sent, A_k of the clients of the last stage's last round. Client: B, m_s, A_s,
    alpha_s and its own for each stage, c_i, A_j. Down: B, and A_j once a stage. Up: rows of B; A_k as a stage ends.
    Evaluated: the client's model (``personalized``).

    References:
        Yoon, Jeong, Lee, Yang, Hwang: Federated Continual Learning with Weighted Inter-client Transfer, ICML 2021, eqs.
        1 and 2, Algorithm 1; formulas of the authors' code.
    """

    name: Literal["fedweit"] = "fedweit"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Yoon et al., ICML 2021"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "a class is scored by the parameters of the stage it came in"}
    client_keeps: ClassVar[str] = "B, m_s, A_s, alpha_s, c_s, A_j"
    server_keeps: ClassVar[str] = "B, A_k"
    newcomer: ClassVar[str] = "B, and what a stage begins with"
    no_privacy: ClassVar[str] = "its clients send some rows of their weights, and which ones these are"
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(("statistics", "all"), _NEVER_SENT)

    peers: int | None = setting(
        None,
        "R",
        "other clients whose A_j each is given in a stage; null: all that there are; 0: none",
        ge=0,
        kept=True,
    )
    sparsity_weight: float = setting(
        1e-3, "lambda_1", "weight of the absolute values of A; up to this size elements count as 0", ge=0
    )
    mask_weight: float = setting(0.0, "mu", "weight of the absolute values of m_s", ge=0)
    retention_weight: float = setting(1.0, "lambda_2", "weight of what moves the parameters of earlier stages", ge=0)
    unsent_share: float = setting(0.3, "rho", "share of the units of each layer whose rows are not sent", ge=0, lt=1)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if not shared_names(task, task.network.initialize(0)):
            raise ConfigError(
                "algorithm: fedweit shares the weights of layers below the head, of which this model trains none: "
                "choose a model with hidden layers, or another method, such as flwf"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        found = without_stages(context, "one stage, without what others had before")
        others = context.cohort_size - 1
        if found or self.peers is not None or others <= _MANY_PEERS:
            return found
        return (
            f"algorithm.peers is null: from the second stage on each client is sent the A_j of up to {others} others "
            "and keeps them, each as large as the layers below the head, so that memory and bytes grow with the square "
            f"of the number of clients. Set algorithm.peers, to {_MANY_PEERS} for instance",
        )

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        shared = part(model, shared_names(task, model))
        given = torch.full((context.num_clients,), -1)
        return {"shared": shared, "sent": map_leaves(lambda leaf: leaf.new_zeros(len(leaf)), shared), "given": given}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        context, given, payloads = clients.context, server["given"].clone(), dict[int, Tree]()
        for client in cohort:
            if given[client] != context.stage:
                given[client] = context.stage
                if chosen := self._chosen(server.get("base", {}), client, context):
                    payloads[client] = {"others": chosen}
        sums = clients.mean(self.local_update, cohort, self.sent(server), payloads)
        shares, rows = sums["shares"], sums["rows"]
        found: Tree = {
            "shared": map_leaves(
                lambda old, total, share: torch.where(by_row(share, old) > 0, total / by_row(share, old), old),
                server["shared"], rows, shares,
            ),
            "sent": map_leaves(lambda before, share: ((before > 0) | (share > 0)).to(before), server["sent"], shares),
            "given": given,
        }  # fmt: skip
        if self.peers != 0 and context.stages.ends_after(context.round + 1):
            found["base"] = {str(k): one for k, one in clients.map(self.adaptive, cohort, {}).items()}
        return found

    def sent(self, server: Tree) -> Tree:
        return {"shared": server["shared"], "sent": server["sent"]}

    def _chosen(self, base: Mapping[str, Tree], client: int, context: RoundContext) -> Tree:
        """The A_j that a client is given in a stage, stacked; as many for clients that are in the base themselves."""
        others = sorted((name for name in base if name != str(client)), key=int)
        count = len(base) - 1 if self.peers is None else min(self.peers, len(base) - 1)
        if count < 1:
            return {}
        drawn = context.streams.generator("peers", context.stage, client)
        chosen = [base[others[i]] for i in sorted(drawn.choice(len(others), count, replace=False).tolist())]
        return {name: torch.stack([one[name] for one in chosen]) for name in chosen[0]}

    async def local_update(self, client: Client, shared: Tree, sent: Tree, others: Tree | None = None) -> Weighted:
        """Trains what the client has; returns the rows of B that it sends, and of which units they are.

        Args:
            client: k.
            shared: B of the server.
            sent: which rows of it have ever been sent, 0 or 1, by name.
            others: A_j by name, of shape (R, ...), as a stage begins; None if there are none, or they are known.
        """
        state = client.state
        shared = merged(shared, sent, state.get("shared"))
        self._enter(client, shared, others)
        own, past = state["own"], state.get("past", {})
        trainable = {"shared": shared, **own, "past": {stage: one["adaptive"] for stage, one in past.items()}}
        frozen = {
            "others": state.get("others", {}),
            "masks": {stage: one["mask"] for stage, one in past.items()},
            "anchors": {stage: one["anchor"] for stage, one in past.items()},
        }
        trained = await client.train(trainable, self.objective, frozen=frozen)
        state["shared"] = trained["shared"]
        state["own"] = {name: trained[name] for name in own}
        state["past"] = {stage: {**one, "adaptive": trained["past"][stage]} for stage, one in past.items()}
        client.publish(personalized=self._predictor(client))
        kept = map_leaves(self._kept, trained["mask"])
        rows = map_leaves(lambda leaf, keep: leaf * by_row(keep, leaf), trained["shared"], kept)
        size = sum(
            int(keep.sum()) * num_bytes({"": leaf[:1]}) for keep, leaf in zip(kept.values(), rows.values(), strict=True)
        )
        bits = sum(len(keep) for keep in kept.values())
        return Weighted({"rows": rows, "shares": kept}, 1, size=size + -(-bits // 8))

    def _enter(self, client: Client, shared: Tree, others: Tree | None) -> None:
        """Begins a stage, if it is another one than that of the client's last round."""
        state, stage = client.state, client.context.stage
        if state.get("stage") != stage:
            past = dict(state.get("past", {}))
            if "own" in state:
                last = state["own"]
                extra = transferred(last.get("attention"), state.get("others", {}))
                past[str(state["stage"])] = {name: last[name] for name in ("mask", "adaptive", "rest")} | {
                    "extra": extra
                }
                before = state["shared"]
                past = {
                    name: {**one, "anchor": copy(based(before, one["mask"], one["adaptive"]))}
                    for name, one in past.items()
                }
            state.update(self._begun(client, shared, others or {}), past=past, stage=stage)
        classes = client.task.network.head_shape[0]
        there = class_counts(client.examples().y, classes) > 0
        seen = state.get("seen", torch.full_like(there, -1, dtype=torch.int64))
        state["seen"] = torch.where(there, stage, seen)

    def _begun(self, client: Client, shared: Tree, others: Tree) -> Tree:
        """What a client has as a stage begins: ``own`` and ``others``."""
        initial = client.initial_model()
        own: Tree = {
            "mask": {name: leaf.new_zeros(len(leaf)) for name, leaf in shared.items()},
            "adaptive": {name: leaf / _OWN_SHARE for name, leaf in shared.items()},
            "rest": part(initial, [name for name in initial if name not in shared]),
        }
        if others:
            own["attention"] = {name: leaf.new_full((len(leaf),), 1 / len(leaf)) for name, leaf in others.items()}
        return {"own": own, "others": others}

    def _kept(self, mask: Tensor) -> Tensor:
        """Of which units the rows are sent, 0 or 1: those with the largest values in size, of equal ones the first."""
        count = len(mask) - kept_count(self.unsent_share, len(mask))
        order = mask.abs().argsort(descending=True, stable=True)
        return torch.zeros_like(mask).index_fill(0, order[:count], 1.0)

    async def adaptive(self, client: Client) -> Tree:
        """A_k, without what counts as 0."""
        found: Tree = map_leaves(self._pruned, client.state["own"]["adaptive"])
        return found

    def _pruned(self, leaf: Tensor) -> Tensor:
        return torch.where(leaf.abs() > self.sparsity_weight, leaf, 0.0)

    @property
    def objective(self) -> Sum:
        """What a client goes down."""
        return function(self._value)

    def _value(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        extra = transferred(trained.get("attention"), frozen.get("others", {}))
        value: Tensor = task.loss(composed(trained["shared"], {**trained, "extra": extra}), batch)
        for adaptive in (trained["adaptive"], *trained.get("past", {}).values()):
            for leaf in adaptive.values():
                value = value + self.sparsity_weight * leaf.abs().sum()
        for leaf in trained["mask"].values():
            value = value + self.mask_weight * leaf.abs().sum()
        for stage, anchor in frozen.get("anchors", {}).items():
            now = based(trained["shared"], frozen["masks"][stage], trained["past"][stage])
            for name, leaf in now.items():
                value = value + self.retention_weight * (leaf - anchor[name]).square().sum()
        return value

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        if "own" not in client.state:
            begun = self._begun(client, server["shared"], {})["own"]
            return {"personalized": Predictor.of(self._scored(server["shared"], begun))}
        return {"personalized": self._predictor(client)}

    def _scored(self, shared: Tree, own: Mapping[str, Any]) -> Tree:
        return composed(shared, {**own, "adaptive": map_leaves(self._pruned, own["adaptive"])})

    def _predictor(self, client: Client) -> Predictor:
        """One model a stage, each for the classes that the client had last in it; one for all others, the newest."""
        state = client.state
        own = {**state["own"], "extra": transferred(state["own"].get("attention"), state.get("others", {}))}
        stages = {**state.get("past", {}), str(state["stage"]): own}
        models = [self._scored(state["shared"], one) for one in stages.values()]
        places = {int(stage): place for place, stage in enumerate(stages)}
        which = [places.get(int(stage), len(models) - 1) for stage in state["seen"]]
        if set(which) == {len(models) - 1}:
            return Predictor.of(models[-1])
        return Predictor.of(*models, combine=partial(_by_class, tuple(which)))

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"shared": server["shared"]}, {}


def _by_class(which: tuple[int, ...], models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
    """What the models of stages predict, each of its classes."""
    logits = torch.stack([task.network.logits(model, x, training=False) for model in models])
    chosen = torch.tensor(which, device=logits.device)
    found: Tensor = task.predicted(logits.gather(0, chosen.expand(1, len(x), -1))[0])
    return found
