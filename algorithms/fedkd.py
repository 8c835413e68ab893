"""FedKD: each client's own mentor and a shared mentee teach each other, and the mentee's changes are compressed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.low_rank import compressed, restored
from algorithms.parts.means import mean_of
from algorithms.parts.transfer import distillation
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree, map_leaves, subtract
from rayfl.tasks.base import Batch, Predictor, Task, Trait

_LEAST = 1e-8
"""What is divided by the sum of two cross-entropies is divided by this at least."""


class FedKD(Algorithm):
    """FedKD: a private mentor and the shared mentee distil each other, and few numbers of the mentee travel.

    A client trains its mentor t_k and its version w_k of the mentee on the same batches, with features f (what the
    last layer reads), logits z, probabilities p, and a projection M_k of the mentee's features. With
    Z = CE(z_t) + CE(z_w) its losses are

        L_t = CE(z_t) + a KL(p_w || p_t) / Z + b ||f_t - M_k f_w||^2 / (d Z)
        L_w = CE(z_w) + a KL(p_t || p_w) / Z + b ||f_t - M_k f_w||^2 / (d Z)

    so that they teach each other the more, the better both know the samples. As in public code both go down the sum
    of the two (``mutual``). Of its change w_k - w it sends for each matrix the singular vectors of the largest
    singular values that hold the share T_t of their squared sum, which grows linearly from ``energy_start`` to
    ``energy_end``. The server adds the equally weighted mean of these, compressed in the same way, to w.

    With two ``model.candidates`` the mentee is the first and the mentor the second. A convolution's kernel is the
    matrix (output channels, everything else). What is no matrix, or has no fewer numbers as factors, is sent as it is.

    Server: mentee w. Client: t_k, at first the common initial model, and M_k; never sent. Down: w. Up: the factors of
    w_k - w. Evaluated: t_k (``personalized``) and w (``global``), after training also w_k (``local``); a client never
    sampled has the initial mentor.

    References:
        Wu, Wu, Lyu, Huang, Xie: Communication-Efficient Federated Learning via Knowledge Distillation, Nature
        Communications 13, 2022, Algorithm 1.
    """

    name: Literal["fedkd"] = "fedkd"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Wu et al., Nat. Commun. 2022"
    needs: ClassVar[Mapping[Trait, str]] = {"distribution": "the two models distill probabilities of classes"}
    client_keeps: ClassVar[str] = "t_k, M_k"
    server_keeps: ClassVar[str] = "w (mentee)"
    newcomer: ClassVar[str] = "w, and a mentor after a local update"
    mixes_architectures: ClassVar[bool] = True
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("statistics", "all"), "clients send changes of the mentee, not the mentee"
    )

    distillation_weight: float = setting(1.0, "a", "weight of the KL divergence between probabilities", ge=0)
    hidden_weight: float = setting(1.0, "b", "weight of the squared distance between features", ge=0)
    mutual: Literal["joint", "separate"] = setting(
        "joint",
        "",
        "both models go down the sum of the two losses (public code), or each down its own, in which what the other "
        "one computes is a constant",
        unless={"distillation_weight and hidden_weight": ((0, 0),)},
    )
    kl_reduction: Literal["batch", "elements"] = setting(
        "batch",
        "",
        "KL is the mean over samples, or over samples and classes (PFLlib), C times weaker",
        unless={"distillation_weight": (0,)},
    )
    mentee_lr: float | None = setting(None, "", "learning rate of the mentee; null: that of the round", ge=0)
    compress: Literal["updates", "parameters", "none"] = setting(
        "updates", "", "what is compressed: the mentee's changes, its parameters themselves (PFLlib), or nothing"
    )
    energy_start: float = setting(
        0.95,
        "T_start",
        "share of the squared singular values kept at first",
        gt=0,
        le=1,
        only={"compress": ("updates", "parameters")},
    )
    energy_end: float = setting(
        0.98, "T_end", "share kept in the last round", gt=0, le=1, only={"compress": ("updates", "parameters")}
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if len(task.candidates) > 2:
            raise ConfigError(
                f"model.candidates has {len(task.candidates)} entries, but FedKD has two models: give the mentee, then "
                "the mentor, or one model for both"
            )

    def energy(self, context: RoundContext) -> float:
        """T_t."""
        return self._energy(context.round, context.rounds)

    def course(self, round: int, rounds: int) -> Any:
        """T_t, where messages are compressed."""
        return None if self.compress == "none" else self._energy(round, rounds)

    def _energy(self, round: int, rounds: int) -> float:
        return self.energy_start + (round + 1) / rounds * (self.energy_end - self.energy_start)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model = server["model"]
        if self.compress == "none":
            return {"model": clients.mean(self.whole_update, cohort, broadcast={"model": model})}
        replies = clients.map(self.compressed_update, cohort, broadcast={"model": model})
        mean = mean_of(Weighted(restored(reply, model)) for reply in replies.values())
        mean = restored(compressed(mean, self.energy(clients.context)), model)
        return {"model": mean if self.compress == "parameters" else map_leaves(torch.add, model, mean)}

    async def whole_update(self, client: Client, model: Tree) -> Weighted:
        """The trained mentee."""
        return Weighted(await self.mutual_update(client, model))

    async def compressed_update(self, client: Client, model: Tree) -> Tree:
        """The trained mentee's change, or with ``compress`` ``parameters`` itself, in few numbers."""
        trained = await self.mutual_update(client, model)
        sent = trained if self.compress == "parameters" else subtract(trained, model)
        return compressed(sent, self.energy(client.context))

    async def mutual_update(self, client: Client, model: Tree) -> Tree:
        """Trains mentor and mentee; keeps the former and returns the latter."""
        start = {"mentor": self._mentor(client), "mentee": model, "projection": self._projection(client, model)}
        groups = {"mentee": ParameterGroup(lr=self.mentee_lr)}
        trained = await client.train(start, self.objective, groups=groups)
        client.state["mentor"], client.state["projection"] = trained["mentor"], trained["projection"]
        mentor = Predictor.of(trained["mentor"], task=client.task.candidates[-1])
        client.publish(personalized=mentor, local=Predictor.of(trained["mentee"]))
        mentee: Tree = trained["mentee"]
        return mentee

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """L_t + L_w."""
        wide, mentor = task.candidates[-1].head_inputs_and_logits(model["mentor"], batch)
        narrow, mentee = task.head_inputs_and_logits(model["mentee"], batch)
        projected = F.linear(narrow, model["projection"]["weight"])
        mentor_loss, mentee_loss = task.loss_of(mentor, batch), task.loss_of(mentee, batch)
        if not self.distillation_weight and not self.hidden_weight:
            return mentor_loss + mentee_loss
        # what the other model computes is a constant, or is trained as well
        given = Tensor.detach if self.mutual == "separate" else _as_it_is
        to_mentor = self.taught(mentor, given(mentee), wide, given(projected), mentor_loss + given(mentee_loss), batch)
        to_mentee = self.taught(mentee, given(mentor), projected, given(wide), given(mentor_loss) + mentee_loss, batch)
        return mentor_loss + mentee_loss + to_mentor + to_mentee

    def taught(
        self, student: Tensor, teacher: Tensor, own: Tensor, other: Tensor, entropies: Tensor, batch: Batch
    ) -> Tensor:
        """(a KL + b MSE) / Z, what one model learns from the other.

        Args:
            student: its logits, shape (b, C).
            teacher: the other's logits, shape (b, C).
            own: its features, shape (b, d).
            other: the other's features, shape (b, d).
            entropies: Z, the sum of both cross-entropies.
            batch: the mini-batch.
        """
        classes = student.shape[1] if self.kl_reduction == "elements" else 1
        divergence = distillation(student, teacher, batch, temperature=1.0) / classes
        distance = batch.mean((own - other).square().mean(-1))
        return (self.distillation_weight * divergence + self.hidden_weight * distance) / entropies.clamp_min(_LEAST)

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.mutual_update(client, server["model"])
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        mentor = Predictor.of(self._mentor(client), task=client.task.candidates[-1])
        return {"global": Predictor.of(server["model"]), "personalized": mentor}

    @staticmethod
    def _mentor(client: Client) -> Tree:
        """t_k, the initial model until the client has trained."""
        stored: Tree | None = client.state.get("mentor")
        return client.initial_model(client.task.candidates[-1]) if stored is None else stored

    @staticmethod
    def _projection(client: Client, model: Tree) -> Tree:
        """M_k, at first uniform values as PyTorch draws those of a linear layer."""
        stored: Tree | None = client.state.get("projection")
        if stored is not None:
            return stored
        inputs, outputs = (candidate.network.head_shape[1] for candidate in (client.task, client.task.candidates[-1]))
        generator = client.context.streams.generator("init.projection", client=client.id)
        bound = 1 / math.sqrt(inputs)
        drawn = torch.from_numpy(generator.uniform(-bound, bound, (outputs, inputs)))
        return {"weight": drawn.to(next(iter(model.values())))}


def _as_it_is(found: Tensor) -> Tensor:
    return found
