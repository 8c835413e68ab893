"""What a secure sum is of: integers with masks that cancel, who must answer for them, and what is sent."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.aggregation.secure_sum import (
    holders_of,
    in_levels,
    most_weight,
    protocol_bytes,
    shares_needed,
    step_of,
    summed_bytes,
    without_enough,
)
from rayfl.messages.compressors import SecureAggregation

CHANGE = torch.randn(50, generator=torch.Generator().manual_seed(0))


def rounded(clip: float, bits: int, seed: int = 0, change: torch.Tensor = CHANGE) -> torch.Tensor:
    return in_levels(change, clip, bits, np.random.default_rng(seed))


@pytest.mark.parametrize(("clip", "bits"), [(1.0, 2), (4.0, 4), (8.0, 22)])
def test_entries_are_clipped_and_rounded_to_levels_that_all_clients_have(clip: float, bits: int) -> None:
    step = step_of(clip, bits)
    found = torch.stack([rounded(clip, bits, seed) for seed in range(3000)]).double()
    levels = found / step
    assert torch.equal(levels, levels.round())
    clipped = CHANGE.double().clamp(-clip, clip)
    assert float((found - clipped).abs().max()) < step
    assert float((found.mean(0) - clipped).abs().max()) < 4 * step / 2 / 3000**0.5, "right on average"
    assert torch.equal(rounded(clip, bits, change=torch.zeros(5)), torch.zeros(5)), "no change is a level"


def test_what_is_not_finite_stays_to_be_found() -> None:
    change = torch.tensor([float("nan"), float("inf"), 100.0, -100.0])
    found = rounded(8.0, 8, change=change)
    assert found[0].isnan() and found[1].isinf() and found[2:].tolist() == [8.0, -8.0]


@pytest.mark.parametrize(
    ("bits", "modulus_bits", "lost"), [(22, 32, ()), (8, 16, (1,)), (4, 12, (0, 3, 4)), (16, 64, (2,))]
)
def test_the_exact_mean_is_what_the_server_decodes(bits: int, modulus_bits: int, lost: tuple[int, ...]) -> None:
    """The protocol in integers: masks of pairs that cancel, own masks, and those of clients that drop out."""
    clients, entries, clip, generator = 7, 200, 8.0, np.random.default_rng(bits)
    weights = generator.integers(1, min(most_weight(bits, modulus_bits) // clients, 10**6) + 1, clients)
    changes = torch.from_numpy(generator.normal(0, 6, (clients, entries)))
    decoded = [rounded(clip, bits, client, changes[client]) for client in range(clients)]
    step, modulus = step_of(clip, bits), 1 << modulus_bits
    # Python's integers: a wrap would be the test's own otherwise.
    integers = [[int(value) for value in (one / step).tolist()] for one in decoded]

    def drawn() -> list[int]:
        return [int(high) << 32 | int(low) for high, low in generator.integers(0, 1 << 32, (entries, 2))]

    pairs = {(i, j): drawn() for i in range(clients) for j in range(i + 1, clients)}
    own = [drawn() for _ in range(clients)]
    sent = {}
    for client in range(clients):
        masked = [
            int(weights[client]) * value + mask for value, mask in zip(integers[client], own[client], strict=True)
        ]
        for (i, j), mask in pairs.items():
            sign = (client == i) - (client == j)
            masked = [value + sign * one for value, one in zip(masked, mask, strict=True)]
        sent[client] = [value % modulus for value in masked]
    there = [client for client in range(clients) if client not in lost]
    total = [sum(column) for column in zip(*(sent[client] for client in there), strict=True)]
    for client in there:  # their own masks, from shares
        total = [value - mask for value, mask in zip(total, own[client], strict=True)]
    for (i, j), mask in pairs.items():  # what those that dropped out would have cancelled, from shares of their keys
        left = (i in there and j in lost) - (j in there and i in lost)
        total = [value - left * one for value, one in zip(total, mask, strict=True)]
    signed = [(value + modulus // 2) % modulus - modulus // 2 for value in total]
    weight = int(sum(weights[client] for client in there))
    server = torch.tensor([value * step / weight for value in signed], dtype=torch.float64)

    mean = ExactSum()
    for client in there:
        mean.add(Weighted({"w": decoded[client]}, int(weights[client])))
    assert torch.equal(mean.mean()["w"], server)


def test_one_more_would_wrap() -> None:
    for bits, modulus_bits in ((22, 32), (8, 9), (2, 64), (24, 25)):
        most, largest = most_weight(bits, modulus_bits), 1 << bits - 1
        assert most * largest < 1 << modulus_bits - 1 <= (most + 1) * largest
    assert most_weight(22, 32) == 1023


def test_a_message_that_fits_into_no_modulus_is_refused() -> None:
    assert SecureAggregation(bits=8, modulus_bits=9).most_weight == 1
    with pytest.raises(ValidationError, match="bits must be below modulus_bits"):
        SecureAggregation(bits=8, modulus_bits=8)
    with pytest.raises(ValidationError, match="multiple of 2"):
        SecureAggregation(neighbours=3)


def test_bytes() -> None:
    assert summed_bytes(99, 32) == 400, "one more entry for the weight"
    assert summed_bytes(2, 11) == 5
    assert protocol_bytes(1) == 64
    assert protocol_bytes(8) == 64 + 7 * (64 + 28 + 32)
    assert SecureAggregation().beside(8) == protocol_bytes(8)
    assert SecureAggregation(neighbours=4).beside(8) == protocol_bytes(5)
    assert SecureAggregation(neighbours=4).beside(4) == protocol_bytes(4)
    assert SecureAggregation().encoded(CHANGE, (50,), np.random.default_rng(0))[1] == 51 * 4


def test_shares() -> None:
    assert [shares_needed(count, 0.6) for count in (2, 3, 5, 8, 10)] == [2, 2, 3, 5, 6]
    assert shares_needed(10, 0.01) == 2
    ring = [4, 0, 3, 1, 2]
    assert holders_of(0, ring, None) == ring and holders_of(0, ring, 4) == ring
    assert holders_of(0, ring, 2) == [2, 4, 0]
    assert all(set(holders_of(i, ring, 2)) >= {a, b} for i, (a, b) in enumerate(pairwise(ring)))


def test_too_few_answers_anywhere_are_found() -> None:
    ring = list(range(10))
    assert without_enough(ring, range(6), None, 0.6) == []
    assert without_enough(ring, range(5), None, 0.6) == ring
    # Seven answer, more than 0.6 of all, and yet of the three shares for clients 7 to 9 one or none comes back.
    assert without_enough(ring, range(7), 2, 0.6) == [7, 8, 9]
    assert without_enough(ring, [0, 1, 3, 4, 6, 7, 9], 2, 0.6) == []
