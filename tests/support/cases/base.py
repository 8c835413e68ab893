"""What the framework may expect of a method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from algorithms.base import Algorithm
from rayfl.data.partitions.stage import NoStages, Staged
from rayfl.models.base import Network
from tests.support.cases.expected import all_names, nothing, whole

SIZES = (9, 12, 6, 10, 7)
COHORTS = ([0, 2], [1, 2, 4], [0, 4], [2, 3])


@dataclass(frozen=True)
class Case:
    """A method, and what the framework may expect of it.

    Attributes:
        algorithm: the method.
        down: scalars that the server sends to a client of the cohort in a round (any round).
        up: scalars that a client uploads.
        uploads: last components of the paths of what a client uploads.
        private: top-level keys of a client's state.
        averages: whether the server has a ``model``, which is an average of the clients' models and a row of the
            results named ``global``.
        everyone: whether all clients take part in every round, not only those that are sampled.
        pooled: whether the client that owns everybody's samples takes part in place of those sampled.
        quiet: rounds (0-indexed) in which nothing travels, and clients reply with nothing.
        relabels: whether results follow the clients when these are given other ids (not if the server draws or keeps
            anything by id or the samples are pooled in the order of the ids).
        train: changes of the training section the method needs.
        stages: how samples change over rounds, without which the method would be another one.
        public: whether the method needs public samples.
        distinct: whether the server sends clients that are alike in all but their number models that differ, or asks
            them for different parts of one.
        trains: whether clients train, and so have models that are scored in every round.
        one_layer: whether the method takes a model of one layer.
        any_layers: whether the method takes models with running statistics and with recurrent layers.
        numbers: plain numbers (of 8 bytes) that travel down and up in addition to the scalars of tensors.
        opening: scalars that in round 0 travel down to and up from every client, sampled or not, before all else.
        steady: whether equally much travels in every round (if not, the method's own tests count it).
        alike: whether clients of equal samples and random numbers reply the same to the bit (not if each has a place of
            its own in a sum over all clients).
    """

    algorithm: Algorithm
    down: Callable[[Network], int] = whole
    up: Callable[[Network], int] = whole
    uploads: Callable[[Network], Iterable[str]] = all_names
    private: frozenset[str] = frozenset()
    averages: bool = True
    everyone: bool = False
    pooled: bool = False
    quiet: frozenset[int] = frozenset()
    relabels: bool = True
    train: dict[str, Any] = field(default_factory=dict)
    stages: NoStages | Staged = field(default_factory=NoStages)
    public: bool = False
    distinct: bool = False
    trains: bool = True
    one_layer: bool = True
    any_layers: bool = True
    numbers: tuple[int, int] = (0, 0)
    opening: tuple[Callable[[Network], int], Callable[[Network], int]] = (nothing, nothing)
    steady: bool = True
    alike: bool = True

    def contacted(self, cohort: Sequence[int]) -> list[int]:
        """The clients that the server contacts in a round."""
        return [len(SIZES)] if self.pooled else list(cohort)

    def cohorts(self) -> list[list[int]]:
        """The cohorts of the rounds."""
        return [list(range(len(SIZES)))] * len(COHORTS) if self.everyone else [list(cohort) for cohort in COHORTS]
