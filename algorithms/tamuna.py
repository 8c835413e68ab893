"""TAMUNA: as many local steps as a coin says, control variates, and means of coordinates over some of the cohort."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.coordinate_shares import Share
from algorithms.parts.mixture import parameters
from algorithms.scaffnew import ControlledSteps
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.private_norm import private_names
from rayfl.params import Tree, add_scaled, num_bytes, zeros_like
from rayfl.tasks.base import Predictor, Task


class Tamuna(ControlledSteps):
    """TAMUNA: Scaffnew with cohorts of some clients, each of which sends a part of the coordinates.

    Client k of K has a control variate h_k, zero at first. The c clients of a cohort begin with the model x and take L
    local steps on mini-batches, with L drawn from the geometric distribution of mean 1/p, the same for all:

        x_k <- x_k - eta (grad f_B(x_k) - h_k)

    A mask q_k, of zeros and ones, says which coordinates of x_k a client sends. The masks of a cohort are drawn so that
    s clients send each coordinate, and all clients as many, up to one. The server takes the mean over these:

        x <- 1/s sum_k q_k x_k

    and the clients of the cohort then renew their control variates in the coordinates that they sent:

        h_k <- h_k + eta_h / eta q_k (x - x_k)

    The sum of all h_k stays zero, and each h_k comes to be the gradient of its own f_k at the optimum of all. eta_h is
    p K (s - 1) / (K - 1) / s where it is not given. With s = c = K it is p, and this is Scaffnew.

    Weight decay is part of f. Buffers (running statistics) have neither mask nor control variate; they are averaged.
    With ``finetune_epochs`` each client fine-tunes the final model by plain steps, without h_k.

    Server: model x. Client: h_k. Down: x and its place in the masks; after the mean q_k x. Up: q_k x_k. Evaluated: x
    (``global``).

    References:
        Condat, Agarsky, Malinovsky, Richtarik: TAMUNA: Doubly Accelerated Federated Learning with Local Training,
        Compression, and Partial Participation, arXiv:2302.09832, 2023, Algorithm 1.
    """

    name: Literal["tamuna"] = "tamuna"
    citation: ClassVar[str] = "Condat et al., arXiv 2023"
    no_privacy: ClassVar[str] = "its clients send parts of models, and control variates follow from their exact means"
    client_keeps: ClassVar[str] = "h_k"
    server_keeps: ClassVar[str] = "x"

    senders: int = setting(2, "s", "how many clients of a cohort send each coordinate", ge=2)
    control_step: float | None = setting(
        None, "eta_h", "step of the control variates; null: p K (s - 1) / (K - 1) / s, the largest of the paper", gt=0
    )
    aggregation: Literal["uniform"] = setting("uniform", "q_k", "weights of the mean of a coordinate: alike (paper)")

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        self.check_steps("TAMUNA", context)
        if context.smallest_cohort < self.senders:
            raise ConfigError(
                f"TAMUNA has each coordinate sent by algorithm.senders={self.senders} clients, and a round may have "
                f"{context.smallest_cohort} (section train): lower algorithm.senders, which is at least 2, or have "
                "more clients in every round"
            )

    def step_of(self, senders: int, clients: int) -> float:
        """eta_h.

        Args:
            senders: s in the round.
            clients: K.
        """
        if self.control_step is not None:
            return self.control_step
        return self.communication_probability * clients * (senders - 1) / (senders * max(clients - 1, 1))

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, names = server["model"], clients.task.network.parameter_names
        order = clients.context.streams.generator("mask", clients.context.round).permutation(len(cohort))
        payloads: dict[int, Tree] = {
            client: {"place": int(place)} for client, place in zip(sorted(cohort), order, strict=True)
        }
        told: Tree = {"model": model, "cohort": len(cohort)}
        mean = clients.mean(self.part, cohort, told, payloads)
        factor = len(cohort) / self._senders(len(cohort))
        moved = {name: factor * leaf if name in names else leaf for name, leaf in mean.items()}
        sizes = {
            client: self.share(len(cohort), names=names, **own).num_bytes(model) for client, own in payloads.items()
        }
        clients.map(self.renew, cohort, {**told, "model": moved}, payloads, down=sizes)
        return {"model": moved}

    def share(self, cohort: int, place: int, names: Sequence[str]) -> Share:
        """The coordinates that a client sends.

        Args:
            cohort: c.
            place: of the client, from 0.
            names: of the parameters.
        """
        return Share(place, cohort, self._senders(cohort), names)

    def _senders(self, cohort: int) -> int:
        """s in a round, which clients that failed may be lacking in."""
        return min(self.senders, cohort)

    async def part(self, client: Client, model: Tree, cohort: int, place: int) -> Weighted:
        """Trains the received model; sends the coordinates of its share, and buffers."""
        network, received = client.task.network, parameters(model, client.task)
        trained = await self.controlled(client, model, client.state.get("control", zeros_like(received)))
        client.publish(local=Predictor.of(trained))
        share = self.share(cohort, place, network.parameter_names)
        mask = share.mask(received)
        client.state["sent"] = {name: torch.where(one, trained[name], 0.0) for name, one in mask.items()}
        buffers = {name: trained[name] for name in network.buffer_names}
        kept = private_names(network, client.context.train.private_norm)
        sizes = num_bytes({name: leaf for name, leaf in buffers.items() if name not in kept})
        return Weighted({**client.state["sent"], **buffers}, size=share.num_bytes(received) + sizes)

    async def renew(self, client: Client, model: Tree, cohort: int, place: int) -> Tree:
        """Renews the control variate in the coordinates that the client sent, whose means it receives."""
        received, sent = parameters(model, client.task), client.state["sent"]
        control = client.state.get("control", zeros_like(received))
        # with a learning rate of 0 nothing has moved, and nothing was learned
        factor = self.step_of(self._senders(cohort), client.context.num_clients) / client.lr if client.lr > 0 else 0.0
        mask = self.share(cohort, place, client.task.network.parameter_names).mask(received)
        told = {name: torch.where(one, received[name] - sent[name], 0.0) for name, one in mask.items()}
        client.state["control"] = add_scaled(control, told, factor)
        del client.state["sent"]
        return {}

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        return None  # what is sent of the last layer is a part of how it changed
