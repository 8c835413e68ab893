"""LotteryFL: clients look for winning tickets, subnetworks of the initial weights; the server averages these."""

from __future__ import annotations

from typing import ClassVar, Literal

from algorithms.base import setting
from algorithms.parts.masks import masked
from algorithms.parts.partial import part
from algorithms.parts.subnetworks import Subnetworks, differ
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.params import Tree

_NOTHING = {"prune_share": (0,), "target": (0,)}


class LotteryFL(Subnetworks):
    """LotteryFL: a client whose subnetwork does well prunes it, and trains what is left from the initial weights.

    Client k has a mask m_k of the elements of weights that it keeps, at first all. Where the received model does well
    enough under its mask, it takes in each tensor the share r of the kept elements with the least magnitude out of the
    mask, until the share p of the tensor is gone, and begins with the initial weights w_0 again, as the lottery ticket
    hypothesis says:

        accuracy(m_k w) > theta:    m_k <- prune_r(m_k, w),    w_k <- m_k w_0
        else:                       w_k <- m_k w

    with the accuracy on the client's validation samples. Then it trains the kept elements of w_k alone. The server
    takes the mean of each element over the clients that keep it,

        w <- sum_k m_k w_k / sum_k m_k

    and leaves what nobody keeps as it was. Biases and buffers (running statistics) are never pruned; biases begin again
    with the weights.

    Server: w. Client: m_k. Down: w. Up: the kept elements of w_k, and one bit for each element of a tensor that is not
    whole. Evaluated: w (``global``), and m_k w (``personalized``), which is w for a client never sampled.

    References:
        Li, Sun, Wang, Duan, Li, Chen, Li: LotteryFL: Personalized and Communication-Efficient Federated Learning with
        Lottery Ticket Hypothesis on Non-IID Datasets, 2020 (arXiv 2008.03371).
    """

    name: Literal["lotteryfl"] = "lotteryfl"
    citation: ClassVar[str] = "Li et al., 2020"

    prune_share: float = setting(
        0.1, "r", "share of a tensor's kept elements that a client prunes at once", ge=0, le=1, unless={"target": (0,)}
    )
    target: float = setting(
        0.5, "p", "share of a tensor's elements that a client prunes in all", ge=0, le=1, unless={"prune_share": (0,)}
    )
    accuracy_threshold: float = setting(
        0.2, "theta", "accuracy that the received model must be above", ge=0, le=1, unless=_NOTHING
    )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Prunes if the received model does well enough, and trains the kept elements."""
        masks = self.masks_of(client, model)
        start = masked(model, masks)
        fewer = self.pruned(masks, start)
        if differ(fewer, masks) and await self.accuracy(client, start) > self.accuracy_threshold:
            masks = fewer
            initial = part(client.initial_model(), client.task.network.parameter_names)
            start = {**start, **masked(initial, masks)}
        return self.reply(client, await self.trained(client, start, masks), masks)
