"""Small clients whose labels change their meaning from stage to stage, for toys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.support.toys import ListDataset


class Drifting(ListDataset):
    """Clients whose labels follow one rule; from stage to stage some of them count their classes further.

    Args:
        sizes: samples by client.
        concepts: by stage and client, how far classes are counted on.
        rounds: of a stage; the last one goes on.
    """

    def __init__(self, sizes: Sequence[int], concepts: Sequence[Sequence[int]], rounds: int = 4) -> None:
        generator = torch.Generator().manual_seed(0)
        rule = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        drawn = [torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in sizes]
        self._stages = [
            [(x, ((x @ rule).argmax(1) + c) % 3) for x, c in zip(drawn, row, strict=True)] for row in concepts
        ]
        self._rounds = rounds
        super().__init__(self._stages[0])

    def stage_of(self, round: int) -> int:
        return min(round // self._rounds, len(self._stages) - 1)

    def at(self, stage: int) -> ListDataset:
        return ListDataset(self._stages[stage])
