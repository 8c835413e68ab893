"""What a server learns from a secure sum, and what the sum costs; nothing here is encrypted.

Clients round what they send to integers and add masks that cancel in the sum of all. The server sees that sum alone,
modulo a power of 2. As long as it does not wrap, it is the sum of the integers, masks or not. So a simulation needs the
rounding, the size of what is sent, and who must answer for the masks of others to be removed.

Sources: Bonawitz et al.: Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017; Bell,
Bonawitz, Gascon, Lepoint, Raykova: Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, CCS 2020 (shares
for some neighbours). Their texts were not at hand: the protocol is from memory. The options mean what those of Flower's
SecAgg+ do, whose documentation and code were read, except that changes are clipped, and not models.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from rayfl.aggregation.compression import on_device

_KEY_BYTES = 32
"""Of a public key on a curve of 256 bits."""
_SHARE_BYTES = 32
"""Of a share of a secret of 256 bits."""
_SEAL_BYTES = 28
"""What authenticated encryption adds to a message: a nonce of 12 bytes and a tag of 16."""
_FEWEST = 2
"""Shares that a secret needs at least; with one, every holder would know it."""


def in_levels(change: Tensor, clip: float, bits: int, generator: np.random.Generator) -> Tensor:
    """Returns each entry clipped, and rounded at random to a multiple of ``step_of(clip, bits)``; right on average.

    The levels are the same for all clients and tensors. Entries that are not finite stay, so that they are found.

    Args:
        change: of shape (P,).
        clip: largest magnitude.
        bits: b, for 2^b + 1 levels from minus to plus ``clip``.
        generator: draws one number an entry.
    """
    step, draws = step_of(clip, bits), on_device(generator.random(len(change)), change.device)
    wide = change.double()  # float32 has too few digits for a level of 2^22 and the chance beside it
    levels = (wide.clamp(-clip, clip) / step + draws).floor()
    return torch.where(wide.isfinite(), levels * step, wide).to(change.dtype)


def step_of(clip: float, bits: int) -> float:
    """Returns the distance of two levels."""
    return float(clip / 2 ** (bits - 1))


def most_weight(bits: int, modulus_bits: int) -> int:
    """Returns the largest sum of weights with which no sum of weighted messages wraps.

    An entry is one of the integers up to 2^(b-1) in magnitude, and the sum one of those below 2^(modulus_bits - 1).
    """
    return ((1 << modulus_bits - 1) - 1) // (1 << bits - 1)


def summed_bytes(entries: int, modulus_bits: int) -> int:
    """Returns the bytes of a masked message: integers below the modulus, one for each entry and one for the weight."""
    return ((entries + 1) * modulus_bits + 7) // 8


def protocol_bytes(holders: int) -> int:
    """Returns the bytes that a client sends for the masks to be removed.

    These are two public keys, and for each other holder two shares of its own secrets, encrypted together, and later
    one share of that holder's secrets.

    Args:
        holders: clients that have shares of its secrets, with itself.
    """
    return 2 * _KEY_BYTES + (holders - 1) * (2 * _SHARE_BYTES + _SEAL_BYTES + _SHARE_BYTES)


def shares_needed(holders: int, threshold: float) -> int:
    """Returns how many shares of a secret reveal it.

    Args:
        holders: of shares.
        threshold: share of them.
    """
    return max(math.ceil(threshold * holders - 1e-9), _FEWEST)


def holders_of(place: int, cohort: Sequence[int], neighbours: int | None) -> list[int]:
    """Returns the clients that have shares of a client's secrets, with itself.

    Args:
        place: of the client in ``cohort``.
        cohort: the clients of a round, in the order of a ring.
        neighbours: k, half of them on each side; None: all others.
    """
    count = len(cohort)
    if neighbours is None or neighbours >= count - 1:
        return list(cohort)
    side = neighbours // 2
    return [cohort[(place + offset) % count] for offset in range(-side, side + 1)]


def without_enough(
    cohort: Sequence[int], answered: Collection[int], neighbours: int | None, threshold: float
) -> list[int]:
    """Returns the clients of whose secrets too few shares come back for the sum to be unmasked.

    Needed are the mask of each client that has answered, and the keys of each one that has not.

    Args:
        cohort: the clients that began the round, in the order of a ring.
        answered: those that have answered.
        neighbours: see :func:`holders_of`.
        threshold: share of the holders whose shares are needed.
    """
    found, there = [], set(answered)
    for place, client in enumerate(cohort):
        holders = holders_of(place, cohort, neighbours)
        if len(there.intersection(holders)) < shares_needed(len(holders), threshold):
            found.append(client)
    return found
