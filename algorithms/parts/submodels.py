"""Clients that train a submodel of the shared model, with as many of its hidden units as their width allows."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.capacities import drawn, in_turn
from algorithms.parts.prototypes import class_counts
from algorithms.parts.widths import (
    Held,
    Scaled,
    bytes_of,
    check_units,
    cut,
    merged,
    padded,
    scaled,
    weights_by_element,
)
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.units import Units
from rayfl.objectives import Sum, frozen, function, loss
from rayfl.objectives.points import Scope
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait

_NO_NORM = "clients of unlike widths have unlike parts of the normalization layers"


class Submodels(Averaging):
    """A method whose clients train some of the hidden units, and whose server averages each element over its holders.

    Only what a client has travels. It trains the whole network with zeros for the other units, which have no gradient,
    so that clients of all widths are alike in a stack.
    """

    personalized: ClassVar[str] = "submodel"
    newcomer: ClassVar[str] = "the units of w that its width allows"
    no_privacy: ClassVar[str] = (
        "its clients send parts of the model, and each number is the mean over those who have it"
    )
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(("statistics", "all"), _NO_NORM)

    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_k", "weights of the mean of an element, relative to their sum over the clients that have it"
    )
    widths: tuple[Annotated[float, Field(gt=0, le=1)], ...] = setting(
        (1.0, 0.5, 0.25, 0.125, 0.0625), "r_k", "shares of each hidden layer's units that clients have", min_length=1
    )
    width_choice: Literal["in_turn", "drawn", "each_round"] = setting(
        "in_turn",
        "",
        "which of the widths a client has: in_turn, client k the one at place k, and again from the first; drawn, one "
        "draw for the run; each_round, a draw in every round",
    )
    shares: tuple[Annotated[float, Field(ge=0)], ...] | None = setting(
        None,
        "",
        "how likely each of the widths is drawn, of any sum; null: all alike",
        only={"width_choice": ("drawn", "each_round")},
    )

    @model_validator(mode="after")
    def _as_many_shares(self) -> Self:
        if self.shares is not None and (len(self.shares) != len(self.widths) or not sum(self.shares) > 0):
            raise ValueError(f"shares: give one for each of the {len(self.widths)} widths, and not all 0")
        return self

    @property
    def moves(self) -> bool:
        """Returns whether a client has other units in another round."""
        return self.width_choice == "each_round"

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_units(self.name, task)
        if self.moves and context.train.persist_optimizer:
            raise ConfigError(
                f"{self.name} needs train.persist_optimizer=false here: clients have other units in every round, so "
                "that the optimizer's buffers would move units that a client does not have"
            )

    def width(self, client: int, context: RoundContext, round: int) -> float:
        """r_k.

        Args:
            client: k; numbers of newcomers too.
            context: of the run.
            round: 0-indexed.
        """
        if self.width_choice == "in_turn":
            return in_turn(self.widths, client)
        drawn_in = round if self.width_choice == "each_round" else None
        return drawn(self.widths, "widths", client, context, self.shares, drawn_in)

    @abstractmethod
    def held(self, client: int, context: RoundContext, round: int, units: Units) -> Held:
        """The units that a client has in a round; other arguments as for :meth:`width`."""

    def factor(self, width: float) -> float:
        """Returns what the outputs of hidden layers of a submodel are multiplied by."""
        return 1.0

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, context, units = server["model"], clients.context, _units(clients.task)
        held = {client: self.held(client, context, context.round, units) for client in cohort}
        parts: dict[tuple[bytes, ...], Tree] = {}  # clients of the same units get the same tensors
        payloads = {}
        for client, own in held.items():
            key = tuple(entries.numpy().tobytes() for entries in own)
            if key not in parts:
                parts[key] = cut(model, own, units)
            payloads[client] = {"model": parts[key]}
        sent = clients.mean(self.local_update, cohort, {}, payloads)
        weights = [1] * len(cohort) if self.aggregation == "uniform" else clients.num_samples(cohort).tolist()
        having, total = weights_by_element(list(held.values()), weights, units, model), math.fsum(weights)
        for name, share in sent.get("having", {}).items():
            having[name] = share.double() * total
        return {"model": merged(model, sent["model"], having, total)}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received units; returns them, with zeros for others, which do not travel."""
        units, width = _units(client.task), self.width(client.id, client.context, client.round)
        held = self.held(client.id, client.context, client.round, units)
        start = padded(model, held, units)
        trained = await self.train(client, start, width)
        client.publish(local=Predictor.of(scaled(trained, self.factor(width), units)))
        return self.reply(client, trained, held, bytes_of(trained, held, units))

    async def train(self, client: Client, start: Tree, width: float) -> Tree:
        """A client's local training.

        Args:
            client: the client.
            start: its units, and zeros.
            width: r_k.
        """
        return await client.train(start, self.objective)

    def reply(self, client: Client, trained: Tree, held: Held, size: int) -> Weighted:
        """What a client adds to the mean; ``size`` are the bytes of its units."""
        return Weighted({"model": trained}, self.weighted(client, {}).weight, size=size)

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        units, context, round = _units(client.task), client.context, client.round
        held = self.held(client.id, context, round, units)
        factor = self.factor(self.width(client.id, context, round))

        def submodel() -> Model:
            return scaled(padded(cut(server["model"], held, units), held, units), factor, units)

        return {**self.global_predictors(server, client.task), "submodel": Predictor.of(submodel)}


