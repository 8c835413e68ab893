"""FedHEAL: elements of updates that turn back count nothing, and clients that move far count more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.finetuning import FineTuning
from algorithms.parts.masks import encoded, inverted
from algorithms.parts.partial import joined
from algorithms.parts.shared_elements import mean_of_sharing, message
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.models.private_norm import private_names
from rayfl.params import Tree, num_bytes
from rayfl.tasks.base import Predictor, Task


class FedHEAL(FineTuning):
    """FedHEAL: an average in which elements of updates that turn back count nothing, and clients that move far more.

    Client k of the cohort S trains the received model w to w_k. It knows of each element in which share s_k of its
    earlier rounds w - w_k was not negative, and sends only the elements that go where they went often enough,

        m_k = 1 if s_k > tau where w - w_k >= 0,  if 1 - s_k > tau elsewhere;  else 0

    in its first round all. With d_k, the sum over tensors of the norms of m_k (w - w_k), the server moves the client's
    weight p_k, which begins with 1/|S|,

        dp_k <- (1 - beta) dp_k + beta d_k / sum_j d_j,    p_k <- p_k + dp_k

    where j goes over all clients that have taken part so far, with their last d_j. It takes the mean of each element
    over the clients that send it,

        w <- sum_{k in S} p_k m_k w_k / sum_{k in S} p_k m_k

    and leaves what nobody sends as it was. Buffers (running statistics) are averaged with the weights p_k. With
    ``finetune_epochs`` each client fine-tunes the final model.

    Server: w, and p_k, dp_k and d_k. Client: s_k, as counts. Down: w. Up: d_k, then the elements of w_k that m_k keeps,
    and one bit for each element of a tensor that is not whole. Evaluated: w (``global``).

    References:
        Chen, Huang, Ye: Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity, CVPR
        2024 (arXiv 2405.16585).
    """

    name: Literal["fedheal"] = "fedheal"
    citation: ClassVar[str] = "Chen et al., CVPR 2024"
    no_privacy: ClassVar[str] = (
        "its clients say how far they went and send parts of the model, of which each number is a mean over some"
    )
    client_keeps: ClassVar[str] = "s_k"
    server_keeps: ClassVar[str] = "w, p_k, dp_k, d_k"

    threshold: float | None = setting(
        0.3,
        "tau",
        "share of a client's earlier rounds in which an element went the same way, above which it is sent; null: all "
        "elements are",
        ge=0,
        lt=1,
    )
    momentum: float = setting(
        0.4, "beta", "share of the distances in the step of the weights; 0: all weights stay equal", ge=0, le=1
    )

    def init(self, task: Task, context: RoundContext) -> Tree:
        zeros = {name: torch.zeros(context.num_clients, dtype=torch.float64) for name in ("shares", "steps", "far")}
        return {**super().init(task, context), "weights": zeros}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model = server["model"]
        replies = clients.map(self.local_update, cohort, self.sent(server))
        weights = self.renewed(server["weights"], {client: reply["distance"] for client, reply in replies.items()})
        # in units of the largest, so that equal weights are 1
        shares = weights["shares"] / weights["shares"][list(cohort)].max()
        payloads = {client: {"weight": float(shares[client])} for client in cohort}
        found = clients.mean(self.report, cohort, {}, payloads)
        parameters = mean_of_sharing(found["parameters"], found.get("sharing", {}), model)
        return {"model": joined({**found, "parameters": parameters}, model), "weights": weights}

    def renewed(self, old: Tree, distances: Mapping[int, float]) -> Tree:
        """The weights after a round: ``shares`` p_k, ``steps`` dp_k, and ``far``, the last d_k; float64 (K,) each.

        Args:
            old: those before; all are 0 of a client that has not taken part.
            distances: d_k by client of the cohort.
        """
        cohort = torch.tensor(list(distances))
        far = old["far"].index_copy(0, cohort, torch.tensor(list(distances.values()), dtype=torch.float64))
        moved = far[cohort] / far.sum() if far.any() else torch.zeros(len(cohort), dtype=torch.float64)
        steps = (1 - self.momentum) * old["steps"][cohort] + self.momentum * moved
        shares = old["shares"][cohort]
        shares = torch.where(shares > 0, shares, 1 / len(cohort)) + steps
        return {
            "shares": old["shares"].index_copy(0, cohort, shares),
            "steps": old["steps"].index_copy(0, cohort, steps),
            "far": far,
        }

    async def local_update(self, client: Client, model: Tree) -> Tree:
        """Trains the received model; keeps what it will send, and returns d_k."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        names = [name for name in client.task.network.parameter_names if name not in self._private(client)]
        changes = {name: model[name] - trained[name] for name in names}
        rises = {name: change >= 0 for name, change in changes.items()}
        first = {
            "rounds": 0,
            "rises": {name: torch.zeros_like(rise, dtype=torch.int32) for name, rise in rises.items()},
        }
        rounds, counts = itemgetter("rounds", "rises")(client.state.get("history", first))
        masks = {name: self.consistent(rise, counts[name], rounds) for name, rise in rises.items()}
        counts = {name: counts[name] + rise for name, rise in rises.items()}
        client.state.update(history={"rounds": rounds + 1, "rises": counts}, sent={"model": trained, "masks": masks})
        return {"distance": sum(float((changes[name] * mask).double().norm()) for name, mask in masks.items())}

    def consistent(self, rise: Tensor, count: Tensor, rounds: int) -> Tensor:
        """Returns m_k of one tensor, bool of its shape.

        Args:
            rise: where w - w_k is not negative, bool.
            count: in how many earlier rounds it was not, int32.
            rounds: how many earlier rounds there are.
        """
        if self.threshold is None or not rounds:
            return torch.ones_like(rise)
        return torch.where(rise, count, rounds - count).double() / rounds > self.threshold

    async def report(self, client: Client, weight: float) -> Weighted:
        """Returns the elements that count.

        Args:
            client: k.
            weight: p_k, in units of the largest one of the cohort.
        """
        trained, masks = itemgetter("model", "masks")(client.state.pop("sent"))
        sent = encoded({name: leaf for name, leaf in trained.items() if name not in self._private(client)}, masks)
        return Weighted(message(trained, inverted(masks), client.task.network), weight, size=num_bytes(sent))

    @staticmethod
    def _private(client: Client) -> frozenset[str]:
        return private_names(client.task.network, client.context.train.private_norm)

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return self.sent(server), {}
