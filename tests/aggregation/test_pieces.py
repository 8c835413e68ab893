"""Sums that travel in pieces are the sums that travel whole, to the bit."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Sequence

import pytest
import torch

from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.aggregation.pieces import Gathered, Piece, piece_of, stretches_of, without_limbs
from rayfl.params import Tree
from tests.support.toys import assert_equal


def contribution(seed: int, dtype: torch.dtype, alike: bool) -> Weighted:
    """A tree with a number; ``alike``: half of it is the same for all."""
    generator = torch.Generator().manual_seed(seed)
    same = torch.linspace(-3, 3, 50, dtype=dtype) if alike else torch.randn(50, generator=generator, dtype=dtype)
    tree = {"b": {"own": torch.randn(7, 11, generator=generator, dtype=dtype), "same": same}, "a": 0.1 * (seed + 1)}
    return Weighted(tree, seed + 1)


def sums(counts: Sequence[int], dtype: torch.dtype, alike: Sequence[bool]) -> list[ExactSum]:
    """Sums of that many contributions each, as from other processes."""
    found, seed = [], 0
    for count, same in zip(counts, alike, strict=True):
        total = ExactSum()
        for _ in range(count):
            total.add(contribution(seed, dtype, same))
            seed += 1
        found.append(total)
    return found


def sent(total: ExactSum) -> ExactSum:
    """The sum in another process."""
    found: ExactSum = pickle.loads(pickle.dumps(total))
    return found


def pieces_of(total: ExactSum, size: int) -> list[Piece]:
    """Its pieces in another process, the last one first."""
    ends = reversed(list(stretches_of(without_limbs(total), size)))
    return [pickle.loads(pickle.dumps(piece_of(total, *stretch))) for stretch in ends]


def mean_of_pieces(parts: Sequence[ExactSum], size: int, whole: Sequence[int] = ()) -> Tree:
    gathered = Gathered()
    for number, part in enumerate(map(sent, parts)):
        gathered.begin(part if number in whole else sent(without_limbs(part)))
        for piece in () if number in whole else pieces_of(part, size):
            gathered.add(piece)
    if not whole:
        assert not gathered.total.received  # one sum's memory, however many there are
    return gathered.total.mean()


@pytest.mark.parametrize("size", [16, 160, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("counts", [(3, 2, 4), (1, 3, 1), (3, 1), (2,), (1,), (1, 1, 2)])
@pytest.mark.parametrize("alike", [(True, True, True), (True, False, True), (False, True, True)])
def test_pieces_have_the_bits_of_whole_sums(
    counts: tuple[int, ...], dtype: torch.dtype, alike: tuple[bool, ...], size: int
) -> None:
    parts = sums(counts, dtype, alike[: len(counts)])
    expected = ExactSum()
    for part in map(sent, parts):
        expected.merge(part)
    mean = expected.mean()
    assert_equal(mean_of_pieces(parts, size), mean)
    for whole in ([0], [len(parts) - 1]):
        assert_equal(mean_of_pieces(parts, size, whole), mean)


def test_many_sums_carry() -> None:
    """More contributions than the low limbs have room for without a carry."""
    parts = sums([600, 600, 3], torch.float32, [False] * 3)
    expected = ExactSum()
    for part in map(sent, parts):
        expected.merge(part)
    assert_equal(mean_of_pieces(parts, 320), expected.mean())


def test_sums_that_are_unlike_are_refused_before_anything_changes() -> None:
    first, other = sums([2, 2], torch.float32, [False] * 2)
    strange = ExactSum()
    for _ in range(2):
        strange.add(Weighted({"c": torch.ones(3)}))
    gathered = Gathered()
    for part in (first, other):
        gathered.begin(without_limbs(part))
        for piece in pieces_of(part, 320):
            gathered.add(piece)
        with pytest.raises(ValueError, match="contributions differ in structure"):
            gathered.begin(without_limbs(strange))
    first.merge(other)
    assert_equal(gathered.total.mean(), first.mean())


def test_the_receiver_has_one_sum_and_a_piece_in_memory() -> None:
    elements, messages = 20_000, []
    for seed in range(0, 12, 2):
        part = ExactSum()
        for one in (seed, seed + 1):
            part.add(Weighted({"w": torch.randn(elements, generator=torch.Generator().manual_seed(one))}))
        ends = stretches_of(part, 16 * elements // 10)
        messages.append([pickle.dumps(one) for one in (without_limbs(part), *(piece_of(part, *at) for at in ends))])
    gathered = Gathered()
    tracemalloc.start()
    try:
        for head, *pieces in messages:
            gathered.begin(pickle.loads(head))
            for piece in pieces:
                gathered.add(pickle.loads(piece))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The sum itself is PyTorch's memory, which is not traced.
    assert gathered.total.limbs is not None
    assert gathered.total.limbs.high.nbytes + gathered.total.limbs.low.nbytes == 16 * elements
    assert not gathered.total.received
    assert 1.6 * elements < peak < 2 * 1.6 * elements
