"""How the changes of a round become integers with noise, and the sum of these a change of the model again."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayfl.aggregation.compression import on_device
from rayfl.aggregation.discrete_noise import discrete_gaussian, skellam
from rayfl.aggregation.discrete_sums import in_integers, padded, rotated, shortened, turned_back, wrapped
from rayfl.aggregation.secure_sum import step_of
from rayfl.engine.round_context import RoundContext
from rayfl.messages.compressors import SecureAggregation
from rayfl.messages.privacy import Mechanism
from rayfl.randomness import RandomStreams

_log = logging.getLogger("rayfl")


@dataclass(frozen=True)
class NoisedSum:
    """A round's sum in which each client has a share of the noise (``privacy.mechanism``).

    Attributes:
        rule: the section ``compression``; its levels are the integers, and its modulus that of the sum.
        mechanism: the distribution of the noise.
        norm: C, the largest Euclidean norm of a change.
        deviation: z C / sqrt(n), standard deviation of the noise that one of n clients adds to each entry.
        round: t, 0-indexed.
        streams: the experiment's randomness.
    """

    rule: SecureAggregation
    mechanism: Mechanism
    norm: float
    deviation: float
    round: int
    streams: RandomStreams

    @classmethod
    def of(cls, context: RoundContext, round: int) -> NoisedSum | None:
        """Returns the sum of a round, 0-indexed; None where noise is not added in this way."""
        privacy, rule = context.privacy, context.secure_sum
        if not privacy.distributed or rule is None or privacy.clip_norm is None:
            return None
        count = len(context.cohort(round))
        deviation = privacy.noise_multiplier * privacy.clip_norm / math.sqrt(max(count, 1))
        return cls(rule, privacy.mechanism, privacy.clip_norm, deviation, round, context.streams)

    @property
    def step(self) -> float:
        """gamma, the distance of two levels."""
        return step_of(self.rule.clip, self.rule.bits)

    def encoded(self, changes: Tensor, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns what clients add to the sum, before it is taken modulo 2^M; and of whom no entry was clipped.

        The sum of numbers modulo 2^M is that of the numbers, modulo 2^M. Without it it can be seen what wraps.

        Args:
            changes: of shape (N, P).
            clients: their ids.

        Returns:
            Integers as float64 of shape (N, d), and bool of shape (N,).
        """
        signs = self.signs(changes.shape[1], changes.device)
        values = rotated(shortened(changes.double(), self.norm), signs) / self.step
        most = 2.0 ** (self.rule.bits - 1)
        generators = [self.streams.generator("compression", self.round, client) for client in clients]
        integers = in_integers(values.clamp(-most, most), self.norm / self.step, generators)
        noise = np.stack([self._noise(client, len(signs)) for client in clients]).astype(np.float64)
        return integers + on_device(noise, changes.device), (values.abs() <= most).all(1)

    def decoded(self, total: Tensor, count: int, entries: int) -> Tensor:
        """Returns the mean change of clients, float64 of shape (P,), and says how many entries of the sum wrapped.

        Args:
            total: the sum of what ``count`` clients have added, of shape (d,).
            count: clients.
            entries: P.
        """
        found = wrapped(total, self.rule.modulus_bits)
        if lost := int((found != total).sum()):
            _log.warning(
                "compression.modulus_bits=%d: in round %d %d of %d entries of the sum wrapped",
                self.rule.modulus_bits, self.round + 1, lost, len(total),
            )  # fmt: skip
        return self.alone(found[None], entries)[0] / count

    def alone(self, integers: Tensor, entries: int) -> Tensor:
        """Returns the changes that integers of shape (N, d) stand for, float64 of shape (N, P)."""
        return turned_back(integers, self.signs(entries, integers.device), entries) * self.step

    def signs(self, entries: int, device: torch.device) -> Tensor:
        """Returns the signs of the round's rotation, which all clients and the server know; of shape (d,)."""
        drawn = self.streams.generator("privacy.rotation", self.round).integers(2, size=padded(entries))
        return on_device(1.0 - 2.0 * drawn, device)

    def _noise(self, client: int, size: int) -> np.ndarray:
        generator = self.streams.generator("privacy.discrete", self.round, client)
        deviation = self.deviation / self.step
        if self.mechanism == "skellam":
            return skellam(generator, deviation**2, size)
        return discrete_gaussian(generator, deviation, size)
