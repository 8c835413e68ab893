"""pFedPara: weights of two low-rank matrices, one shared and one each client's own."""

from __future__ import annotations

from typing import ClassVar, Literal

from algorithms.base import setting
from algorithms.parts.partial import PartialModel


class PFedPara(PartialModel):
    """pFedPara: the clients share one low-rank matrix of each weight, and each keeps another.

    The weight of a layer is

        W = W1 * (W2 + 1) = W1 * W2 + W1    with W1 = X1 Y1^T and W2 = X2 Y2^T

    and products by element. The first term is the client's own, the second is common to all. A client joins what it
    receives, G, with its own factors P_k = (X2, Y2) of all layers and minimises CE(G, P_k) over both jointly, with one
    optimizer. It keeps P_k and sends G_k, of which the server takes the mean: the factors X1 and Y1, biases, weights
    that have no factors, and buffers.

    Needs ``model.factorize=pfedpara``, which says what factors there are, of which rank, and from which values they
    begin.

    Server: shared part G. Client: own factors P_k, at first those of the common initial model; never sent. Down: G.
    Up: G_k and n_k. Evaluated: the latest G with the client's P_k (``personalized``); a client never sampled has the
    initial factors. There is no global model.

    FedPara, of the same paper, is ``model.factorize=fedpara`` with federated averaging or any other method: W is
    W1 * W2, and all factors travel.

    References:
        Hyeon-Woo, Ye-Bin, Oh: FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning,
        ICLR 2022 (arXiv:2108.06098), the section on pFedPara.
    """

    name: Literal["pfedpara"] = "pfedpara"
    citation: ClassVar[str] = "Hyeon-Woo et al., ICLR 2022"
    no_example_privacy: ClassVar[str] = ""
    client_keeps: ClassVar[str] = "P_k"
    server_keeps: ClassVar[str] = "G"

    head_group: Literal["own_factors", "own_factors_and_head"] = setting(
        "own_factors", "", "what stays with the client: the factors of W2, or these and the last layer"
    )
