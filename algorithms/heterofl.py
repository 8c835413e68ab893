"""HeteroFL: each client trains the first units of every hidden layer, as many as its width allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch

from algorithms.base import setting
from algorithms.parts.submodels import ScaledSubmodels
from algorithms.parts.widths import Held, count_of, window
from rayfl.engine.round_context import RoundContext
from rayfl.models.units import Units


class HeteroFL(ScaledSubmodels):
    """HeteroFL: each client trains the first units of every hidden layer, as many as its width allows.

    A client of width r_k has the first ceil(r_k d) of the d units of each hidden layer, so that the submodels are
    nested. Inputs and classes stay whole. In training the outputs of its hidden linear layers and convolutions are
    divided by r_k. An element of the server's model becomes the mean over the clients S_ij of the cohort that have it,

        w_ij <- sum_k q_k w_k,ij / sum_k q_k,    k in S_ij = {k in S: i <= ceil(r_k d_out), j <= ceil(r_k d_in)}

    and stays as it is where there are none. With ``units=random`` a client has as many units, drawn in every round:
    federated dropout.

    Server: model w. Client: nothing. Down: the client's units of w. Up: these, trained, and n_k. Evaluated: w
    (``global``) and the client's units of w (``submodel``), whose outputs are divided by r_k as in training.

    References:
        Diao, Ding, Tarokh: HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
        Clients, ICLR 2021. Random units: Caldas, Konecny, McMahan, Talwalkar: Expanding the Reach of Federated Learning
        by Reducing Client Resource Requirements, arXiv 1812.07210, 2018.
    """

    name: Literal["heterofl"] = "heterofl"
    citation: ClassVar[str] = "Diao et al., ICLR 2021"

    units: Literal["first", "random"] = setting(
        "first",
        "",
        "which units a client has: the first ones, or others in every round, each client's own draw",
        unless={"widths": ((1.0,),)},
    )

    @property
    def moves(self) -> bool:
        return super().moves or self.units == "random"

    def remarks(self, context: RoundContext) -> Sequence[str]:
        most = max(self.widths)
        if self.units == "random" or most == 1:
            return super().remarks(context)
        untrained = (
            f"no client has more than {most:g} of the units (algorithm.widths): the others of the global model stay"
        )
        return (*super().remarks(context), f"{untrained} as they are drawn, and its score has them")

    def held(self, client: int, context: RoundContext, round: int, units: Units) -> Held:
        width = self.width(client, context, round)
        if self.units == "first":
            return window(units, width)
        generator = context.streams.generator("units", round, client)
        return tuple(
            torch.from_numpy(generator.choice(size, count_of(size, width), replace=False)).sort().values
            for size in units.sizes
        )
