"""A method whose clients fail on request, in any process."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Literal

import torch

from algorithms.scaffold import Scaffold
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine import engine
from rayfl.engine.client import Client
from rayfl.errors import DeviceLostError
from rayfl.params import Tree
from rayfl.tasks.base import Predictor


class MuteError(Exception):
    """An error that has no message."""

    def __str__(self) -> str:
        raise ValueError("made up")


class Faulty(Scaffold):
    """SCAFFOLD, which has states and weights that depend on the size of the cohort, with failures.

    Attributes:
        failing: pairs (round, client) that fail, rounds 0-indexed.
        how: raise an error, also one that cannot say its message; return or keep non-finite values; keep a key that
            no commit can hold; be slow, hang, or hang so that no other thread of the process can run; let somebody
            press Ctrl-C twice; ask for more memory than there is; end the process by an exception, by a call, by a
            wrong address, or as the system does when memory runs out; lose the process's device, as a GPU's context
            is lost.
        marker: a file; a failure takes place only if it does not exist yet, and creates it.
    """

    name: str = "faulty"
    failing: tuple[tuple[int, int], ...] = ()
    how: Literal[
        "raise",
        "mute",
        "diverge",
        "spoil",
        "slash",
        "slow",
        "hang",
        "seize",
        "signal",
        "exhaust",
        "exit",
        "interrupt",
        "quit",
        "crash",
        "die",
        "lose",
    ] = "raise"
    marker: str | None = None

    async def local_update(self, client: Client, model: Tree, control: Tree) -> Weighted:
        result = await super().local_update(client, model, control)
        if (client.round, client.id) in self.failing and not self._done():
            if self.how == "raise":
                raise RuntimeError(f"made up at {object()}")
            if self.how == "mute":
                raise MuteError
            if self.how == "slash":
                client.state["control/global"] = client.state["control"]
                return result
            if self.how == "slow":
                time.sleep(2.5)
                return result
            if self.how == "signal":
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGINT)
            if self.how == "hang":
                print("about to hang")
                time.sleep(600)
            if self.how == "seize":
                ctypes.PyDLL(None).sleep(600)
            if self.how == "exit":
                sys.exit(3)
            if self.how == "interrupt":
                raise KeyboardInterrupt
            if self.how == "quit":
                os._exit(3)
            if self.how == "crash":
                ctypes.string_at(0)
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


class FaultyRows(Scaffold):
    """SCAFFOLD whose process ends when it is asked for the models of a client.

    Attributes:
        failing: pairs (round, client), rounds 0-indexed.
    """

    name: str = "faulty_rows"
    failing: tuple[tuple[int, int], ...] = ()

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        if (client.round, client.id) in self.failing:
            os._exit(3)
        return await super().predictors(client, server)


def _lost(device: torch.device, error: Exception | None = None) -> None:
    """From now on this process computes nowhere."""
    if isinstance(error, DeviceLostError):
        raise error
    raise DeviceLostError(f"this process can no longer compute on {device}: {error}")
