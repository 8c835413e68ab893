"""FedEMA: clients mix their own networks with the global one, the more of their own the further it is."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import setting
from algorithms.parts.partial import part
from algorithms.parts.targets import KeepsTarget, predictor_names
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.models.base import Network
from rayfl.params import Tree, copy, interpolate, squared_distance
from rayfl.tasks.base import Predictor


class FedEMA(KeepsTarget):
    """FedEMA: a client begins with a mixture of the global network and of its own one, by how far these are apart.

    A client that has trained before receives the global network w, and trains from

        w_k <- mu w_k + (1 - mu) w,    mu = min(lambda_k ||w - w_k||, 1)

    with the network w_k that it has trained last. The norm is that of the encoder, the mixture is of encoder and
    predictor. A client's lambda_k is found once, at its first mixture, as tau / ||w - w_k||, so that mu is tau there.
    A client that has not trained before begins with w. With ``task.objective=byol`` it keeps its target network, which
    is never sent.

    Server: w. Client: w_k, the divergence that sets lambda_k, and with BYOL the target network xi_k; never sent but
    w_k, after training. Down: w. Up: w_k and n_k. Evaluated: w (``global``).

    References:
        Zhuang, Wen, Zhang: Divergence-aware Federated Self-Supervised Learning, ICLR 2022, eqs. 2 to 5 and
        Algorithm 1.
    """

    name: Literal["fedema"] = "fedema"
    citation: ClassVar[str] = "Zhuang et al., ICLR 2022"
    client_keeps: ClassVar[str] = "w_k, lambda_k, xi_k"

    scale: float | None = setting(
        None, "lambda", "factor of the divergence; null: of each client its own, by the autoscaler", ge=0
    )
    scale_target: float = setting(
        0.7, "tau", "mu of a client's first mixture, which sets its lambda_k", ge=0, le=1, only={"scale": (None,)}
    )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Mixes the received network with the client's own, and trains the mixture."""
        trained = await self.train_online(client, self.mixture(client, model), model)
        client.state["online"] = copy(trained)
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def mixture(self, client: Client, model: Tree) -> Tree:
        """The network that a client begins with; keeps the divergence of its first mixture, which sets its lambda_k."""
        own: Tree | None = client.state.get("online")
        if own is None:
            return model
        names = encoder_names(client.task.network)
        distance = squared_distance(part(model, names), part(own, names)).sqrt()
        if self.scale is not None:
            return interpolate(model, own, (self.scale * distance).clamp(max=1))
        first: Tensor = client.state.get("divergence", distance)
        # Networks that are equal say nothing about a scale: their divergence is none to go by.
        client.state["divergence"] = first = torch.where(first > 0, first, distance)
        share = torch.where(first > 0, self.scale_target * distance / first, 0)
        return interpolate(model, own, share.clamp(max=1))


def encoder_names(network: Network) -> tuple[str, ...]:
    """Returns the names of all parameters but the predictor's; of a network that is nothing else, of all."""
    predictor = set(predictor_names(network))
    return tuple(name for name in network.parameter_names if name not in predictor) or network.parameter_names
