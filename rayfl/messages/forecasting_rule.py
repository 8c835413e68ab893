"""A robust rule that first drops the messages that are furthest from what earlier rounds let expect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from rayfl.aggregation.forecasting import floating_size, forecast, in_places
from rayfl.messages.aggregation_rule import NOTHING, Known, Messages, Received, Rule
from rayfl.messages.aggregators import Mean
from rayfl.messages.mixing_rules import Then
from rayfl.params import Tree


class Flanders(Rule):
    """Another rule, of the messages nearest to a forecast (FLANDERS: Gabrielli et al., arXiv 2303.16668).

    The messages of a round are the rows of a matrix. A matrix autoregressive model of the last rounds says what each
    client should send, and those whose messages are nearest to that are kept. Before the second round there is nothing
    to learn from, and all are kept. Who is not in an earlier round, or was dropped there, counts as if it had sent what
    the server then made of that round's messages.
    """

    name: Literal["flanders"] = "flanders"
    kept: int = Field(ge=1, description="k, how many messages of a round are kept")
    then: Then = Field(
        Mean(), description="the rule that the kept messages are given to: a name, or a section as this one"
    )
    window: int = Field(2, ge=1, description="l, of how many rounds before this one the model is")
    coordinates: int | None = Field(
        500, ge=1, description="how many numbers of a message are looked at, drawn once for the run; null: all"
    )
    series: Literal["models", "changes"] = Field(
        "models", description="what is forecast: what clients send (the paper), or how it differs from what they got"
    )
    distance: Literal["euclidean", "cosine"] = Field("euclidean", description="how far a message is from its forecast")
    iterations: int = Field(100, ge=1, description="how often the two matrices of the model are found in turn")
    ridge: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="weight of their squared norms, beside errors in mean squares"
    )

    @model_validator(mode="after")
    def _enough_are_kept(self) -> Self:
        if self.kept < self.then.least:
            raise ValueError(
                f"kept: {self.then.name} needs {self.then.least} messages, and {self.kept} are kept: raise kept"
            )
        return self

    @property
    def least(self) -> int:
        return self.kept

    def combine(self, messages: Messages, received: Received, known: Known = NOTHING) -> Tree:
        chosen = self._chosen(messages, received, known)
        return self.then.combine([messages[i] for i in chosen], received, self._known_then(known, chosen))

    def memory_after(self, messages: Messages, received: Received, known: Known, found: Tree) -> Tree:
        chosen, places = self._chosen(messages, received, known), self._places(messages, known)
        kept = [messages[i] for i in chosen]
        of_clients = {str(known.clients[i]): self._row(messages[i].tree, places, received) for i in chosen}
        now = {"found": self._row(found, places, received), "clients": of_clients}
        rounds = [*self._rounds(messages, known), now][-self.window :]
        then = self.then.memory_after(kept, received, self._known_then(known, chosen), found)
        series: Tree = {
            "places": places,
            "size": torch.tensor(floating_size(messages[0].tree)),
            "rounds": {str(number): {**one} for number, one in enumerate(rounds)},
        }
        return {"series": series, **({"then": then} if then else {})}

    def _chosen(self, messages: Messages, received: Received, known: Known) -> list[int]:
        """The positions of the messages that are kept, ascending; of equally near ones the first."""
        rounds, places = self._rounds(messages, known), self._places(messages, known)
        if not rounds:
            return list(range(len(messages)))
        past = [
            torch.stack([one["clients"].get(str(client), one["found"]) for client in known.clients]) for one in rounds
        ]
        expected = forecast(past, self.ridge, self.iterations)
        sent = torch.stack([self._row(message.tree, places, received) for message in messages])
        order = self._distances(sent, expected).sort(stable=True).indices[: self.kept]
        return sorted(order.tolist())

    def _distances(self, sent: Tensor, expected: Tensor) -> Tensor:
        found: Tensor = (sent - expected).norm(dim=1)
        return found if self.distance == "euclidean" else 1 - F.cosine_similarity(sent, expected, dim=1)

    def _rounds(self, messages: Messages, known: Known) -> Sequence[Any]:
        """What is remembered, from the first round on; nothing where messages have become others."""
        series = known.memory.get("series")
        if series is None or int(series["size"]) != floating_size(messages[0].tree):
            return []
        return [series["rounds"][number] for number in sorted(series["rounds"], key=int)]

    def _places(self, messages: Messages, known: Known) -> Tensor:
        """Which numbers of a message are looked at, ascending."""
        series, size = known.memory.get("series"), floating_size(messages[0].tree)
        if series is not None and int(series["size"]) == size:
            places: Tensor = series["places"]
            return places
        if self.coordinates is None or self.coordinates >= size:
            return torch.arange(size)
        generator = np.random.Generator(np.random.Philox(known.seed))
        return torch.from_numpy(np.sort(generator.choice(size, size=self.coordinates, replace=False)))

    def _row(self, tree: Tree, places: Tensor, received: Received) -> Tensor:
        return in_places(tree, places, received if self.series == "changes" else None)

    def _known_then(self, known: Known, chosen: Sequence[int]) -> Known:
        """What the rule knows that the kept messages are given to: of another seed than what is drawn here."""
        clients = tuple(known.clients[i] for i in chosen)
        return replace(known, clients=clients, memory=known.memory.get("then", {}), seed=known.seed + 1)
