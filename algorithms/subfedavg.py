"""Sub-FedAvg: clients prune subnetworks of their own out of the shared model; the server averages what they keep."""

from __future__ import annotations

from typing import ClassVar, Literal

from algorithms.base import setting
from algorithms.parts.masks import masked
from algorithms.parts.subnetworks import Subnetworks, differ
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Task

_NOTHING = {"prune_share": (0,), "target": (0,)}


class SubFedAvg(Subnetworks):
    """Sub-FedAvg (Un): every client prunes the weights of least magnitude, and the server averages what is kept.

    Client k has a mask m_k of the elements of weights that it keeps, at first all. It trains them alone from the
    received model, m_k w, to w_k. With prune_r(m, w) the mask that lacks, in each tensor, the share r of the kept
    elements with the least |w|, until the share p of the tensor is gone, let

        m_k' = prune_r(m_k, w_k^1),    m_k'' = prune_r(m_k, w_k)

    be those after the first and after the last epoch. The client prunes, m_k <- m_k'' and w_k <- m_k'' w_k, where

        distance(m_k', m_k'') > epsilon    and    accuracy(m_k'' w_k) > Acc_th

    with the distance the share of elements in which both differ, as a mean over tensors, and the accuracy on the
    client's validation samples. The server takes the mean of each element over the clients that keep it,

        w <- sum_k m_k w_k / sum_k m_k

    and leaves what nobody keeps as it was. Biases and buffers (running statistics) are never pruned.

    Server: w. Client: m_k. Down: w. Up: the kept elements of w_k, and one bit for each element of a tensor that is not
    whole. Evaluated: w (``global``), and m_k w (``personalized``), which is w for a client never sampled.

    References:
        Vahidian, Morafah, Lin: Personalized Federated Learning by Structured and Unstructured Pruning under Data
        Heterogeneity, ICDCS Workshops 2021 (arXiv 2105.00562), its unstructured form.
    """

    name: Literal["subfedavg"] = "subfedavg"
    citation: ClassVar[str] = "Vahidian et al., ICDCS Workshops 2021"

    prune_share: float = setting(
        0.1, "r", "share of a tensor's kept elements that a client prunes at once", ge=0, le=1, unless={"target": (0,)}
    )
    target: float = setting(
        0.3, "p", "share of a tensor's elements that a client prunes in all", ge=0, le=1, unless={"prune_share": (0,)}
    )
    accuracy_threshold: float = setting(
        0.5, "Acc_th", "accuracy that the pruned model must be above", ge=0, le=1, unless=_NOTHING
    )
    distance_threshold: float | None = setting(
        1e-4,
        "epsilon",
        "distance that the masks after the first and after the last epoch must be above; null: it does not matter",
        ge=0,
        unless=_NOTHING,
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.prunes and self.distance_threshold is not None and context.train.local_epochs == 1:
            raise ConfigError(
                "algorithm.distance_threshold compares masks after the first and after the last local epoch, and "
                "train.local_epochs is 1: no client would ever prune. Raise it, or set "
                "algorithm.distance_threshold=null"
            )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the kept elements, and prunes where distance and accuracy allow it."""
        masks, first = self.masks_of(client, model), list[Tree]()

        async def after_epoch(now: Tree) -> None:
            if not first:
                first.append(self.pruned(masks, now))

        compares = self.prunes and self.distance_threshold is not None
        trained = await self.trained(client, masked(model, masks), masks, after_epoch if compares else None)
        fewer = self.pruned(masks, trained)
        if differ(fewer, masks) and self._apart(first, fewer):
            lighter = masked(trained, fewer)
            if await self.accuracy(client, lighter) > self.accuracy_threshold:
                masks, trained = fewer, lighter
        return self.reply(client, trained, masks)

    def _apart(self, first: list[Tree], last: Tree) -> bool:
        """Whether the masks are far enough apart; a client without a step has none after its first epoch."""
        if self.distance_threshold is None:
            return True
        return bool(first) and distance(first[0], last) > self.distance_threshold


def distance(one: Tree, other: Tree) -> float:
    """The share of elements in which masks differ, as a mean over tensors; of one at least."""
    shares = [float((mask != other[name]).double().mean()) for name, mask in one.items()]
    return sum(shares) / len(shares)
