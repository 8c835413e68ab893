"""FedPer: a shared body, and personal heads."""

from __future__ import annotations

from typing import ClassVar, Literal

from algorithms.parts.partial import PartialModel


class FedPer(PartialModel):
    """FedPer: the clients share the body of the model, and each keeps its own head.

    A client joins the received body G with its head P_k and minimises CE(G, P_k) over both jointly, with one
    optimizer. It keeps P_k and sends G_k, of which the server takes the mean. Buffers (running statistics) are part
    of the body.

    Server: body G. Client: head P_k, at first that of the common initial model; never sent. Down: G. Up: G_k and n_k.
    Evaluated: the latest G with the client's P_k (``personalized``); a client never sampled has the initial head.
    There is no global model.

    The official SuPerFed code personalizes all fully connected layers: ``head_group`` ``classifier_block``.

    References:
        Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers, arXiv:1912.00818,
        2019, Algorithms 1 (clients) and 2 (server).
    """

    name: Literal["fedper"] = "fedper"
    citation: ClassVar[str] = "Arivazhagan et al., arXiv 2019"
    no_example_privacy: ClassVar[str] = ""
    client_keeps: ClassVar[str] = "P_k"
    server_keeps: ClassVar[str] = "G"
