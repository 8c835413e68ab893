"""What compressed changes become, and what they cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rayfl.aggregation.compression import dense_bytes, entries_kept, sparse_bytes
from rayfl.messages.compressors import Compressor, Quantize, RandomK, SecureAggregation, Sign, TopK

SIZES = (30, 0, 12, 1)
CHANGE = torch.randn(43, generator=torch.Generator().manual_seed(0))
COMPRESSORS = [
    *(TopK(share=0.2), RandomK(share=0.2), RandomK(share=0.2, error_feedback=True), Quantize(bits=3), Sign()),
    SecureAggregation(),
]


def sent(compressor: Compressor, change: torch.Tensor = CHANGE, seed: int = 0) -> torch.Tensor:
    return compressor.encoded(change, SIZES, np.random.default_rng(seed))[0]


def test_the_largest_entries_are_sent() -> None:
    found = sent(TopK(share=0.2))
    kept = found != 0
    assert int(kept.sum()) == 9  # 8.6 rounded up
    assert float(CHANGE[kept].abs().min()) >= float(CHANGE[~kept].abs().max())
    torch.testing.assert_close(found[kept], CHANGE[kept], atol=0, rtol=0)


def test_random_entries_are_sent_and_right_on_average() -> None:
    found = [sent(RandomK(share=0.2), seed=seed) for seed in range(4000)]
    assert all(int((one != 0).sum()) == 9 for one in found)
    assert float((torch.stack(found).mean(0) - CHANGE).abs().max()) < 0.2
    as_is = sent(RandomK(share=0.2, error_feedback=True))
    kept = as_is != 0
    torch.testing.assert_close(as_is[kept], CHANGE[kept], atol=0, rtol=0)
    torch.testing.assert_close(sent(RandomK(share=0.2))[kept], CHANGE[kept] * 43 / 9)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.first_case
def test_entries_are_rounded_to_levels_and_right_on_average(bits: int) -> None:
    levels = 2 ** (bits - 1) - 1
    found = torch.stack([sent(Quantize(bits=bits), seed=seed) for seed in range(3000)])
    start = 0
    for size in SIZES:
        if not size:
            continue
        part, mine = CHANGE[start : start + size], found[:, start : start + size]
        step = float(part.abs().max()) / levels
        scaled = mine / step
        torch.testing.assert_close(scaled, scaled.round(), atol=1e-4, rtol=0)
        assert float((mine - part).abs().max()) <= step * (1 + 1e-5)
        assert float((mine.mean(0) - part).abs().max()) < 4 * step / 2 / 3000**0.5
        start += size
    assert float(found[:, -1].sub(CHANGE[-1]).abs().max()) < 1e-6, "the largest magnitude is a level"


def test_signs_have_the_mean_magnitude_of_their_tensor() -> None:
    found = sent(Sign())
    torch.testing.assert_close(found[:30], CHANGE[:30].sign() * CHANGE[:30].abs().mean())
    torch.testing.assert_close(found[30:42], CHANGE[30:42].sign() * CHANGE[30:42].abs().mean())
    assert sent(Sign(), torch.zeros(43)).abs().max() == 0


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_no_change_stays_none(compressor: Compressor) -> None:
    assert_zero = sent(compressor, torch.zeros(43))
    assert torch.equal(assert_zero, torch.zeros(43))


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_types_stay(compressor: Compressor, dtype: torch.dtype) -> None:
    assert sent(compressor, CHANGE.to(dtype)).dtype == dtype


@pytest.mark.parametrize("compressor", [c for c in COMPRESSORS if c.error_feedback], ids=str)
def test_what_is_fed_back_shrinks(compressor: Compressor) -> None:
    """A contraction, without which memory would grow: ||x - C(x)|| < ||x||."""
    for seed in range(20):
        change = torch.randn(43, generator=torch.Generator().manual_seed(seed))
        assert float((change - sent(compressor, change, seed)).norm()) < float(change.norm())


def test_bytes() -> None:
    assert [entries_kept(43, share) for share in (1e-9, 0.1, 0.5, 1)] == [1, 5, 22, 43]
    assert entries_kept(10, 0.3) == 3  # 0.3 * 10 is 3.0000000000000004 elsewhere
    assert sparse_bytes(1000, 10, 4) == 10 * 4 + 10 * 4, "an index each"
    assert sparse_bytes(1000, 100, 4) == 100 * 4 + 125, "a bit each"
    assert dense_bytes(SIZES, 1) == 4 + 4 + 2 + 4 + 1 + 4
    assert dense_bytes(SIZES, 8) == 43 + 12
    assert TopK(share=0.2).encoded(CHANGE, SIZES, np.random.default_rng(0))[1] == 9 * 4 + 6
    assert RandomK(share=0.2).encoded(CHANGE.double(), SIZES, np.random.default_rng(0))[1] == 9 * 8
    assert Quantize(bits=4).encoded(CHANGE, SIZES, np.random.default_rng(0))[1] == 15 + 4 + 6 + 4 + 1 + 4
