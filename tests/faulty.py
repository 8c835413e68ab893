"""A method whose clients fail on request, in any process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Literal

import torch

from algorithms.scaffold import Scaffold
from rayfl.aggregation import Weighted
from rayfl.engine import engine
from rayfl.engine.client import Client
from rayfl.errors import DeviceLostError
from rayfl.params import Tree


class Faulty(Scaffold):
    """SCAFFOLD, which has states and weights that depend on the size of the cohort, with failures.

    Attributes:
        failing: pairs (round, client) that fail, rounds 0-indexed.
        how: raise an error, return or keep non-finite values, hang, ask for more memory than there is, end the
            process as the system does when memory runs out, or lose the process's device, as a GPU's context is lost.
        marker: a file; a failure takes place only if it does not exist yet, and creates it.
    """

    name: str = "faulty"
    failing: tuple[tuple[int, int], ...] = ()
    how: Literal["raise", "diverge", "spoil", "hang", "exhaust", "die", "lose"] = "raise"
    marker: str | None = None

    async def local_update(self, client: Client, model: Tree, control: Tree) -> Weighted:
        result = await super().local_update(client, model, control)
        if (client.round, client.id) in self.failing and not self._done():
            if self.how == "raise":
                raise RuntimeError(f"made up at {object()}")
            if self.how == "hang":
                time.sleep(600)
            if self.how == "exhaust":
                torch.zeros(1 << 50)
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "lose":
                engine.check_context = _lost
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if self.how == "spoil":
                client.state["control"] = {name: leaf / 0 for name, leaf in client.state["control"].items()}
                return result
            return Weighted({**result.tree, "model": {n: torch.full_like(v, torch.nan) for n, v in model.items()}})
        return result

    def _done(self) -> bool:
        if self.marker is None:
            return False
        existed = Path(self.marker).exists()
        Path(self.marker).touch()
        return existed


def _lost(device: torch.device, error: Exception | None = None) -> None:
    """From now on this process computes nowhere."""
    raise DeviceLostError(f"this process can no longer compute on {device}: {error}")
