"""DFedSAM: decentralized federated averaging with local steps of sharpness-aware minimization."""

from __future__ import annotations

from typing import ClassVar, Literal

from algorithms.base import setting
from algorithms.dfedavgm import DFedAvgM
from algorithms.parts.sharpness import Sharpness


class DFedSAM(Sharpness, DFedAvgM):
    """DFedSAM: DFedAvgM whose local steps take the gradient where the loss nearby is high, as FedSAM's do.

    A local step of client i on a mini-batch, whose mean loss is f, follows the gradient at a point at distance rho
    uphill:

        g = grad f(w),    e = rho g / ||g||,    w <- w - eta grad f(w + e)

    Flat models of unlike clients lose less by being mixed. What is exchanged and mixed, and with which weights, is as
    in DFedAvgM:

        x_i <- sum_{j in S} W_ij z_j,    W_ij = 1 / (1 + max(d_i, d_j)) of neighbours,  W_ii = 1 - sum_{j != i} W_ij

    With rho = 0 it is DFedAvgM, and in a complete graph with all clients FedSAM with uniform weights. Running
    statistics are recorded at w. A step costs two passes.

    Server: nothing; the driver keeps the mean of all x_i for evaluations. Client: x_i. Down: z_j of its neighbours. Up:
    z_i, once for each neighbour. Evaluated: x_i (``personalized``) and the mean of the x_i of all clients (``global``);
    after training also z_i (``local``).

    References:
        Shi, Shen, Wei, Sun, Yuan, Wang, Tao: Improving the Model Consistency of Decentralized Federated Learning,
        ICML 2023, DFedSAM.
    """

    name: Literal["dfedsam"] = "dfedsam"  # type: ignore[assignment]
    citation: ClassVar[str] = "Shi et al., ICML 2023"

    radius: float = setting(0.01, "rho", "length of e; 0 is DFedAvgM", ge=0)
