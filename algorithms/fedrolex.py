"""FedRolex: each client trains a window of the hidden units, which rolls on in every round."""

from __future__ import annotations

from typing import ClassVar, Literal

from algorithms.base import setting
from algorithms.parts.submodels import ScaledSubmodels
from algorithms.parts.widths import Held, window
from rayfl.engine.round_context import RoundContext
from rayfl.models.units import Units


class FedRolex(ScaledSubmodels):
    """FedRolex: each client trains a window of the hidden units, which rolls on in every round.

    In round t a client of width r_k has ceil(r_k d) of the d units of each hidden layer, from t on,

        t mod d,  (t + 1) mod d,  ...,  (t + ceil(r_k d) - 1) mod d

    so that all units of the server's model are trained in turn, also if no client has all of them. Inputs and classes
    stay whole. In training the outputs of its hidden linear layers and convolutions are divided by r_k. Each element of
    the server's model becomes the mean over the clients of the cohort that have it, and stays as it is if nobody has.

    Server: model w. Client: nothing. Down: the client's units of w. Up: these, trained, and n_k. Evaluated: w
    (``global``) and the units of w that the client has in that round (``submodel``), their outputs divided by r_k.

    References:
        Alam, Liu, Yan, Zhang: FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction,
        NeurIPS 2022 (arXiv:2212.01548).
    """

    name: Literal["fedrolex"] = "fedrolex"
    citation: ClassVar[str] = "Alam et al., NeurIPS 2022"

    shift: int = setting(
        1,
        "",
        "units by which the window rolls on in a round; 0: it stays, HeteroFL",
        ge=0,
        unless={"widths": ((1.0,),)},
    )

    @property
    def moves(self) -> bool:
        return super().moves or self.shift > 0

    def held(self, client: int, context: RoundContext, round: int, units: Units) -> Held:
        return window(units, self.width(client, context, round), round * self.shift)