class ScaledSubmodels(Submodels):
    """Submodels with HeteroFL's ways of training: outputs divided by the width, and a loss without missing classes."""

    scaler: bool = setting(
        True,
        "",
        "whether outputs of hidden linear layers and convolutions of a submodel are divided by its width r_k; for "
        "networks that normalize them, as the papers' do",
        unless={"widths": ((1.0,),)},
    )
    masked_loss: bool = setting(
        False,
        "",
        "whether logits of classes that a client lacks are 0 in its loss, and its rows of the last layer for them are "
        "in no mean",
    )

    def needed(self) -> Mapping[Trait, str]:
        return {"classes": "masked_loss leaves out the classes that a client lacks"} if self.masked_loss else {}

    def factor(self, width: float) -> float:
        return 1 / width if self.scaler else 1.0

    @property
    def objective(self) -> Sum:
        """CE of the submodel whose hidden outputs are divided by r_k; masked where a client lacks classes."""
        if self.masked_loss:
            return function(self._masked)
        return loss(at=Scaled(frozen("factor"))) if self._scales else loss()

    async def train(self, client: Client, start: Tree, width: float) -> Tree:
        like = next(iter(start.values()))
        reads = {"factor": like.new_tensor(self.factor(width))} if self._scales else {}
        if self.masked_loss:
            reads["present"] = self._present(client).to(like)
        return await client.train(start, self.objective, frozen=reads)

    def reply(self, client: Client, trained: Tree, held: Held, size: int) -> Weighted:
        plain = super().reply(client, trained, held, size)
        if not self.masked_loss:
            return plain
        network, present = client.task.network, self._present(client)
        masks = padded(
            cut({name: torch.ones_like(trained[name]) for name in network.head_names}, held, network.units),
            held,
            network.units,
        )
        masks = {name: mask * present.to(mask).reshape(-1, *[1] * (mask.dim() - 1)) for name, mask in masks.items()}
        kept = {name: leaf * masks[name] if name in masks else leaf for name, leaf in trained.items()}
        classes = -(-len(present) // 8)  # which classes it has, a bit each
        return Weighted({"model": kept, "having": masks}, plain.weight, size=size + classes)

    @property
    def _scales(self) -> bool:
        return self.scaler and set(self.widths) != {1.0}

    def _present(self, client: Client) -> Tensor:
        """1 for the classes of which a client has samples, 0 for others; shape (C,)."""
        return (class_counts(client.examples().y, client.task.network.head_shape[0]) > 0).double()

    def _masked(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        at = Scaled(frozen["factor"]).model(Scope(model, task, frozen, draw)) if self._scales else model
        return task.loss_of(frozen["present"] * task.logits(at, batch), batch)


def _units(task: Task) -> Units:
    network: Any = task.network
    found: Units = network.units
    return found
