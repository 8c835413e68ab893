"""LG-FedAvg: personal bodies, and a shared head."""

from __future__ import annotations

from typing import ClassVar, Literal

from algorithms.parts.partial import PartialModel


class LGFedAvg(PartialModel):
    """LG-FedAvg: each client keeps its own body (representation), and all share the head; the mirror of FedPer.

    A client joins its body P_k with the received head G and minimises CE(P_k, G) over both jointly, with one
    optimizer. It keeps P_k and sends G_k, of which the server takes the mean. Buffers (running statistics) are part
    of the body, so they never travel.

    Server: head G. Client: body P_k, at first that of the common initial model; never sent. Down: G. Up: G_k and n_k.
    Evaluated: the client's P_k with the latest G (``personalized``); a client never sampled has the initial body.
    There is no global model.

    The original starts from a model pre-trained by federated averaging, weights clients equally (``aggregation``
    ``uniform``) and reports for every client its best model so far on test data; here training starts from scratch
    and the latest model is evaluated. The official SuPerFed code shares all fully connected layers: ``head_group``
    ``classifier_block``. FL-bench shares the first layers, which is the opposite of this method.

    With ``model=structural_gin`` and ``head_group`` ``structure`` clients share what reads the structure of graphs, and
    keep what reads their nodes' numbers: FedStar (Tan et al., AAAI 2023).

    References:
        Liang, Liu, Liu, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally: Federated
        Learning with Local and Global Representations, NeurIPS 2019 Workshop on Federated Learning
        (arXiv:2001.01523), Algorithm 1.
    """

    name: Literal["lg_fedavg"] = "lg_fedavg"
    citation: ClassVar[str] = "Liang et al., arXiv 2020"
    no_example_privacy: ClassVar[str] = ""
    client_keeps: ClassVar[str] = "P_k"
    server_keeps: ClassVar[str] = "G"
    shares: ClassVar[Literal["body", "head"]] = "head"
