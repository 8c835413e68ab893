"""Transfers of GPUs: through pinned memory, and on a stream of their own."""

from __future__ import annotations

import pytest
import torch

from rayfl.engine import transfers
from rayfl.engine.transfers import copy_stream, join, move_trees
from tests.support.elsewhere import PRETENDED, elsewhere
from tests.support.problems import CPU
from tests.support.toys import assert_equal

pytestmark = PRETENDED


def test_transfers_of_gpus_go_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done for a GPU, with a stub in the place of its memory and its streams."""
    made: list[int] = []
    empty = torch.empty

    def pinned(size: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        made.append(size)
        return empty(size, dtype=dtype)

    class Device:
        type = "cuda"

    parts = [torch.rand(3), torch.rand(2)]
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking=False: (self, non_blocking))
    sent, without_waiting = transfers.joined_on(parts, Device())  # type: ignore[arg-type, misc]
    assert torch.equal(sent, torch.cat(parts))
    assert without_waiting
    assert made == [5]


def test_on_other_devices_there_is_no_copy_stream() -> None:
    with elsewhere() as device, copy_stream(device):
        (moved,) = move_trees([{"a": torch.ones(3)}], device)
        join(device, [moved["a"]])
        assert_equal(move_trees([moved], CPU)[0], {"a": torch.ones(3)})
